"""After a death: divide the missing virtual ranks of a step among the survivors. Numbers only.

    held       process 0: v0 v1 v2    process 1 (dead): v3 v4 v5    process 2: v6 v7
    now        process 0: v0 v1 v2 + v3 v4                          process 2: v6 v7 + v5

Survivors keep the gradients that they hold. The missing virtual ranks are divided among them evenly and in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def assign_missing(pieces: Mapping[int, int], held: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the virtual ranks that each survivor computes in addition.

    Args:
        pieces: the number of micro-batches of each virtual rank. One without any is assigned as well, to survivor 0.
        held: the virtual ranks whose gradients each survivor holds.
    """
    present = {v for virtual_ranks in held for v in virtual_ranks}
    missing = [v for v in sorted(pieces) if v not in present and pieces[v]]
    size = len(held)
    ends = [i * len(missing) // size for i in range(size + 1)]
    assigned = [missing[first:end] for first, end in pairwise(ends)]
    assigned[0] = sorted([*assigned[0], *(v for v in pieces if v not in present and not pieces[v])])
    return assigned
