"""Where processes that our launcher has not started show each other where they stand: keys in the store they meet in.

    rank 0   thread "watch"  -- set place-0 -->  .---------.  <-- who is there, and what did they say last? --  rank 2
    rank 1   (stopped)                           |  store  |                                    thread "watch"
    rank 2   thread "watch"  -- set place-2 -->  '---------'   rank 1 says nothing any more, or never did

Each on a connection of its own: the one of the main thread may be waiting for an answer. Nobody waits for a process
that says nothing. Whoever spoke before stands where he last stood, and whoever never did has a place all the same, so
that it can be named.
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
from unisono.launcher.status_file import ProcessStatus, state_of

ANSWER = timedelta(seconds=2)
"""How long the store may take."""

GONE = "does not answer: it is stopped, or its host is gone"
ABSENT = "does not answer: it has not come to unisono.main, is stopped, or its host is gone"
HOST = "does not answer: it has not come to unisono.main, is stopped, or its host is gone; the others meet at it"


class StatusStore:
    """One process's view of all. `meet` shows where we stand and returns where everybody does.

    joined   is the group there? Then everybody has been there
    by_rank  does a rank of the run (0) host the store? Else torchrun's agent does, or nobody can tell
    """

    def __init__(self, store: Any, world: World, *, joined: bool, by_rank: bool = False) -> None:
        self.store, self.world = store, world
        self.joined, self.by_rank = joined, by_rank
        self._seen: dict[int, tuple[ProcessStatus, float]] = {}  # the last word of each, and when we heard it
        self._asked_at: float | None = None  # when we first looked for the others
        self._asking: threading.Thread | None = None
        self._answered = self._gone = False

    def publish(self, mine: ProcessStatus) -> list[ProcessStatus]:
        """Everybody's place; who has not spoken for a while is silent. Nobody answers: only ours, and that of the host
        of the store, if it is one of us."""
        if not self._answers(mine):
            return alone(mine, by_rank=self.by_rank)
        if mine.idle < mine.limit / 2:
            return [mine]  # nobody asks; what others do is not looked at
        self._asked_at = self._asked_at or time.monotonic()
        return sorted([mine, *self._others(mine)], key=lambda place: place.rank)

    def _answers(self, mine: ProcessStatus) -> bool:
        """Does the store, in time? One that is gone does not come back, and torch warns of it whenever it is asked."""
        if self._gone:
            return False
        if self._asking is None or not self._asking.is_alive():
            self._answered = False
            self._asking = threading.Thread(target=self._ask, args=(mine,), name="board", daemon=True)
            self._asking.start()
        self._asking.join(ANSWER.total_seconds())
        return self._answered

    def _ask(self, mine: ProcessStatus) -> None:
        """In a thread of its own: `check` waits for ever for a store whose process is stopped, whatever its time limit
        (torch 2.13)."""
        torch = sys.modules["torch"]
        try:
            self.store.set(_key(mine.rank), mine.text())
            if mine.idle >= mine.limit / 2:
                for rank in range(self.world.size):
                    if rank != mine.rank and self.store.check([_key(rank)]):
                        self._hear(ProcessStatus.of(bytes(self.store.get(_key(rank)))))
            self._answered = True
        except torch.distributed.DistNetworkError:
            self._gone = True
        except (RuntimeError, ValueError, TypeError):
            return

    def _hear(self, place: ProcessStatus) -> None:
        before = self._seen.get(place.rank)
        if before is None or before[0].written != place.written:
            self._seen[place.rank] = place, time.monotonic()

    def _others(self, mine: ProcessStatus) -> list[ProcessStatus]:
        found = []
        for rank in set(range(self.world.size)) - {mine.rank}:
            if rank not in self._seen:
                found.append(self._stranger(rank, mine))
                continue
            place, heard = self._seen[rank]
            silence = time.monotonic() - heard
            if silence > place.patience:
                why = state_of(place.pid) if place.host == self.world.host else f"{GONE} (host {place.host})"
                place = replace(place, idle=place.idle + silence, silent=why, waits="")
            found.append(place)
        return found

    def _stranger(self, rank: int, mine: ProcessStatus) -> ProcessStatus:
        """Who has never said a word: it may be about to, for a while."""
        assert self._asked_at is not None
        if time.monotonic() - self._asked_at <= mine.patience:
            return _nobody(rank, mine, "", idle=0.0)
        return _nobody(rank, mine, GONE if self.joined else ABSENT)


def alone(mine: ProcessStatus, *, by_rank: bool = False) -> list[ProcessStatus]:
    """What one process knows that reaches nobody."""
    if mine.waits not in ("others", "meeting"):
        return [mine]
    host = [_nobody(0, mine, HOST)] if by_rank and mine.rank != 0 else []
    return [*host, replace(mine, waits="store")]


def _nobody(rank: int, mine: ProcessStatus, silent: str, idle: float | None = None) -> ProcessStatus:
    """The place of a process that says nothing: nothing is known of it, and it stands still as long as we do."""
    still = mine.idle if idle is None else idle
    return ProcessStatus(
        rank=rank, size=mine.size, pid=0, host="", written=0.0, idle=still, then=mine.then, silent=silent
    )


def _key(rank: int) -> str:
    return f"place-{rank}"


def build_status_store(world: World, mine: ProcessStatus) -> StatusStore | None:
    """The board of processes that have met, or meet, in a store; None: there is none that answers (yet).

    Before they have met, only one who has waited for long knocks: a store that is not there yet is no news.
    """
    torch = sys.modules.get("torch")
    if world.size == 1 or torch is None:
        return None
    joined = torch.distributed.is_initialized()
    if not joined and mine.idle < mine.limit / 2:
        return None
    at = environment.host_of(world.store)
    try:
        if at is not None:
            store = torch.distributed.TCPStore(*at, timeout=ANSWER)
        elif joined:
            store = torch.distributed.distributed_c10d._get_default_store().clone()
            store.set_timeout(ANSWER)
        else:
            return None
    except (RuntimeError, ValueError):
        return None
    start = f"{world.store}-{world.restarts}"  # the store may be older than this start of the run, or another run's
    apart = torch.distributed.PrefixStore(f"unisono-{start}", store)
    return StatusStore(apart, world, joined=joined, by_rank=hosts_by_rank(world))


def hosts_by_rank(world: World) -> bool:
    """Is the store a part of process 0? torchrun's agents have it, and say so."""
    agent = environment.variables(["TORCHELASTIC_USE_AGENT_STORE"]).get("TORCHELASTIC_USE_AGENT_STORE")
    return environment.host_of(world.store) is not None and agent != "True"
