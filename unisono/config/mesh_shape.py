"""The shape of the device mesh: one axis for each way to divide the model. This module needs no torch.

Ranks are numbered along the last axis first, so that processes that communicate most are close to each other:

    replicate=2, shard=2       shard 0   shard 1
               replica 0       rank 0    rank 1         share the parameters of one replica
               replica 1       rank 2    rank 3         share those of another replica
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

FILL = -1
"""The size of an axis that takes all processes that the other axes leave."""


class MeshShape(NamedTuple):
    """The size of each axis, outermost first."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """The number of processes."""
        return prod(self)

    @property
    def data(self) -> int:
        """The number of processes with different samples."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis."""
        found = {}
        for name, size in zip(reversed(self._fields), reversed(self), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self._fields}

    def lines(self, *names: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ only on these axes, each in the order of ranks."""
        rest = [name for name in self._fields if name not in names]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            groups.setdefault(tuple(coordinates[name] for name in rest), []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]


def wanted(parallel: Any) -> dict[str, int]:
    """Return the sizes in the settings by axis."""
    return {name: getattr(parallel, name) for name in MeshShape._fields}


def fill(sizes: dict[str, int], processes: int) -> MeshShape | None:
    """Return the mesh of these sizes with `FILL` resolved; None if the processes do not fit."""
    known = prod(size for size in sizes.values() if size != FILL)
    found = {name: processes // known if size == FILL else size for name, size in sizes.items()}
    axes = MeshShape(**found)
    return axes if axes.size == processes and list(sizes.values()).count(FILL) <= 1 else None


def layout(parallel: Any, axes: MeshShape) -> str:
    """Return the divisions that bits depend on, as text; "whole" if there are none.

    Replicas, shards and stages do not change any addition, except for parameters that stages share
    (train/pipelining/stage_state.py). The divisions below do: a sum over features, for example, is made in parts.
    """
    sizes = [f"{name}={size}" for name in ("context", "tensor") if (size := getattr(axes, name)) > 1]
    ways = [name for name in ("sequence_parallel", "loss_parallel") if axes.tensor > 1 and getattr(parallel, name)]
    return " ".join(sizes + ways) or "whole"


def fitting(sizes: dict[str, int], processes: int) -> Iterator[int]:
    """Yield numbers of processes that fit these sizes, the nearest first, and the larger of two equally near ones."""
    known = prod(size for size in sizes.values() if size != FILL)
    if FILL not in sizes.values():
        yield known
        return
    low, high = processes // known * known, -(-processes // known) * known
    yield from sorted({max(low, known), max(high, known)}, key=lambda n: (abs(n - processes), -n))
