"""Trials: the same few steps of a script, run in several ways, whose recordings are compared.

`unisono check` and `unisono prove` are built on it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.cli.compare.repeated_runs import Verification, reason_of
from unisono.cli.request.other_libraries import hint
from unisono.cli.request.run_dir import CHECKPOINTS_IN_RUN_DIR
from unisono.cli.request.run_options import RunRequest
from unisono.config import plural
from unisono.config import read as read_settings
from unisono.launcher.supervisor import RunOutcome


@dataclass(frozen=True)
class Trial:
    """One way to run the script.

    Args:
        name: shown in the report; it also names the run directory.
        ranks: the number of processes.
        sets: additional settings.
        variables: environment variables.
        recording: what each process records, as the value of the flag --trace.
    """

    name: str
    ranks: int
    sets: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=lambda: {"PYTHONHASHSEED": "random"})
    recording: str = "{steps}:{folder}"


@dataclass(kw_only=True)
class TrialRunner(Verification):
    """Run trials of one script.

    Args:
        script: the script.
        threads: the number of threads of each process.
        steps: the number of steps of each trial.
        request: the flags of each trial.
    """

    script: Path
    threads: int
    steps: int
    request: RunRequest

    def __post_init__(self) -> None:
        self.as_json = self.request.json

    def recording(self, name: str) -> Path:
        """Return the folder with the recordings of the trial with this name."""
        return self._run_dir(name) / "notes"

    def _settings(self, name: str) -> dict[str, Any]:
        """Return the settings that the trial with this name had."""
        return read_settings(self._run_dir(name) / "settings.toml")[0]

    def _run(self, trial: Trial) -> RunOutcome:
        """Run a trial. Files of an earlier trial with this name are removed."""
        run_dir = self._run_dir(trial.name)
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        trace = trial.recording.format(steps=self.steps, folder=self.recording(trial.name))
        sets = (*self.request.sets, *trial.sets, CHECKPOINTS_IN_RUN_DIR)
        arguments = replace(self.request, sets=sets, trace=trace, json=False).arguments(run_dir)
        return self._start(
            self.script, arguments, run_dir, ranks=trial.ranks, threads=self.threads, variables=trial.variables
        )

    def _baseline_fails(self, outcome: RunOutcome, ranks: int = 1) -> str:
        """Report that the script fails without any change already, and return the error's message."""
        message, text = reason_of(outcome)
        advice = hint(self.script, self.line, outcome)
        self._say(
            f"The script fails on {plural(ranks, 'process', 'processes')}.\n\n{text}"
            + (f"\n\n{advice}" if advice is not None else "")
        )
        return message
