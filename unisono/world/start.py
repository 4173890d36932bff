"""Into a group of processes and out of it again. A finished job leaves together, so that none aborts at exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.env import World
from unisono.errors import WorldError
from unisono.world.collectives import Group
from unisono.world.shared import find_neighbours

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a silent peer. A peer that dies is noticed at once: its connections break."""

CONNECT = timedelta(seconds=4)
"""How long connecting may take once everybody is there (and a tenth of a second more for each process)."""

ATTEMPTS = 5
"""On a busy machine gloo now and then waits for a connection that was made (1 in some thousand groups, measured). Each
attempt may take twice as long as the one before it: two minutes in all."""


def choose_device(world: World) -> torch.device:
    """The device of this process: the accelerator with its local rank's number, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    if world.local_rank >= torch.accelerator.device_count():
        raise WorldError(
            f"Process {world.rank} was asked to use {accelerator.type} device {world.local_rank}.",
            f"This host has {torch.accelerator.device_count()}.",
            f"start {torch.accelerator.device_count()} processes here, or hide the devices to train on the CPU.",
        )
    device = torch.device(accelerator.type, world.local_rank)
    torch.accelerator.set_device_index(world.local_rank)
    return device


@contextmanager
def group(world: World) -> Iterator[Group]:
    """The group of all processes of `world`, joined on entry and left together on exit.

    Leaving waits for everybody and then destroys the group: a process that exits with gloo's threads still talking to
    peers aborts now and then (6 of 24 runs, measured). After an exception nobody is waited for.
    """
    device = choose_device(world)
    if world.size == 1:
        yield Group(0, 1, device)
        return
    _join(world, dist.get_default_backend_for_device(device))
    joined = build_group(world, device)
    yield joined
    joined.barrier()
    dist.destroy_process_group()


def build_group(world: World, device: torch.device) -> Group:
    """The processes of `world`, whose process group is there. Every one of them must call this."""
    group = Group(world.rank, world.size, device)
    return replace(group, neighbours=find_neighbours(group))


def _join(world: World, backend: str) -> None:
    """Wait until everybody is there, however long a host takes to start; then connect, and soon, or try again."""
    store = _store(world)
    _count(store, world.size, "here")
    for attempt in range(1, ATTEMPTS + 1):
        error: RuntimeError | None = None
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"attempt-{attempt}", store),
                rank=world.rank,
                world_size=world.size,
                timeout=2 ** (attempt - 1) * (CONNECT + world.size * timedelta(seconds=0.1)),
            )
        except RuntimeError as caught:
            error = caught
        # who has connected to somebody who has not must try again as well
        if _count(store, world.size, f"connected-{attempt}", error is None) == world.size:
            distributed_c10d._set_pg_timeout(TIMEOUT)
            return
        if dist.is_initialized():
            dist.destroy_process_group()
    reason = str(error).splitlines()[0] if error else "another process could not."
    raise WorldError(
        f"Process {world.rank} was to connect to the other {world.size - 1}.",
        f"They met, but {ATTEMPTS} attempts to connect failed: {reason}",
        "unisono doctor; on several networks, name one that all hosts share: GLOO_SOCKET_IFNAME=eth0 ...",
    ) from error


def _count(store: dist.Store, size: int, what: str, mine: bool = True) -> int:
    """How many of all processes say yes. Waits for everybody."""
    store.add(f"{what}-yes", int(mine))
    if store.add(f"{what}-said", 1) == size:  # the last one knows
        store.set(what, str(store.add(f"{what}-yes", 0)))
    store.wait([what], TIMEOUT)
    return int(store.get(what))


def _store(world: World) -> dist.Store:
    """Where the processes meet."""
    assert world.store is not None
    if world.store.startswith("file://"):
        return dist.FileStore(world.store.removeprefix("file://"), world.size)
    store: dist.Store
    store, _, _ = next(dist.rendezvous(world.store, world.rank, world.size, timeout=TIMEOUT))
    return store
