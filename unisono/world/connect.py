"""Connecting with everybody or with nobody: all processes try together, and again, until all are connected.

torch names a group by a counter, under which its processes look for each other. It goes up in an attempt that fails as
well, and back to 0 where a group was made and left. So a process that had connected and one that had not would look for
each other under different names in all attempts to come (torch 2.13); before each one the counter is set.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.errors import WorldError
from unisono.world.collectives import TIMEOUT

CONNECT = timedelta(seconds=4)
"""How long connecting may take once everybody is there (and a tenth of a second more for each process)."""

ATTEMPTS = 5
"""On a busy machine gloo now and then waits for a connection that was made (1 in some thousand groups, measured). Each
attempt may take twice as long as the one before it: two minutes in all."""


def connect(store: dist.Store, rank: int, size: int, backend: str, first: timedelta = CONNECT) -> None:
    """torch's group of these processes. Wait until everybody is there, however long a host takes to start; then
    connect, and soon (`first`: how long the first attempt may take), or try again."""
    count(store, size, "here")

    def connect_here(attempt: int, patience: timedelta) -> None:
        count_groups_from(0)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=patience,
        )

    def part() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    all_together(store, rank, size, "connected", connect_here, part, first)
    distributed_c10d._set_pg_timeout(TIMEOUT)


def count_groups_from(number: int) -> None:
    """The group that is made next has this number, on every process that says so."""
    distributed_c10d._world.group_count = number


def all_together(
    store: dist.Store,
    rank: int,
    size: int,
    what: str,
    connect: Callable[[int, timedelta], None],
    part: Callable[[], None],
    first: timedelta = CONNECT,
) -> None:
    """Connect, with everybody; where one process cannot, all `part` again and try anew, with more patience."""
    for attempt in range(1, ATTEMPTS + 1):
        error: RuntimeError | None = None
        try:
            connect(attempt, 2 ** (attempt - 1) * (first + size * timedelta(seconds=0.1)))
        except RuntimeError as caught:
            error = caught
        # who has connected to somebody who has not must try again as well
        if count(store, size, f"{what}-{attempt}", error is None) == size:
            return
        part()
    reason = str(error).splitlines()[0] if error else "another process could not."
    raise WorldError(
        f"Process {rank} was to connect to the other {size - 1}.",
        f"They met, but {ATTEMPTS} attempts to connect failed: {reason}",
        "unisono doctor; on several networks, name one that all hosts share: GLOO_SOCKET_IFNAME=eth0 ...",
    ) from error


def count(store: dist.Store, size: int, what: str, mine: bool = True) -> int:
    """How many of all processes say yes. Waits for everybody."""
    store.add(f"{what}-yes", int(mine))
    if store.add(f"{what}-said", 1) == size:  # the last one knows
        store.set(what, str(store.add(f"{what}-yes", 0)))
    store.wait([what], TIMEOUT)
    return int(store.get(what))
