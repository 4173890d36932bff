"""The mesh of a run: where this process stands on each axis, and a group of processes for each line through it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.config.mesh_shape import MeshShape
from unisono.distributed.init import new_line_group
from unisono.distributed.process_group import ProcessGroup


@dataclass(eq=False)
class Mesh:
    """The processes of a run in rows and columns (config/mesh_shape.py). This one is a member of all these groups.

    world      all of them
    data       those that see different samples; they hold the same part of a model, or shards of it
    replicate  of these, those that hold the very same
    shard      of these, those that share its parameters
    tensor     those that share every matrix; they see the same samples, as those of the next two do
    context    those that share every sequence
    pipeline   those that hold one stretch of the layers each
    torchs     the axes of more than one process as torch's own classes take them; None: there is none but replicate
    """

    axes: MeshShape = field(default_factory=MeshShape)
    world: ProcessGroup = field(default_factory=ProcessGroup)
    data: ProcessGroup = field(default_factory=ProcessGroup)
    replicate: ProcessGroup = field(default_factory=ProcessGroup)
    shard: ProcessGroup = field(default_factory=ProcessGroup)
    tensor: ProcessGroup = field(default_factory=ProcessGroup)
    context: ProcessGroup = field(default_factory=ProcessGroup)
    pipeline: ProcessGroup = field(default_factory=ProcessGroup)
    torchs: DeviceMesh | None = None
    _cut: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, init=False)

    def regroup(self) -> None:
        """The world has more or fewer replicas than before (distributed/membership/membership.py): this is its mesh.
        Everybody calls it.

        Where this process stands among those that share its model is as it was, so what it holds stays where it is:
        torch's own mesh, and whoever holds a part of it, only get to know the new groups.
        """
        self.axes = self.axes._replace(replicate=self.world.size // self.unit)
        if self.torchs is None:
            return
        for line, names in ((self.replicate, ["replicate"]), (self.shard, ["shard"])):
            new = _line(self.axes, self.world, *names)
            line.regroup(new.rank, new.size, new.neighbours, new.members, new.handle)
        handles: dict[str, Any] = {}
        for name in self.torchs.mesh_dim_names or ():
            handles[name] = getattr(self, name).handle or dist.group.WORLD
        self.torchs._get_root_mesh()._pg_registry = {handle.group_name: handle for handle in handles.values()}
        for torchs in (self.torchs, *self._cut.values()):
            torchs._dim_group_names = [handles[name].group_name for name in torchs.mesh_dim_names or ()]

    @property
    def unit(self) -> int:
        """So many processes hold a model together, and can only be lost together."""
        return self.axes.size // self.axes.replicate

    @property
    def is_leader(self) -> bool:
        """Of those that see the same samples, is this the one that says what came of them (or of a slice of them)?"""
        return self.tensor.rank == 0 and self.pipeline.rank == self.pipeline.size - 1

    def torch_mesh(self, *axes: str) -> DeviceMesh:
        """torch's mesh of these axes, which have more than one process each."""
        assert self.torchs is not None
        if self.torchs.mesh_dim_names == axes:
            return self.torchs
        if axes not in self._cut:
            self._cut[axes] = self.torchs[axes]
        return self._cut[axes]


def build_mesh(axes: MeshShape, world: ProcessGroup) -> Mesh:
    """The mesh over all processes. Every one of them must call this."""
    mesh = _build(axes, world)
    if world.company is not None:
        world.company.lines = mesh.regroup
        world.company.own()
    return mesh


def _build(axes: MeshShape, world: ProcessGroup) -> Mesh:
    assert axes.size == world.size
    if axes.replicate == world.size:
        alone = ProcessGroup(device=world.device)
        return Mesh(axes, world, world, world, alone, alone, alone, alone)
    lines = {name: _line(axes, world, name) for name in axes._fields}
    whole = axes.shard == 1  # then replicate is all there is to it
    long = [name for name, size in zip(axes._fields, axes, strict=True) if size > 1]
    handles = [lines[name].handle or dist.group.WORLD for name in long]
    return Mesh(
        axes,
        world,
        lines["replicate"] if whole else _line(axes, world, "replicate", "shard"),
        **lines,
        torchs=DeviceMesh.from_group(
            handles if len(long) > 1 else handles[0],  # type: ignore[arg-type]  # all are there
            world.device.type,
            mesh=torch.arange(world.size).view([size for size in axes if size > 1]) if len(long) > 1 else None,
            mesh_dim_names=tuple(long),
        ),
    )


class SiteMesh(NamedTuple):
    """The processes of a run, divided into sites of equal size (exchange=local_sgd). Ranks of a site are consecutive:

        site 0      rank 0 --- rank 1          mesh     of this process's own site: its world is the site
                      |          |
        site 1      rank 2 --- rank 3          across   those at the same place in every site, in the order of sites

    number  of this process's site
    """

    number: int
    mesh: Mesh
    across: ProcessGroup


def build_sites(count: int, world: ProcessGroup) -> SiteMesh:
    """All processes in `count` sites. Every one of them must call this."""
    size = world.size // count
    axes = MeshShape(
        pipeline=count, replicate=size
    )  # any two axes, the outer one for sites: only to count through them
    site = replace(_line(axes, world, "replicate"), members=next(m for m in axes.lines("replicate") if world.rank in m))
    alone = ProcessGroup(device=world.device)
    mesh = Mesh(MeshShape(replicate=size), site, site, site, alone, alone, alone, alone)
    return SiteMesh(world.rank // size, mesh, _line(axes, world, "pipeline"))


def _line(axes: MeshShape, world: ProcessGroup, *names: str) -> ProcessGroup:
    """The processes that differ from this one on these axes only."""
    lines = axes.lines(*names)
    mine = next(line for line in lines if world.rank in line)
    if len(mine) == 1:
        return ProcessGroup(device=world.device, company=world.company)
    if len(mine) == world.size:
        return world
    near = {i: world.neighbours[member] for i, member in enumerate(mine) if member in world.neighbours}
    handle = new_line_group(lines, world.rank, world.size, watched=world.company is not None)
    return ProcessGroup(mine.index(world.rank), len(mine), world.device, world.mixed, near, mine, handle, world.company)
