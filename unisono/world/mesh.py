"""The mesh of a run: where this process stands on each axis, and a group of processes for each line through it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.settings.axes import Axes
from unisono.world.collectives import Group
from unisono.world.start import join_lines


@dataclass(frozen=True)
class Mesh:
    """The processes of a run in rows and columns (settings/axes.py). This one is a member of all these groups.

    world      all of them
    data       those that see different samples; they hold the same part of a model, or shards of it
    replicate  of these, those that hold the very same
    shard      of these, those that share one model's parameters
    shards     the shard axis as torch's own classes take it; None: nothing is sharded
    """

    axes: Axes = field(default_factory=Axes)
    world: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)
    replicate: Group = field(default_factory=Group)
    shard: Group = field(default_factory=Group)
    shards: DeviceMesh | None = None


def build_mesh(axes: Axes, world: Group) -> Mesh:
    """The mesh over all processes. Every one of them must call this."""
    assert axes.size == world.size
    alone = Group(device=world.device)
    if axes.replicate == world.size:
        return Mesh(axes, world, world, world, alone)
    shard = _line(axes, world, "shard")
    handle = shard.handle or dist.group.WORLD
    assert handle is not None
    return Mesh(
        axes,
        world,
        _line(axes, world, "replicate", "shard"),
        _line(axes, world, "replicate"),
        shard,
        DeviceMesh.from_group(handle, world.device.type, mesh_dim_names=("shard",)),
    )


def _line(axes: Axes, world: Group, *names: str) -> Group:
    """The processes that differ from this one on these axes only."""
    lines = axes.lines(*names)
    mine = next(line for line in lines if world.rank in line)
    if len(mine) == 1:
        return Group(device=world.device)
    if len(mine) == world.size:
        return world
    near = {i: world.neighbours[member] for i, member in enumerate(mine) if member in world.neighbours}
    handle = join_lines(lines, world.rank, world.size)
    return Group(mine.index(world.rank), len(mine), world.device, near, mine, handle)
