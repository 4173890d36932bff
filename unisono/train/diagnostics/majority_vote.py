"""Votes: several processes made the same thing, and it did not come out the same: whose is right? Numbers only.

    rank 0  a          rank 0  a a        rank 0  a b        rank 0  a a        rank 0  a
    rank 1  a          rank 1  a a        rank 1  b b        rank 1  b b        rank 1  b
    rank 2  b                                                                   rank 2  c
    2 is wrong         all agree          0 is wrong         nobody knows       nobody knows

Who says two things of the same has shown that it cannot be relied on, and has no vote; of the others more than half
must say the same. (Triple modular redundancy: von Neumann, Probabilistic Logics, 1956; that two are not enough unless
one of them contradicts itself is why it takes three.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple


class VoteResult(NamedTuple):
    """agree   all that was said is the same
    right   what more than half of the reliable ones say; None: nobody knows
    wrong   ranks that said something else, or two things
    """

    agree: bool
    right: Any
    wrong: tuple[int, ...]


def vote(opinions: Sequence[tuple[int, Hashable]]) -> VoteResult:
    """(rank, what it made) of everything that was made, in any order, a rank as often as it likes (at least one)."""
    said: dict[int, set[Hashable]] = {}
    for rank, value in opinions:
        said.setdefault(rank, set()).add(value)
    fickle = {rank for rank, values in said.items() if len(values) > 1}
    steady = {rank: next(iter(values)) for rank, values in said.items() if rank not in fickle}
    (value, count) = Counter(steady.values()).most_common(1)[0] if steady else (None, 0)
    if 2 * count <= len(steady):
        return VoteResult(False, None, tuple(sorted(fickle)))
    wrong = fickle | {rank for rank, other in steady.items() if other != value}
    return VoteResult(not wrong, value, tuple(sorted(wrong)))
