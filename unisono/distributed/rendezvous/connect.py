"""Connecting with everybody or with nobody: all processes try together, and again, until all are connected.

torch names a group by a counter, under which its processes look for each other. It goes up in an attempt that fails as
well, and back to 0 where a group was made and left. So a process that had connected and one that had not would look for
each other under different names in all attempts to come (torch 2.13); before each one the counter is set.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.distributed.membership.waiting import TIMEOUT
from unisono.errors import WorldError

CONNECT = timedelta(seconds=4)
"""How long connecting may take once everybody is there (and a tenth of a second more for each process), as it is said
to gloo."""

AGAIN, EACH = timedelta(seconds=0.3), timedelta(seconds=0.02)
"""The same where processes may die meanwhile, and more for each: two seconds for four of them, as gloo counts. All are
there, so it takes 30 ms; and whoever dies in it is waited for in vain: gloo cannot be woken while it connects."""

RELAXED = 5
"""gloo waits so many times what it is told for a connection that does not come (its `relaxedTimeout`; 1.6 s were 8.0,
measured), though not for an address in the store."""

ATTEMPTS = 5
"""On a busy machine gloo now and then waits for a connection that was made (1 in some thousand groups, measured). Each
attempt may take twice as long as the one before it."""

PART_SECONDS = 5.0
"""A group whose threads do not end within this time is left to itself."""


def connect(
    store: dist.Store, rank: int, size: int, backend: str, first: timedelta | None = None, limit: float = math.inf
) -> None:
    """torch's group of these processes. Wait until everybody is there, however long a host takes to start; then
    connect, and soon (`first`: what gloo is told in the first attempt), or try again; `limit`: as often as these
    seconds allow."""
    count_arrivals(store, size, "here")

    def connect_here(attempt: int, patience: timedelta) -> None:
        number_groups_from(0)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=patience,
        )

    wait_for_all(store, rank, size, "connected", connect_here, leave_group, first, limit)
    distributed_c10d._set_pg_timeout(TIMEOUT)


def first_timeout(size: int) -> timedelta:
    """What gloo is told in a first attempt where processes may die meanwhile."""
    return AGAIN + size * EACH


def leave_group(*, abort: bool = False) -> None:
    """Out of torch's group, if there is one. Its end waits for its threads, and one of these may wait in a collective
    that will never come (membership.py): then it goes on waiting, beside us. `abort`: end what is under way, as NCCL
    can; it is over on the device when this returns."""
    if not dist.is_initialized():
        return
    held = [dist.group.WORLD]
    if abort:
        distributed_c10d._abort_process_group()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    else:
        dist.destroy_process_group()
    ends = threading.Thread(target=held.clear, name="group", daemon=True)
    ends.start()
    ends.join(PART_SECONDS)


def number_groups_from(number: int) -> None:
    """The group that is made next has this number, on every process that says so."""
    distributed_c10d._world.group_count = number


def wait_for_all(
    store: dist.Store,
    rank: int,
    size: int,
    what: str,
    connect: Callable[[int, timedelta], None],
    part: Callable[[], None],
    first: timedelta | None = None,
    limit: float = math.inf,
) -> None:
    """Connect, with everybody; where one process cannot, all `part` again and try anew, with more patience."""
    patience = first or CONNECT + size * timedelta(seconds=0.1)
    longest = RELAXED * patience.total_seconds()
    attempts = max(n for n in range(1, ATTEMPTS + 1) if n == 1 or (2**n - 1) * longest <= limit)
    for attempt in range(1, attempts + 1):
        error: RuntimeError | None = None
        try:
            connect(attempt, 2 ** (attempt - 1) * patience)
        except RuntimeError as caught:
            error = caught
        # who has connected to somebody who has not must try again as well
        if count_arrivals(store, size, f"{what}-{attempt}", error is None) == size:
            return
        part()
    reason = str(error).splitlines()[0] if error else "another process could not."
    raise WorldError(
        f"Process {rank} was to connect to the other {size - 1}.",
        f"They met, but {attempts} attempts to connect failed: {reason}",
        "unisono doctor; on several networks, name one that all hosts share: GLOO_SOCKET_IFNAME=eth0 ...",
    ) from error


def same_everywhere(store: dist.Store, size: int, kind: str) -> bool:
    """Are all processes of one kind? Waits for everybody."""
    store.add(f"kind-{kind}", 1)
    count_arrivals(store, size, "kinds")
    return store.add(f"kind-{kind}", 0) == size


def count_arrivals(store: dist.Store, size: int, what: str, mine: bool = True) -> int:
    """How many of all processes say yes. Waits for everybody."""
    store.add(f"{what}-yes", int(mine))
    if store.add(f"{what}-said", 1) == size:  # the last one knows
        store.set(what, str(store.add(f"{what}-yes", 0)))
    store.wait([what], TIMEOUT)
    return int(store.get(what))
