"""Run a process beside the main process that follows the timelines: experiment trackers, the metrics page."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from unisono import environment
from unisono.train.extensions import Extension

if TYPE_CHECKING:
    from unisono.train.context import RunContext


class FollowerProcess(Extension):
    """Run `python -m MODULE ARGUMENTS` on the main process. After its death, the next main process starts its own.

    The process ends when its standard input ends: with the main process, whatever ended it. What it prints is printed
    by the main process.

    Args:
        context: The context of the run.
        module: The module.
        arguments: Returns its arguments; called when the process is started.
        title: What it is, at the beginning of a message.
        after_death: What follows from its death, at the end of a message.
        patience: Seconds that the end of a run waits for it.
        late: Printed if it needs longer.
        variables: Environment variables that it gets unless the user has set them.
    """

    def __init__(
        self,
        context: RunContext,
        module: str,
        arguments: Callable[[], Sequence[str]],
        *,
        title: str,
        after_death: str,
        patience: float,
        late: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._context, self._module, self._arguments = context, module, arguments
        self._title, self._after_death = title, after_death
        self._patience, self._late = patience, late
        self._variables = {**variables, **environment.variables(variables)}
        self._process: subprocess.Popen[str] | None = None
        self._watcher = threading.Thread(target=self._watch, name=module.rpartition(".")[2], daemon=True)
        if not context.world.joins:  # a replacement has a group of its own until it joins
            self._start()

    def _start(self) -> None:
        if self._process is not None or self._context.group.rank:
            return
        path = ":".join(path for path in sys.path if path)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment.inherited({**self._variables, "PYTHONPATH": path}),
                start_new_session=True,  # Ctrl-C ends training, and with it the follower
            )
        except OSError as error:
            self._context.monitor.note(f"{self._module} cannot start: {error}. Training continues without it.")
            return
        self._process = process
        self._watcher.start()
        threading.Thread(target=self._show, args=(process,), name=f"{self._watcher.name} output", daemon=True).start()

    def _show(self, process: subprocess.Popen[str]) -> None:
        """Print what the follower prints."""
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                self._context.monitor.note(line.rstrip())

    def _watch(self) -> None:
        """Wait for the end of the process, and report a death. (Its output may stay open in a child of it.)"""
        assert self._process is not None
        status = self._process.wait()
        if status:
            with contextlib.suppress(ValueError, OSError):
                self._context.monitor.note(f"{self._title} {_ending(status)}. Training continues. {self._after_death}")

    def regrouped(self, first: int, *, failed: bool) -> None:
        self._start()

    def ended(self, error: Exception | None) -> None:
        process = self._process
        if process is None or error is not None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead
            process.stdin.close()
        self._watcher.join(self._patience)
        if self._watcher.is_alive() and self._late:
            self._context.monitor.note(self._late)


def _ending(status: int) -> str:
    """Return how a process ended, by its exit status."""
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"died of signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal
        return f"died of signal {-status}"
