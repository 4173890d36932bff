"""Use a process group that the script itself has made before `unisono.main`.

    torch.distributed.init_process_group("gloo", init_method="tcp://10.0.0.1:29500", rank=rank, world_size=4)
    unisono.main(main, Settings)

Rank and size are the group's. The run uses its store for the rendezvous and its back end for messages. The group
remains when the run is over: the script destroys it.
"""

from __future__ import annotations

import atexit
from dataclasses import replace

import torch
import torch.distributed as dist

from unisono.distributed.process_group import TIMEOUT
from unisono.distributed.rendezvous.connect import TIMED
from unisono.environment import World
from unisono.errors import LoopError, WorldError
from unisono.torch_compat.process_groups import backend_name, default_store, set_timeout

EXISTING = "group://"
"""The store of a World whose processes have a group already."""

REMOVE = "remove init_process_group and destroy_process_group: unisono.main does both (docs/start/from-ddp.md)."


_runs = 0
"""Number of runs that have used the script's group, including this one."""


def existing_group_exists() -> bool:
    """Return whether the script has made a group of several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def take_over(world: World) -> World:
    """Return this process's place in the group that the script has made; `world` if there is none. Collective.

    Raises:
        WorldError: the run cannot use the group.
    """
    if world.dry or not (dist.is_available() and dist.is_initialized()):
        return world
    rank, size = dist.get_rank(), dist.get_world_size()
    if world.launcher == "unisono":
        raise WorldError(
            "The script called init_process_group under unisono run.",
            f"It made a group of {size}; unisono run has started {world.size} and joins them itself.",
            REMOVE,
        )
    if world.size > 1 and world.size != size:
        raise WorldError(
            f"The script's process group has {size} processes, and {world.launcher} has started {world.size}.",
            f"init_process_group was called for rank {rank} of {size}.",
            REMOVE,
        )
    if size == 1:
        return world
    global _runs
    _runs += 1
    shared = store()
    shared.set(f"host-{rank}", world.host)
    hosts = [shared.get(f"host-{other}").decode() for other in range(size)]
    here = [other for other, host in enumerate(hosts) if host == world.host]
    launcher = world.launcher if world.foreign else "script"
    local = replace(world, local_rank=here.index(rank), local_size=len(here))
    return replace(
        local, rank=rank, size=size, store=EXISTING, launcher=launcher, terminal=rank == 0 and world.terminal
    )


def store() -> dist.Store:
    """Return the store of the script's group, with a prefix of this run."""
    return dist.PrefixStore(f"unisono-{_runs}", default_store())


def use_group(device: torch.device, backend: str) -> None:
    """Prepare the script's group for the run's messages.

    Args:
        device: the device from which tensors are sent.
        backend: the back end that the run needs for that device.

    Raises:
        WorldError: the group has another back end for the device.
    """
    group = dist.group.WORLD
    assert group is not None
    found = backend_name(group, torch.device(device.type))
    if backend not in (found, dist.get_backend()):
        raise WorldError(
            f"The script's process group has the wrong back end: {dist.get_backend()}.",
            f"This run sends tensors from {device.type}, for which it needs {backend}; the group has "
            f"{found or 'none'}.",
            f'init_process_group("{backend}", ...), or {REMOVE}',
        )
    if backend in TIMED:
        set_timeout(TIMEOUT)
    atexit.register(_destroy_group)


def _destroy_group() -> None:
    """Destroy the group if the script has not: a process that exits while gloo's threads run sometimes aborts."""
    if dist.is_initialized():
        dist.destroy_process_group()


def refuse_second_group(size: int) -> None:
    """Raise LoopError if the script has made a group of several processes since its run of one process began."""
    if size == 1 and existing_group_exists() and dist.get_backend() != "fake":
        raise LoopError(
            "init_process_group was called inside the script's main function.",
            f"This run has 1 process, and the group {dist.get_world_size()}: each would train alone.",
            f"call it before unisono.main, which then uses the group; or {REMOVE}",
        )
