"""Into a group of processes and out of it again. A finished job leaves together, so that none aborts at exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.env import World
from unisono.errors import WorldError
from unisono.world.collectives import Group

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a silent peer. A peer that dies is noticed at once: its connections break."""


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
    backend = dist.get_default_backend_for_device(device)
    assert world.store is not None
    file = world.store.removeprefix("file://") if world.store.startswith("file://") else None
    dist.init_process_group(
        backend,
        init_method=None if file else world.store,
        store=dist.FileStore(file, world.size) if file else None,
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
    )
    joined = Group(world.rank, world.size, device)
    yield joined
    joined.barrier()
    dist.destroy_process_group()
