"""The process of a trial: `unisono run` in a run directory, which can be stopped and continued on more processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import any_of
from unisono.cli.request.run_dir import CHECKPOINTS_IN_RUN_DIR, is_in_use, stop_run, write
from unisono.cli.request.run_options import RunRequest
from unisono.environment import inherited, variables
from unisono.errors import StudyError
from unisono.json_forms import parse
from unisono.security.file_modes import make_folder

VALUES = "values"
"""The folder in a trial's run directory with the values that its processes record."""

TRIAL = "trial.json"
"""The file in a trial's run directory with its settings, and with the reason of a failure."""

POLL_SECONDS = 0.05
"""Time between two looks at a run."""

STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit statuses of a run that was stopped outside of its loop: it repeats the steps since its newest checkpoint."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class TrialProcess:
    """The run of a trial.

    Attributes:
        script: The script.
        request: The flags of the run, with the settings of the trial.
        run_dir: Its run directory.
        pause: The number of steps of the run after which it pauses; 0: it does not.
        slots: The places of its processes among those of the study; (): it is not running.
        began: The time of the newest start, in seconds since 1970.
    """

    script: Path
    request: RunRequest
    run_dir: Path
    pause: int = 0
    slots: tuple[int, ...] = ()
    began: float = 0.0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, slots: Sequence[int]) -> None:
        """Start the run on these places, or continue it from its newest checkpoint."""
        make_folder(self.run_dir)
        self.release()
        write(self.run_dir / TRIAL, json.dumps(self._record()) + "\n")
        self.slots, self.began = tuple(slots), time.time()
        # Without a checkpoint, a run that resumes starts from the beginning.
        resume = (self.run_dir / "settings.toml").exists() or any_of(self.run_dir)
        accepted = self.request.accept_change if resume else ()
        sets = (*self.request.sets, CHECKPOINTS_IN_RUN_DIR)
        trace = f"{f'interval:{self.pause}' if self.pause else VALUES}:{(self.run_dir / VALUES).absolute()}"
        request = replace(self.request, sets=sets, run_dir=None, resume=resume, json=True, trace=trace)
        request = replace(request, accept_change=accepted)
        words = [sys.executable, "-P", "-m", "unisono.cli.main", "run", str(self.script), "--ranks", str(len(slots))]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [*words, *request.arguments(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=inherited(devices_of(self.slots)),
            )

    def release(self) -> None:
        """Stop processes of a command that was killed, which still compute this trial, and wait for their end."""
        if is_in_use(self.run_dir):
            stop_run(self.run_dir, reason="the study continues")
        while is_in_use(self.run_dir):
            time.sleep(POLL_SECONDS)

    def _record(self, failure: str = "") -> dict[str, Any]:
        return {"sets": list(self.request.sets), "failure": failure}

    def record_failure(self, reason: str) -> None:
        """Write down that the trial has failed, for a study whose database is lost."""
        if self.run_dir.is_dir():
            write(self.run_dir / TRIAL, json.dumps(self._record(reason)) + "\n")

    def recorded_failure(self) -> str:
        """Return why the trial failed before the database was lost; "": it did not, or has not run.

        Raises:
            StudyError: The folder has a trial with other settings.
        """
        path = self.run_dir / TRIAL
        if not path.is_file():
            return ""
        found = parse(path.read_bytes()) or {}
        if found.get("sets") != list(self.request.sets):
            facts = f"It has {' '.join(found.get('sets') or ['none'])}; the study draws {' '.join(self.request.sets)}."
            do = "restore the folder and the database of the study, or start a new study with another --run-dir"
            raise StudyError(f"{self.run_dir} has another trial.", facts, do)
        return str(found.get("failure", ""))

    @property
    def is_running(self) -> bool:
        """Whether its process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int:
        """The exit status of its process, which has ended."""
        assert self._process is not None
        return self._process.returncode

    def stop(self) -> None:
        """Let the run save and end after its current step."""
        if self._process is not None and self.is_running:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait for the end of the process."""
        if self._process is not None:
            self._process.wait()

    @property
    def output(self) -> Path:
        """The file with everything that the run prints."""
        return self.run_dir / "output"

    def error(self) -> dict[str, Any]:
        """Return the error with which the run ended, as --json prints it; {}: it printed none."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines() if self.output.is_file() else []
        found = ((parse(lines[-1]) if lines else None) or {}).get("error")
        return found if isinstance(found, dict) else {}

    def reason(self) -> str:
        """Return why the run failed, in one line."""
        text = str(self.error().get("message", ""))
        return next(iter(text.strip().splitlines()), f"exit status {self.status}, see {self.output}")


def devices_of(slots: Sequence[int]) -> dict[str, str]:
    """Return the variable that shows a trial its own accelerators; {}: there are none of NVIDIA."""
    given = variables([VISIBLE])
    if given:
        known = [each for each in given[VISIBLE].split(",") if each.strip()]
    else:
        known = [str(i) for i, _ in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*")))]
    chosen = dict.fromkeys(known[slot % len(known)] for slot in slots) if known else {}
    return {VISIBLE: ",".join(chosen)} if chosen else {}
