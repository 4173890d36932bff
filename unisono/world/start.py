"""Into a group of processes and out of it again. A finished job leaves together, so that none aborts at exit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.env import World
from unisono.errors import WorldError
from unisono.world.collectives import TIMEOUT, Group
from unisono.world.connect import all_together, connect, count_groups_from
from unisono.world.keys import Keys
from unisono.world.members import SCHEME, Company
from unisono.world.shared import find_neighbours


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
    if (world.store or "").startswith(SCHEME) and device.type == "cpu":
        with company(world, device) as joined:
            yield joined
        return
    connect(_store(world), world.rank, world.size, dist.get_default_backend_for_device(device))
    joined = build_group(world, device)
    yield joined
    if dist.is_initialized():  # some part before: train/serving.py
        joined.barrier()
        dist.destroy_process_group()


@contextmanager
def company(world: World, device: torch.device) -> Iterator[Group]:
    """The same, where those who are left go on without one that dies. Who joins later is alone at first."""
    watched = Company(world)
    joined = Group(0, 1, device, company=watched)
    if not world.joins:
        watched.form(joined)
    yield joined
    watched.leave()


def build_group(world: World, device: torch.device) -> Group:
    """The processes of `world`, whose process group is there. Every one of them must call this."""
    group = Group(world.rank, world.size, device)
    return replace(group, neighbours=find_neighbours(group))


def join_lines(lines: Sequence[tuple[int, ...]], rank: int, size: int) -> dist.ProcessGroup:
    """torch's own group of that line of ranks which `rank` is in. All `size` processes must call this together."""
    made: list[dist.ProcessGroup] = []
    known = distributed_c10d._world.group_count

    def connect_here(attempt: int, patience: timedelta) -> None:
        count_groups_from(known + (attempt - 1) * len(lines))  # what a failed attempt has left lies under other names
        made.extend(dist.new_group(list(line), timeout=patience) for line in lines)

    def part() -> None:
        for group in made:
            if isinstance(group, dist.ProcessGroup):  # torch returns a number for a line that we are not in
                dist.destroy_process_group(group)
        made.clear()

    store = dist.PrefixStore(f"lines-{lines}", distributed_c10d._get_default_store())
    all_together(store, rank, size, "connected", connect_here, part)
    mine = next(group for line, group in zip(lines, made, strict=True) if rank in line)
    distributed_c10d._set_pg_timeout(TIMEOUT, mine)
    return mine


def _store(world: World) -> dist.Store:
    """Where the processes meet."""
    assert world.store is not None
    if world.store.startswith(SCHEME):
        return Keys(world.store.removeprefix(SCHEME), TIMEOUT)
    if world.store.startswith("file://"):
        return dist.FileStore(world.store.removeprefix("file://"), world.size)
    store: dist.Store
    store, _, _ = next(dist.rendezvous(world.store, world.rank, world.size, timeout=TIMEOUT))
    return store
