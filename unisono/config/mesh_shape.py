"""The mesh: processes in rows and columns, one axis for each way in which a model lies over devices. Numbers only.

Ranks count through the mesh from its last axis to its first, so what talks most sits closest together:

    replicate=2, shard=2       shard 0   shard 1
               replica 0       rank 0    rank 1         share the parameters of one model
               replica 1       rank 2    rank 3         share those of another one
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

FILL = -1
"""As an axis's size: whatever number of processes the other axes leave."""


class MeshShape(NamedTuple):
    """The size of every axis, outermost first."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """How many processes there are."""
        return prod(self)

    @property
    def data(self) -> int:
        """How many of them see different samples."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a process stands on each axis."""
        found = {}
        for name, size in zip(reversed(self._fields), reversed(self), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self._fields}

    def lines(self, *names: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ on these axes only, each in the order of ranks."""
        rest = [name for name in self._fields if name not in names]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            where = self.coordinates(rank)
            groups.setdefault(tuple(where[name] for name in rest), []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]


def wanted(parallel: Any) -> dict[str, int]:
    """The sizes that the settings give, by the axis's name."""
    return {name: getattr(parallel, name) for name in MeshShape._fields}


def fill(sizes: dict[str, int], processes: int) -> MeshShape | None:
    """The mesh of these sizes over so many processes, with one `FILL` filled in; None: they do not fit."""
    known = prod(size for size in sizes.values() if size != FILL)
    found = {name: processes // known if size == FILL else size for name, size in sizes.items()}
    axes = MeshShape(**found)
    return axes if axes.size == processes and list(sizes.values()).count(FILL) <= 1 else None


def layout(parallel: Any, axes: MeshShape) -> str:
    """How a model is divided in ways that its bits depend on, in words; "whole": in none.

    Replicas, shards and stages leave every addition where it was (but for what stages share:
    train/pipelining/stage_state.py). These do not: a sum over features, say, is made in parts.
    """
    sizes = [f"{name}={size}" for name in ("context", "tensor") if (size := getattr(axes, name)) > 1]
    ways = [name for name in ("sequence_parallel", "loss_parallel") if axes.tensor > 1 and getattr(parallel, name)]
    return " ".join(sizes + ways) or "whole"


def fitting(sizes: dict[str, int], processes: int) -> Iterator[int]:
    """Numbers of processes that fit these sizes, the nearest first (the larger of two that are as near)."""
    known = prod(size for size in sizes.values() if size != FILL)
    if FILL not in sizes.values():
        yield known
        return
    low, high = processes // known * known, -(-processes // known) * known
    yield from sorted({max(low, known), max(high, known)}, key=lambda n: (abs(n - processes), -n))
