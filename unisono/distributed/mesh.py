"""The mesh of a run: this process's rank on each axis, and a group for the line through it along each axis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.config.mesh_shape import MeshShape
from unisono.distributed.init import new_line_group
from unisono.distributed.membership.membership import membership_of
from unisono.distributed.process_group import ProcessGroup
from unisono.torch_compat.process_groups import replace_groups


@dataclass(eq=False)
class Mesh:
    """The processes of a run on a grid (config/mesh_shape.py). This process is a member of each of these groups.

    Attributes:
        axes: the size of each axis.
        world: all processes.
        data: the processes that compute different samples; they hold the same part of a model, or shards of it.
        replicate: of these, the processes that hold the same part.
        shard: of these, the processes that share its parameters.
        tensor: the processes that share every matrix. They compute the same samples, as those of the next two axes do.
        context: the processes that share every sequence.
        pipeline: the processes that hold different stages of the model.
        device_mesh: torch's mesh of the axes with more than one process; None if replicate is the only such axis.
    """

    axes: MeshShape = field(default_factory=MeshShape)
    world: ProcessGroup = field(default_factory=ProcessGroup)
    data: ProcessGroup = field(default_factory=ProcessGroup)
    replicate: ProcessGroup = field(default_factory=ProcessGroup)
    shard: ProcessGroup = field(default_factory=ProcessGroup)
    tensor: ProcessGroup = field(default_factory=ProcessGroup)
    context: ProcessGroup = field(default_factory=ProcessGroup)
    pipeline: ProcessGroup = field(default_factory=ProcessGroup)
    device_mesh: DeviceMesh | None = None
    _submeshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, init=False)

    def regroup(self) -> None:
        """Adapt to a world that has more or fewer replicas than before (distributed/membership/). Collective.

        This process keeps its rank among those that share its model, and so its part of the model. Only the groups in
        torch's mesh, and in the modules that hold it, are replaced.
        """
        self.axes = self.axes._replace(replicate=self.world.size // self.unit)
        if self.device_mesh is None:
            return
        for line, names in ((self.replicate, ["replicate"]), (self.shard, ["shard"])):
            new = _line(self.axes, self.world, *names)
            line.regroup(new.rank, new.size, new.neighbors, new.hosts, new.members, new.handle)
            line.links = new.links
        handles: dict[str, Any] = {}
        for name in self.device_mesh.mesh_dim_names or ():
            handles[name] = getattr(self, name).handle or dist.group.WORLD
        replace_groups((self.device_mesh, *self._submeshes.values()), handles)

    @property
    def unit(self) -> int:
        """The number of processes that share a model, and are only lost together."""
        return self.axes.size // self.axes.replicate

    @property
    def is_leader(self) -> bool:
        """Whether this process reports the results of its samples, if several compute the same ones (or slices)."""
        return self.tensor.rank == 0 and self.pipeline.rank == self.pipeline.size - 1

    def torch_mesh(self, *axes: str) -> DeviceMesh:
        """Return torch's mesh of these axes, each of which has more than one process."""
        assert self.device_mesh is not None
        if self.device_mesh.mesh_dim_names == axes:
            return self.device_mesh
        if axes not in self._submeshes:
            self._submeshes[axes] = self.device_mesh[axes]
        return self._submeshes[axes]


def build_mesh(axes: MeshShape, world: ProcessGroup) -> Mesh:
    """Build the mesh of all processes. Collective."""
    mesh = _build(axes, world)
    if (membership := membership_of(world)) is not None:
        membership.on_regroup = mesh.regroup
        membership.claim_sockets()
    return mesh


def _build(axes: MeshShape, world: ProcessGroup) -> Mesh:
    assert axes.size == world.size
    if axes.replicate == world.size:
        alone = ProcessGroup(device=world.device)
        return Mesh(axes, world, world, world, alone, alone, alone, alone)
    lines = {name: _line(axes, world, name) for name in axes._fields}
    named = [name for name, size in zip(axes._fields, axes, strict=True) if size > 1]
    handles = [lines[name].handle or dist.group.WORLD for name in named]
    return Mesh(
        axes,
        world,
        lines["replicate"] if axes.shard == 1 else _line(axes, world, "replicate", "shard"),
        **lines,
        device_mesh=DeviceMesh.from_group(
            handles if len(named) > 1 else handles[0],  # type: ignore[arg-type]  # none of them is None
            world.device.type,
            mesh=torch.arange(world.size).view([size for size in axes if size > 1]) if len(named) > 1 else None,
            mesh_dim_names=tuple(named),
        ),
    )


class SiteMesh(NamedTuple):
    """The processes of a run, divided into sites of equal size (exchange=local_sgd). Ranks of a site are consecutive:

        site 0      rank 0 --- rank 1          mesh     of this process's own site: its world is the site
                      |          |
        site 1      rank 2 --- rank 3          across   the processes with the same rank in every site, by site

    Attributes:
        number: the number of this process's site.
        mesh: see above.
        across: see above.
    """

    number: int
    mesh: Mesh
    across: ProcessGroup


def build_sites(count: int, world: ProcessGroup) -> SiteMesh:
    """Divide all processes into `count` sites. Collective."""
    size = world.size // count
    axes = MeshShape(pipeline=count, replicate=size)  # any two axes, the outer one for sites: only to number ranks
    site = replace(_line(axes, world, "replicate"), members=next(m for m in axes.lines("replicate") if world.rank in m))
    alone = ProcessGroup(device=world.device)
    mesh = Mesh(MeshShape(replicate=size), site, site, site, alone, alone, alone, alone)
    return SiteMesh(world.rank // size, mesh, _line(axes, world, "pipeline"))


def _line(axes: MeshShape, world: ProcessGroup, *names: str) -> ProcessGroup:
    """Return the group of the processes that differ from this one on these axes only."""
    lines = axes.lines(*names)
    mine = next(line for line in lines if world.rank in line)
    if len(mine) == 1:
        return ProcessGroup(device=world.device, monitor=world.monitor)
    if len(mine) == world.size:
        return world
    neighbors = {i: world.neighbors[member] for i, member in enumerate(mine) if member in world.neighbors}
    hosts = tuple(
        next(i for i, first in enumerate(mine) if world.hosts[first] == world.hosts[member])
        for member in mine
        if world.hosts
    )
    handle = new_line_group(lines, world.rank, world.size, elastic=world.monitor is not None)
    rank, size = mine.index(world.rank), len(mine)
    line = ProcessGroup(
        rank, size, world.device, world.mixed, world.staged, neighbors, hosts, mine, handle, world.monitor
    )
    line.backend, line.links = world.backend, tuple(world.links[member] for member in mine if world.links)
    return line
