"""Into a group of processes and out of it again. A finished job leaves together, so that none aborts at exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.env import World
from unisono.errors import WorldError
from unisono.world.collectives import TIMEOUT, Group
from unisono.world.shared import find_neighbours

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
    if dist.is_initialized():  # some part before: train/serving.py
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

    def connect(attempt: int, patience: timedelta) -> None:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=patience,
        )

    def part() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    _connect(store, world.rank, world.size, "connected", connect, part)
    distributed_c10d._set_pg_timeout(TIMEOUT)


def join_lines(lines: Sequence[tuple[int, ...]], rank: int, size: int) -> dist.ProcessGroup:
    """torch's own group of that line of ranks which `rank` is in. All `size` processes must call this together."""
    made: list[dist.ProcessGroup] = []

    def connect(attempt: int, patience: timedelta) -> None:
        made.extend(dist.new_group(list(line), timeout=patience) for line in lines)

    def part() -> None:
        for group in made:
            if isinstance(group, dist.ProcessGroup):  # torch returns a number for a line that we are not in
                dist.destroy_process_group(group)
        made.clear()

    store = dist.PrefixStore(f"lines-{lines}", distributed_c10d._get_default_store())
    _connect(store, rank, size, "connected", connect, part)
    mine = next(group for line, group in zip(lines, made, strict=True) if rank in line)
    distributed_c10d._set_pg_timeout(TIMEOUT, mine)
    return mine


def _connect(
    store: dist.Store,
    rank: int,
    size: int,
    what: str,
    connect: Callable[[int, timedelta], None],
    part: Callable[[], None],
) -> None:
    """Connect, with everybody; where one process cannot, all `part` again and try anew, with more patience."""
    for attempt in range(1, ATTEMPTS + 1):
        error: RuntimeError | None = None
        try:
            connect(attempt, 2 ** (attempt - 1) * (CONNECT + size * timedelta(seconds=0.1)))
        except RuntimeError as caught:
            error = caught
        # who has connected to somebody who has not must try again as well
        if _count(store, size, f"{what}-{attempt}", error is None) == size:
            return
        part()
    reason = str(error).splitlines()[0] if error else "another process could not."
    raise WorldError(
        f"Process {rank} was to connect to the other {size - 1}.",
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
