"""Start the process that sends what a run logs to experiment trackers (trackers/follower.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from unisono.config.wording import plural
from unisono.environment import inherited
from unisono.trackers.registry import names_of
from unisono.train.extensions import Extension

if TYPE_CHECKING:
    from unisono.train.context import RunContext

PATIENCE = 10.0
"""Seconds that the end of a run waits for its trackers. Then they finish by themselves."""


class Tracking(Extension):
    """Run a follower on the main process. After its death, another process becomes the main one, and starts its own."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._process: subprocess.Popen[str] | None = None
        if not context.world.joins:  # a replacement has a group of its own until it joins
            self._start()

    def _start(self) -> None:
        if self._process is not None or self._context.group.rank:
            return
        context = self._context
        timeline = str(context.monitor.timeline_path)
        words = [sys.executable, "-m", "unisono.trackers.follower", str(context.run_dir), timeline]
        self._process = subprocess.Popen(
            [*words, context.settings.track],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=inherited({"PYTHONPATH": ":".join(path for path in sys.path if path)}),
            start_new_session=True,  # Ctrl-C ends training, and with it the follower
        )
        threading.Thread(target=self._show, args=(self._process,), name="trackers", daemon=True).start()

    def _show(self, process: subprocess.Popen[str]) -> None:
        """Print what the follower prints."""
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                self._context.monitor.note(line.rstrip())

    def regrouped(self, first: int, *, failed: bool) -> None:
        self._start()

    def ended(self, error: Exception | None) -> None:
        process = self._process
        if process is None or error is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            names = plural(len(names_of(self._context.settings.track)), "tracker")
            self._context.monitor.note(f"The {names} did not finish within {PATIENCE:.0f} s, and will end later.")


def build_tracking(context: RunContext) -> list[Tracking]:
    """Return the extension, if the settings name a tracker."""
    return [Tracking(context)] if names_of(context.settings.track) else []
