"""A process group that the script has made itself, before `unisono.main`: the run's processes are those of this group.

    torch.distributed.init_process_group("gloo", init_method="tcp://10.0.0.1:29500", rank=rank, world_size=4)
    unisono.main(main, Settings)

Rank and size are the group's, its store is where the processes meet, and its back end carries what they exchange. The
group stays when the run is over: it is the script's to destroy.
"""

from __future__ import annotations

import atexit
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.distributed.membership.waiting import TIMEOUT
from unisono.environment import World
from unisono.errors import LoopError, WorldError

TAKEN = "group://"
"""The store of a World whose processes have a group already."""

REMOVE = "remove init_process_group and destroy_process_group: unisono.main does both (docs/start/from-ddp.md)."


_runs = 0
"""So many runs have used the script's group, this one included."""


def existing_group_exists() -> bool:
    """Has the script made a group of several processes?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def take_over(world: World) -> World:
    """`world`, or the place of this process in the group that the script has made. Every process of the group must call
    this. Raises WorldError where the group cannot be the run's."""
    if world.dry or not (dist.is_available() and dist.is_initialized()):
        return world
    rank, size = dist.get_rank(), dist.get_world_size()
    asked = f"The script has called init_process_group: rank {rank} of {size}."
    if world.launcher == "unisono":
        raise WorldError(asked, f"unisono run has started {world.size}, and joins them itself.", REMOVE)
    if world.size > 1 and world.size != size:
        raise WorldError(asked, f"{world.launcher} has started {world.size} processes.", REMOVE)
    if size == 1:
        return world
    global _runs
    _runs += 1
    place = store()
    place.set(f"host-{rank}", world.host)
    hosts = [place.get(f"host-{other}").decode() for other in range(size)]
    here = [other for other, host in enumerate(hosts) if host == world.host]
    launcher = world.launcher if world.foreign else "script"
    local = replace(world, local_rank=here.index(rank), local_size=len(here))
    return replace(local, rank=rank, size=size, store=TAKEN, launcher=launcher, terminal=rank == 0 and world.terminal)


def store() -> dist.Store:
    """Where the processes of the script's group meet, for keys of ours."""
    found: dist.Store = distributed_c10d._get_default_store()
    return dist.PrefixStore(f"unisono-{_runs}", found)


def use_group(wire: torch.device, backend: str) -> None:
    """The run's tensors travel by the script's group from now on: from `wire`, which needs this back end. Raises
    WorldError if the group has none for such a device."""
    group = dist.group.WORLD
    assert group is not None
    try:
        found = group._get_backend(torch.device(wire.type)).name()
    except RuntimeError:
        found = ""
    if found != backend:
        asked = f"The script has called init_process_group with the back end {dist.get_backend()}."
        true = (
            f"Tensors of this run are on {wire.type}, for which it has {found or 'none'}, and the run needs {backend}."
        )
        raise WorldError(asked, true, f'init_process_group("{backend}", ...), or {REMOVE}')
    distributed_c10d._set_pg_timeout(TIMEOUT)
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the group if the script has not: a process that exits with gloo's threads at work aborts now and then."""
    if dist.is_initialized():
        dist.destroy_process_group()


def refuse_second_group(size: int) -> None:
    """Raises LoopError if the script has made a group of several processes since a run of one process began."""
    if size == 1 and existing_group_exists() and dist.get_backend() != "fake":
        raise LoopError(
            "init_process_group was called inside the script's main.",
            f"This run has 1 process, and the group {dist.get_world_size()}: each would train alone.",
            f"call it before unisono.main, which takes the group over; or {REMOVE}",
        )
