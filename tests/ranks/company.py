"""Real processes that may die: what each that lives to the end returns, and others that come in addition."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ranks import late as late_
from unisono import phases
from unisono.environment import World
from unisono.errors import RunStopped
from unisono.launcher.rendezvous_server import RendezvousServer
from unisono.testing import run_ranks

context = mp.get_context("forkserver")
DIED = object()


class Company:
    """`size` processes of function(world, *args), with a meeting place in this one. `late`: by a back end that tells
    nobody of a death, as NCCL (late.py).

    with Company(work, 3) as company:
        company.kill(1)
        assert company.results() == {0: ..., 2: ...}
    """

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        seconds: float = 120.0,
        silence: float = 30.0,
        late: bool = False,
    ) -> None:
        self.function, self.size, self.args, self.seconds = function, size, args, seconds
        self.silence, self.late = silence, late
        self.processes: dict[int, Any] = {}
        self.ends: dict[int, Connection] = {}
        self.events: list[dict[str, Any]] = []
        self.killed: set[int] = set()
        self.told: dict[int, Any] = {}  # of those that are over

    def __enter__(self) -> Company:
        self.folder = tempfile.TemporaryDirectory(prefix="u-")
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.bind(str(Path(self.folder.name) / "store"))
        door.listen()
        self.meeting = RendezvousServer(door, self.size, silence=self.silence, tell=self._note)
        self.thread = threading.Thread(target=self.meeting.serve, daemon=True)
        self.thread.start()
        for number in range(self.size):
            self.start(number)
        return self

    def _note(self, event: dict[str, Any]) -> None:
        """What a launcher would hear, and do."""
        self.events.append(event)
        if "orphan" in event:
            self.kill(event["orphan"])

    def start(self, number: int, *, joins: bool = False) -> None:
        rank = number % self.size
        world = World(
            rank=rank,
            size=self.size,
            local_rank=rank,
            local_size=self.size,
            store=f"unix://{self.folder.name}/store" if self.size > 1 else None,
            launcher="test",
            number=number,
            joins=joins,
        )
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(self.function, world, theirs, self.args, self.late))
        process.start()
        theirs.close()
        self.processes[number], self.ends[number] = process, mine

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self.killed.add(number)
            os.kill(self.processes[number].pid, signal.SIGKILL)

    def await_(self, event: str) -> dict[str, Any]:
        """The first thing told with this word in it."""
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline:
            for told in self.events:
                if event in told:
                    return told
            time.sleep(0.01)
        raise AssertionError(f"nobody told of {event} within {self.seconds:g} s: {self.events}")

    def look(self, doomed: set[int]) -> None:
        """Raise what somebody has failed of, or that one has died that is not `doomed` to."""
        for number, end in self.ends.items():
            if number not in self.told and end.poll():
                self._hear(number, may_die=number in doomed)

    def _hear(self, number: int, *, may_die: bool) -> None:
        """What this process returns, or fails of; it is over."""
        try:
            value, error = self.ends[number].recv()
        except EOFError:
            assert may_die or number in self.killed, f"process {number} died"
            self.told[number] = DIED
            return
        assert not error, f"process {number} failed:\n{error}"
        self.told[number] = value

    @property
    def roster(self) -> list[int]:
        """Who is in the group, by age."""
        return list(self.meeting.roster)

    @property
    def alive(self) -> list[int]:
        return [number for number, process in self.processes.items() if process.is_alive()]

    def results(self, *, dead: bool = False) -> dict[int, Any]:
        """What those return that are not killed. `dead`: any may have died by itself."""
        deadline = time.monotonic() + self.seconds
        while waiting := {number: end for number, end in self.ends.items() if number not in self.told}:
            ready = wait(list(waiting.values()), timeout=max(deadline - time.monotonic(), 0))
            assert ready, f"processes {sorted(waiting)} still run after {self.seconds:g} s"
            for number in [n for n, end in waiting.items() if end in ready]:
                self._hear(number, may_die=dead)
        return {number: value for number, value in self.told.items() if value is not DIED}

    def __exit__(self, *_: Any) -> None:
        for process in self.processes.values():
            process.join(0 if process.exitcode is None and self.killed else 5)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for end in self.ends.values():
            end.close()
        self.meeting.close()
        self.thread.join()
        self.folder.cleanup()


def die_at(phase: str, times: int) -> None:
    """This process is killed when it comes to a phase for so many times."""
    left = times

    def observe(_: str, entered: str) -> None:
        nonlocal left
        left -= entered == phase
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    phases.observe(observe)


def _rank(function: Callable[..., Any], world: World, pipe: Connection, args: tuple[Any, ...], late: bool) -> None:
    import faulthandler

    import torch

    faulthandler.dump_traceback_later(20, exit=False)
    mp.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if late:
        late_.use()
    try:
        pipe.send((function(world, *args), None))
    except RunStopped:
        pipe.send((None, None))  # it was to join, and the others were done
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        pipe.close()


_ = run_ranks  # which has told the fork server what to load
