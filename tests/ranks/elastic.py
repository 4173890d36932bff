"""Real processes of an elastic run that may die, with a rendezvous server in the test."""

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

from tests.ranks import nccl_like as nccl_like_
from unisono import phases
from unisono.environment import World
from unisono.errors import RunStopped
from unisono.launcher.rendezvous_server import RendezvousServer
from unisono.testing import run_ranks

context = mp.get_context("forkserver")
DIED = object()


class ElasticProcesses:
    """`size` processes of function(world, *args).

    with ElasticProcesses(work, 3) as processes:
        processes.kill(1)
        assert processes.results() == {0: ..., 2: ...}

    Args:
        function: the function that each process runs.
        size: number of processes at the start.
        args: further arguments of `function`.
        seconds: time limit for the results.
        silence: seconds without a heartbeat after which a process counts as dead.
        nccl_like: use a back end that reports no deaths (nccl_like.py).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        seconds: float = 120.0,
        silence: float = 30.0,
        nccl_like: bool = False,
    ) -> None:
        self.function, self.size, self.args, self.seconds = function, size, args, seconds
        self.silence, self.nccl_like = silence, nccl_like
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        self.events: list[dict[str, Any]] = []
        self.killed: set[int] = set()
        self.ended: dict[int, Any] = {}  # the results of processes that have ended

    def __enter__(self) -> ElasticProcesses:
        self.folder = tempfile.TemporaryDirectory(prefix="u-")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(Path(self.folder.name) / "store"))
        listener.listen()
        self.server = RendezvousServer(listener, self.size, silence=self.silence, notify=self._on_event)
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        for number in range(self.size):
            self.start(number)
        return self

    def _on_event(self, event: dict[str, Any]) -> None:
        """Handle an event as the launcher does."""
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
        process = context.Process(target=_rank, args=(self.function, world, theirs, self.args, self.nccl_like))
        process.start()
        theirs.close()
        self.processes[number], self.pipes[number] = process, mine

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self.killed.add(number)
            os.kill(self.processes[number].pid, signal.SIGKILL)

    def await_(self, key: str) -> dict[str, Any]:
        """Return the first event with this key."""
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline:
            for event in self.events:
                if key in event:
                    return event
            time.sleep(0.01)
        raise AssertionError(f"no event {key} within {self.seconds:g} s: {self.events}")

    def look(self, doomed: set[int]) -> None:
        """Raise if a process has failed, or if one has died that is neither killed nor `doomed`."""
        for number, pipe in self.pipes.items():
            if number not in self.ended and pipe.poll():
                self._receive(number, may_die=number in doomed)

    def _receive(self, number: int, *, may_die: bool) -> None:
        """Receive the result of a process that has ended; raise if it has failed."""
        try:
            value, error = self.pipes[number].recv()
        except EOFError:
            assert may_die or number in self.killed, f"process {number} died"
            self.ended[number] = DIED
            return
        assert not error, f"process {number} failed:\n{error}"
        self.ended[number] = value

    @property
    def roster(self) -> list[int]:
        """The numbers of the members, oldest first."""
        return list(self.server.roster)

    @property
    def alive(self) -> list[int]:
        return [number for number, process in self.processes.items() if process.is_alive()]

    def results(self, *, dead: bool = False) -> dict[int, Any]:
        """Return the results of the processes that are not killed. `dead`: any of them may have died by itself."""
        deadline = time.monotonic() + self.seconds
        while waiting := {number: pipe for number, pipe in self.pipes.items() if number not in self.ended}:
            ready = wait(list(waiting.values()), timeout=max(deadline - time.monotonic(), 0))
            assert ready, f"processes {sorted(waiting)} still run after {self.seconds:g} s"
            for number in [n for n, pipe in waiting.items() if pipe in ready]:
                self._receive(number, may_die=dead)
        return {number: value for number, value in self.ended.items() if value is not DIED}

    def __exit__(self, *_: Any) -> None:
        for process in self.processes.values():
            process.join(0 if process.exitcode is None and self.killed else 5)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in self.pipes.values():
            pipe.close()
        self.server.close()
        self.thread.join()
        self.folder.cleanup()


def die_at(phase: str, times: int) -> None:
    """Kill this process when it enters a phase for the given time."""
    left = times

    def observe(_: str, entered: str) -> None:
        nonlocal left
        left -= entered == phase
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    phases.observe(observe)


def _rank(function: Callable[..., Any], world: World, pipe: Connection, args: tuple[Any, ...], nccl_like: bool) -> None:
    import faulthandler

    import torch

    faulthandler.dump_traceback_later(20, exit=False)
    mp.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if nccl_like:
        nccl_like_.use()
    try:
        pipe.send((function(world, *args), None))
    except RunStopped:
        pipe.send((None, None))  # it was started to join, and the others had ended
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        pipe.close()


_ = run_ranks  # the import has configured the fork server
