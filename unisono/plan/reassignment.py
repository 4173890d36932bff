"""After a death: who computes what is missing of a step. Numbers only.

    held       process 0: v0 v1 v2    process 1 (dead): v3 v4 v5    process 2: v6 v7
    now        process 0: v0 v1 v2 + v3 v4                          process 2: v6 v7 + v5

What survivors hold stays where it is; what nobody holds is dealt to them evenly, neighbours together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def assign_missing(pieces: Mapping[int, int], held: Sequence[Sequence[int]]) -> list[list[int]]:
    """The virtual ranks that each survivor computes, or, of those without work (pieces[v] is 0), merely counts as its
    own. `held`: those whose gradients each of them still has."""
    there = {v for of in held for v in of}
    missing = [v for v in sorted(pieces) if v not in there and pieces[v]]
    size = len(held)
    ends = [i * len(missing) // size for i in range(size + 1)]
    dealt = [missing[first:end] for first, end in pairwise(ends)]
    dealt[0] = sorted([*dealt[0], *(v for v in pieces if v not in there and not pieces[v])])
    return dealt
