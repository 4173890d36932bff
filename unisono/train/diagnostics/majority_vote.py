"""Majority votes: find out which of several processes computed a wrong result. Numbers only.

    rank 0  a          rank 0  a a        rank 0  a b        rank 0  a a        rank 0  a
    rank 1  a          rank 1  a a        rank 1  b b        rank 1  b b        rank 1  b
    rank 2  b                                                                   rank 2  c
    2 is wrong         all agree          0 is wrong         undecided          undecided

A process with two different results is unreliable, and has no vote. More than half of the other processes must agree.
(Triple modular redundancy: von Neumann, Probabilistic Logics, 1956. Two processes are not enough, unless one of them
contradicts itself.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple


class VoteResult(NamedTuple):
    """The result of a vote.

    agree   whether all results are equal
    right   the result of more than half of the reliable ranks; None: undecided
    wrong   ranks with another result, or with two different ones
    """

    agree: bool
    right: Any
    wrong: tuple[int, ...]


def vote(opinions: Sequence[tuple[int, Hashable]]) -> VoteResult:
    """Return the majority of (rank, result) pairs, in any order, at least one. A rank may have several results."""
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
