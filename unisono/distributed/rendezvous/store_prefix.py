"""Give every start of a run its own keys in a store that outlives it: the store of torchrun's agent.

torchrun restarts all processes after a failure (`--max-restarts`), and they connect to the same store as before, which
still holds every key of the previous round. A counter or a barrier would count dead processes. No variable of torchrun
names a round: `TORCHELASTIC_RESTART_COUNT` is a number of each agent, and does not change when nodes come or go. So
rank 0 draws a random prefix, and the processes agree on it by random tokens that no earlier round can have used:

    rank 1   "hello 1 7f3a"  ---.                                       .--> "confirm 1 c04e" ---.
    rank 2   "hello 2 b81d"  ---+---> rank 0: "welcome-7f3a = c04e" ----+--> "confirm 2 c04e" ---+---> rank 0: "c04e"
    (dead)   "hello 1 55d0"  ---'             "welcome-b81d = c04e"                                    is complete

All lines are appended to one value, which rank 0 reads from its beginning. It answers dead processes as well, but these
never confirm. Rank 0 of an earlier round may have answered a process just before it was killed. Rank 0 of the next
round answers that process again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.errors import WorldError

LINES_KEY = "unisono-rounds"
"""The key of the lines that processes append: "hello RANK TOKEN" or "confirm RANK PREFIX"."""

SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.005, 0.25
"""Seconds between two polls of the store; the time grows while nothing changes. (Waiting for a key is no alternative:
torch prints two lines whenever that times out.)"""


def enter_round(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store under a prefix that only this start of the `size` processes uses. Collective.

    Raises:
        WorldError: not all processes called this within `timeout`.
    """
    prefix = _lead(store, size, timeout) if rank == 0 else _follow(store, rank, size, timeout)
    return dist.PrefixStore(prefix, store)


def _lead(store: dist.Store, size: int, timeout: timedelta) -> str:
    """Answer all processes until ranks 1 to `size` - 1 of this round have confirmed. Return the prefix."""
    prefix, confirmed, read = uuid.uuid4().hex, set[str](), 0
    _append(store, f"lead 0 {prefix}\n")
    for _ in _polls(0, size, timeout):
        lines = store.get(LINES_KEY).decode().splitlines()
        for line in lines[read:]:
            kind, rank, token = line.split()
            if kind == "hello":
                store.set(f"welcome-{token}", prefix)
            elif kind == "confirm" and token == prefix:
                confirmed.add(rank)
        read = len(lines)
        if len(confirmed) == size - 1:
            break
    store.set(f"complete-{prefix}", "")
    return prefix


def _follow(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Introduce this process to rank 0, and confirm each prefix that rank 0 sends. Return the one that is complete."""
    token, prefix = uuid.uuid4().hex, ""
    _append(store, f"hello {rank} {token}\n")
    for _ in _polls(rank, size, timeout):
        given = store.get(f"welcome-{token}").decode() if store.check([f"welcome-{token}"]) else ""
        if given != prefix:
            prefix = given
            _append(store, f"confirm {rank} {prefix}\n")
        if prefix and store.check([f"complete-{prefix}"]):
            break
    return prefix


def _append(store: Any, line: str) -> None:
    """Append a line atomically. (torch's type stubs do not have `Store.append`.)"""
    store.append(LINES_KEY, line)


def _polls(rank: int, size: int, timeout: timedelta) -> Iterator[None]:
    """Yield each time the store is to be polled. Raise WorldError after `timeout`."""
    until, pause = time.monotonic() + timeout.total_seconds(), SHORTEST_POLL_SECONDS
    while time.monotonic() < until:
        yield
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_POLL_SECONDS)
    raise WorldError(
        f"Process {rank} timed out waiting for the other {size - 1} processes.",
        f"Not all of them have started within {timeout.total_seconds():g} s.",
        "look at the output of the others, and start all of them again.",
    )
