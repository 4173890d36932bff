"""The base of verbs that run a script again: quiet runs in a temporary folder, then a report as text or JSON."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine
from unisono.config.wording import wrapped
from unisono.environment import terminal_columns
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome


@dataclass(kw_only=True)
class Verification(ABC):
    """One execution of such a verb.

    Args:
        line: the typed command, for messages.
        folder: a temporary folder for all runs.
        as_json: print one JSON object at the end instead of text.
        start: starts a script; see launcher/local_launch.py.
    """

    line: CommandLine
    folder: Path
    as_json: bool = False
    start: Callable[..., RunOutcome] = local_launch.run

    @abstractmethod
    def _facts(self, status: int) -> dict[str, Any]:
        """Return what the JSON object holds in any case."""

    def _run_dir(self, name: str) -> Path:
        """Return the run directory of the run with this name."""
        return self.folder / name.replace(" ", "-").replace(",", "")

    def _start(self, script: Path, arguments: Sequence[str], run_dir: Path, **more: Any) -> RunOutcome:
        """Run a script without output on the screen; `more` are arguments of `start`."""
        return self.start(script, arguments, logs=run_dir / "log", screen=None, verbose=False, **more)

    def _say(self, text: str) -> None:
        """Print a line of the report, unless it is JSON."""
        if not self.as_json:
            print(wrapped(text, terminal_columns()), flush=True)

    def _leave(self, status: int, **more: Any) -> int:
        """Print the JSON object if it was requested, and return the exit status."""
        if self.as_json:
            text = json.dumps(self._facts(status) | more)
            print(json.dumps(json.loads(text, parse_constant=str)))  # JSON has no NaN and no infinity
        return status

    def _stopped(self, **more: Any) -> int:
        """Report that the user stopped the verb."""
        print(f"Stopped before the comparison was complete.\n  Next: {self.line}", file=sys.stderr)
        return self._leave(1, **more)


def refuse_unfit(line: CommandLine, steps: int, request: RunRequest) -> None:
    """Raise SettingsError for a request that only makes sense for a run of its own."""
    if steps < 1:
        error = f"--steps {steps} is out of range."
        raise SettingsError(error, "At least one step is compared.", str(line.flag("--steps", "3")))
    for flag, given in (
        ("--resume", request.resume),
        ("--autoresume", request.autoresume),
        ("--run-dir", request.run_dir is not None),
    ):
        if given:
            error = f"{flag} cannot be combined with {' '.join(line.words[:2])}."
            facts = "Every run starts at step 0, in a temporary folder."
            do = line.without("--resume").without("--autoresume").without("--run-dir")
            raise SettingsError(error, facts, str(do))


def reason_of(outcome: RunOutcome) -> tuple[str, str]:
    """Return why a run failed: the message, and the text to print, which includes the traceback."""
    record = outcome.failure.record if outcome.failure is not None else None
    text = (record.traceback or record.message) if record is not None else str(outcome.failure)
    return record.message if record is not None else text, text.rstrip()
