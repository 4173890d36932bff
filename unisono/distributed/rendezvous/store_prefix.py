"""Give every start of a run keys of its own in a store that outlives it: the store of torchrun's agent.

torchrun restarts all processes after a failure (`--max-restarts`), and they connect to the same store as before, which
still holds every key of the last round. A counter or a barrier would count the dead. No variable of torchrun's names
a round: `TORCHELASTIC_RESTART_COUNT` is each agent's own number, and stays when nodes come or go. So rank 0 draws a
random prefix, and the processes agree on it by random numbers that no earlier round can have used:

    rank 1   "hello 1 7f3a"  ---.                                       .--> "confirm 1 c04e" ---.
    rank 2   "hello 2 b81d"  ---+---> rank 0: "welcome-7f3a = c04e" ----+--> "confirm 2 c04e" ---+---> rank 0: "c04e"
    (dead)   "hello 1 55d0"  ---'             "welcome-b81d = c04e"                                    is complete

All of this is appended to one value, which rank 0 reads from its beginning. It answers processes that have died as
well, and they never confirm. A process that was answered by the rank 0 of an earlier round, which was about to be
killed, is answered again by the next one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.errors import WorldError

SAID = "unisono-rounds"
"""The key of what processes say, a line each: "hello RANK TOKEN" or "confirm RANK PREFIX"."""

SHORTEST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.005, 0.25
"""Between two looks at the store, the longer the longer nothing changes. (torch prints two lines whenever a wait for a
key times out, so none is tried.)"""


def enter_round(store: dist.Store, rank: int, size: int, patience: timedelta) -> dist.Store:
    """Return the store under a prefix that this start of the `size` processes has for itself. All must call this.

    Raises WorldError if not all of them have come within `patience`.
    """
    prefix = _lead(store, size, patience) if rank == 0 else _follow(store, rank, size, patience)
    return dist.PrefixStore(prefix, store)


def _lead(store: dist.Store, size: int, patience: timedelta) -> str:
    """Answer all processes until those of this round, ranks 1 to `size` - 1, have confirmed; return the prefix."""
    prefix, confirmed, read = uuid.uuid4().hex, set[str](), 0
    _say(store, f"lead 0 {prefix}\n")
    for _ in _looks(0, size, patience):
        lines = store.get(SAID).decode().splitlines()
        for line in lines[read:]:
            what, rank, token = line.split()
            if what == "hello":
                store.set(f"welcome-{token}", prefix)
            elif what == "confirm" and token == prefix:
                confirmed.add(rank)
        read = len(lines)
        if len(confirmed) == size - 1:
            break
    store.set(f"complete-{prefix}", "")
    return prefix


def _follow(store: dist.Store, rank: int, size: int, patience: timedelta) -> str:
    """Introduce this process to rank 0, and confirm each prefix that it gives; return the one that is complete."""
    token, prefix = uuid.uuid4().hex, ""
    _say(store, f"hello {rank} {token}\n")
    for _ in _looks(rank, size, patience):
        given = store.get(f"welcome-{token}").decode() if store.check([f"welcome-{token}"]) else ""
        if given != prefix:
            prefix = given
            _say(store, f"confirm {rank} {prefix}\n")
        if prefix and store.check([f"complete-{prefix}"]):
            break
    return prefix


def _say(store: Any, line: str) -> None:
    """Append a line to what was said, at once. (torch's type stubs do not know `Store.append`.)"""
    store.append(SAID, line)


def _looks(rank: int, size: int, patience: timedelta) -> Iterator[None]:
    """Yield at each time to look at the store. Raises WorldError once `patience` has passed."""
    until, pause = time.monotonic() + patience.total_seconds(), SHORTEST_LOOK_SECONDS
    while time.monotonic() < until:
        yield
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_LOOK_SECONDS)
    raise WorldError(
        f"Process {rank} was to meet the other {size - 1}.",
        f"Not all of them came within {patience.total_seconds():g} s.",
        "look at the output of the others, and start all of them again.",
    )
