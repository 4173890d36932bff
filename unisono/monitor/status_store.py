"""Exchange the status of processes through the rendezvous store, under a launcher that is not ours.

    rank 0   thread "watch"  -- set place-0 -->  .---------.  <-- get the status of every rank --  rank 2
    rank 1   (stopped)                           |  store  |                        thread "watch"
    rank 2   thread "watch"  -- set place-2 -->  '---------'   rank 1 does not write any more, or never did

With secure.transport=tls the store is the private one at rank 0, once the processes have joined: a status states steps
and names of functions. Before that, processes exchange nothing, and each reports what it knows of itself.

Every process uses a connection of its own for this, because that of the main thread may be waiting for an answer. No
process waits for a silent one. The status of a rank that has become silent is its last one; a rank that has never
written one gets a status too, so that it can be named.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from unisono import environment
from unisono.environment import World
from unisono.errors import WorldError
from unisono.launcher.status_file import ProcessStatus, state_of

ANSWER = timedelta(seconds=2)
"""Time in which the store must answer."""

GONE = "does not answer: it is stopped, or its host is gone"
ABSENT = "does not answer: it has not called unisono.main, is stopped, or its host is gone"
HOST = "does not answer: it has not called unisono.main, is stopped, or its host is gone; it hosts the rendezvous store"


class StatusStore:
    """The status of all processes, as this process sees it."""

    def __init__(self, store: Any, world: World, *, joined: bool, by_rank: bool = False) -> None:
        """Create a view.

        Args:
            store: A store of torch.distributed.
            world: Rank and size of this process.
            joined: The process group exists, so every process has joined.
            by_rank: Rank 0 hosts the store. False: torchrun's agent does, or it is unknown.
        """
        self.store, self.world = store, world
        self.joined, self.by_rank = joined, by_rank
        self._seen: dict[int, tuple[ProcessStatus, float]] = {}  # the last status of each rank, and when it was read
        self._first_read: float | None = None  # time at which the other ranks were first read
        self._exchange: threading.Thread | None = None
        self._answered = self._gone = False

    def publish(self, mine: ProcessStatus) -> list[ProcessStatus]:
        """Write the status of this process, and return that of all ranks.

        A rank that has not written for a while is marked as silent. If the store does not answer, the list contains
        this process, and rank 0 if that hosts the store. While this process makes progress, it contains only itself.
        """
        if not self._answers(mine):
            return alone(mine, by_rank=self.by_rank)
        if mine.idle < mine.limit / 2:
            return [mine]
        self._first_read = self._first_read or time.monotonic()
        return sorted([mine, *self._others(mine)], key=lambda place: place.rank)

    def _answers(self, mine: ProcessStatus) -> bool:
        """Return whether the store answers in time. One that is gone is not used again: torch would warn each time."""
        if self._gone:
            return False
        if self._exchange is None or not self._exchange.is_alive():
            self._answered = False
            self._exchange = threading.Thread(target=self._read_all, args=(mine,), name="board", daemon=True)
            self._exchange.start()
        self._exchange.join(ANSWER.total_seconds())
        return self._answered

    def _read_all(self, mine: ProcessStatus) -> None:
        """Write and read all keys.

        It runs in a thread of its own, because `check` ignores its timeout if the process of the store is stopped
        (torch 2.13).
        """
        torch = sys.modules["torch"]
        try:
            self.store.set(_key(mine.rank), mine.text())
            if mine.idle >= mine.limit / 2:
                for rank in range(self.world.size):
                    if rank != mine.rank and self.store.check([_key(rank)]):
                        self._update(ProcessStatus.of(bytes(self.store.get(_key(rank)))))
            self._answered = True
        except (torch.distributed.DistNetworkError, OSError):
            self._gone = True
        except (RuntimeError, ValueError, TypeError):
            return

    def _update(self, place: ProcessStatus) -> None:
        last = self._seen.get(place.rank)
        if last is None or last[0].written != place.written:
            self._seen[place.rank] = place, time.monotonic()

    def _others(self, mine: ProcessStatus) -> list[ProcessStatus]:
        found = []
        for rank in set(range(self.world.size)) - {mine.rank}:
            if rank not in self._seen:
                found.append(self._unknown(rank, mine))
                continue
            place, read_at = self._seen[rank]
            silence = time.monotonic() - read_at
            if silence > place.silence_limit:
                why = state_of(place.pid) if place.host == self.world.host else f"{GONE} (host {place.host})"
                place = replace(place, idle=place.idle + silence, silent=why, waits="")
            found.append(place)
        return found

    def _unknown(self, rank: int, mine: ProcessStatus) -> ProcessStatus:
        """Return a status for a rank that has never written one. At first it is not yet silent."""
        assert self._first_read is not None
        if time.monotonic() - self._first_read <= mine.silence_limit:
            return _silent(rank, mine, "", idle=0.0)
        return _silent(rank, mine, GONE if self.joined else ABSENT)


def alone(mine: ProcessStatus, *, by_rank: bool = False) -> list[ProcessStatus]:
    """Return the statuses that a process knows while the store does not answer."""
    if mine.waits not in ("others", "meeting"):
        return [mine]
    host = [_silent(0, mine, HOST)] if by_rank and mine.rank != 0 else []
    return [*host, replace(mine, waits="store")]


def _silent(rank: int, mine: ProcessStatus, silent: str, idle: float | None = None) -> ProcessStatus:
    """Return a status of a process about which nothing is known. By default it is idle as long as this process."""
    idle = mine.idle if idle is None else idle
    return ProcessStatus(
        rank=rank, size=mine.size, pid=0, host="", written=0.0, idle=idle, then=mine.then, silent=silent
    )


def _key(rank: int) -> str:
    return f"place-{rank}"


def build_status_store(world: World, mine: ProcessStatus, *, encrypted: bool = False) -> StatusStore | None:
    """Return a view on the rendezvous store, or None if there is none that answers (yet).

    Before the group exists, only a process that has waited for long connects, because a store may start late.

    Args:
        world: Rank and size of this process.
        mine: The status of this process.
        encrypted: Use the private store of the run, and nothing before this process has joined.
    """
    torch = sys.modules.get("torch")
    if world.size == 1 or torch is None:
        return None
    joined = torch.distributed.is_initialized()
    if encrypted:
        private = _private_store() if joined else None
        return None if private is None else StatusStore(private, world, joined=True, by_rank=True)
    if not joined and mine.idle < mine.limit / 2:
        return None
    at = environment.host_of(world.store)
    try:
        if at is not None:
            store = torch.distributed.TCPStore(*at, timeout=ANSWER)
        elif joined:
            from torch.distributed.distributed_c10d import _get_default_store

            store = _get_default_store().clone()  # type: ignore[attr-defined]
            store.set_timeout(ANSWER)
        else:
            return None
    except (RuntimeError, ValueError):
        return None
    start = f"{world.store}-{world.restarts}"  # an earlier start, or another run, may have used the same store
    prefixed = torch.distributed.PrefixStore(f"unisono-{start}", store)
    return StatusStore(prefixed, world, joined=joined, by_rank=hosts_by_rank(world))


def _private_store() -> Any:
    """Return another connection to the private store, in which the default group's processes have met.

    Without the prefix of its keys: torch's PrefixStore does not keep a store alive that is written in Python.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    while isinstance(store, sys.modules["torch"].distributed.PrefixStore):
        store = store.underlying_store
    try:
        private = store.clone()
    except (OSError, WorldError):
        return None
    private.set_timeout(ANSWER)
    return private


def hosts_by_rank(world: World) -> bool:
    """Return whether rank 0 hosts the store, and not torchrun's agent."""
    return environment.host_of(world.store) is not None and not environment.agent_hosts_store()
