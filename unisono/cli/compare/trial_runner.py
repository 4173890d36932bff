"""Trials: the same few steps of a script, run in several ways, so that what their processes noted can be compared.

What `unisono check` and `unisono prove` have in common. Nothing is kept of these runs.
"""

from __future__ import annotations

import json
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.cli.request.other_libraries import hint
from unisono.cli.request.run_dir import APART
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine
from unisono.config import read as read_settings
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome


@dataclass(frozen=True)
class Trial:
    """A way to run the script."""

    name: str
    ranks: int
    sets: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=lambda: {"PYTHONHASHSEED": "random"})
    notes: str = "{steps}:{folder}"
    """What its processes note, as the flag --trace takes it."""


@dataclass(kw_only=True)
class TrialRunner(ABC):
    """The trials of one question. `start` runs a script; see launcher/local_launch.py."""

    script: Path
    threads: int
    steps: int
    request: RunRequest
    line: CommandLine
    folder: Path
    start: Callable[..., RunOutcome] = local_launch.run

    def _run_dir(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-").replace(",", "")

    def notes(self, name: str) -> Path:
        """The folder where the trial of this name notes what it sees."""
        return self._run_dir(name) / "notes"

    def _settings(self, name: str) -> dict[str, Any]:
        """As they were in the trial of this name."""
        return read_settings(self._run_dir(name) / "settings.toml")[0]

    def _run(self, trial: Trial) -> RunOutcome:
        """Run the steps; what an earlier trial of this name has left is gone then."""
        run_dir = self._run_dir(trial.name)
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        notes = trial.notes.format(steps=self.steps, folder=self.notes(trial.name))
        request = replace(self.request, sets=(*self.request.sets, *trial.sets, APART), trace=notes, json=False)
        return self.start(
            self.script,
            request.arguments(run_dir),
            ranks=trial.ranks,
            logs=run_dir / "log",
            threads=self.threads,
            screen=None,
            say=False,
            variables=trial.variables,
        )

    # -- what is said

    def _say(self, text: str) -> None:
        """To people; programs get one JSON object in the end."""
        if not self.request.json:
            print(text, flush=True)

    @abstractmethod
    def _facts(self, status: int) -> dict[str, Any]:
        """What stands in the JSON object however it ends."""

    def _leave(self, status: int, **more: Any) -> int:
        if self.request.json:
            told = json.dumps(self._facts(status) | more)
            print(json.dumps(json.loads(told, parse_constant=str)))  # JSON has no word for an infinite error
        return status

    def _stopped(self) -> int:
        """Somebody has stopped it."""
        print(f"Stopped, with nothing proved.\n  Next: {self.line}", file=sys.stderr)
        return self._leave(1, cause="stopped")

    def _say_no_ground(self, outcome: RunOutcome) -> str:
        """It fails on one process, so there is nothing to compare with; returns the error's message."""
        message, text = reason_of(outcome)
        told = hint(self.script, self.line, outcome)
        self._say(f"It fails with 1 process already.\n\n{text}" + (f"\n\n{told}" if told is not None else ""))
        return message


def refuse_unfit(line: CommandLine, steps: int, request: RunRequest) -> None:
    """Raises SettingsError for what trials are not: they have a step at least, and nothing to do with any other run."""
    if steps < 1:
        raise SettingsError(f"--steps {steps}", "At least one step is compared.", str(line.flag("--steps", "3")))
    if request.resume or request.autoresume or request.run_dir is not None:
        true = "It begins every run at step 0, in a folder of its own."
        raise SettingsError(str(line), true, str(line.without("--resume").without("--autoresume").without("--run-dir")))


def reason_of(outcome: RunOutcome) -> tuple[str, str]:
    """Why a run failed: its message, and all that is to be said of it, the traceback too."""
    record = outcome.failure.record if outcome.failure is not None else None
    said = (record.traceback or record.message) if record is not None else str(outcome.failure)
    return record.message if record is not None else said, said.rstrip()
