"""The process of a trial: `unisono run` in a run directory, which can be stopped and continued on more processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.cli.request.run_dir import CHECKPOINTS_IN_RUN_DIR, is_in_use, stop_run
from unisono.cli.request.run_options import RunRequest
from unisono.environment import inherited, variables
from unisono.json_forms import parse
from unisono.security.file_modes import make_folder

VALUES = "values"
"""The folder in a trial's run directory with the values that its processes record."""

POLL_SECONDS = 0.05
"""Time between two looks at a run."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class TrialProcess:
    """The run of a trial.

    Attributes:
        script: The script.
        request: The flags of the run, with the settings of the trial.
        run_dir: Its run directory.
        slots: The places of its processes among those of the study; (): it is not running.
    """

    script: Path
    request: RunRequest
    run_dir: Path
    slots: tuple[int, ...] = ()
    began: float = 0.0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, slots: Sequence[int]) -> None:
        """Start the run on these places, or continue it from its newest checkpoint."""
        make_folder(self.run_dir)
        if is_in_use(self.run_dir):  # by processes of a command that was killed
            stop_run(self.run_dir, reason="the study continues")
        while is_in_use(self.run_dir):
            time.sleep(POLL_SECONDS)
        self.slots, self.began = tuple(slots), time.monotonic()
        resume = (self.run_dir / "settings.toml").exists()  # without a checkpoint, it starts from the beginning
        sets = (*self.request.sets, CHECKPOINTS_IN_RUN_DIR)
        trace = f"{VALUES}:{(self.run_dir / VALUES).absolute()}"
        request = replace(self.request, sets=sets, run_dir=None, resume=resume, json=True, trace=trace)
        words = [sys.executable, "-P", "-m", "unisono.cli.main", "run", str(self.script), "--ranks", str(len(slots))]
        with (self.run_dir / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [*words, *request.arguments(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=inherited(devices_of(self.slots)),
            )

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

    def reason(self) -> str:
        """Return why the run failed, in one line."""
        lines = (self.run_dir / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        found = parse(lines[-1]) if lines else None
        error = (found or {}).get("error")
        text = str(error.get("message", "")) if isinstance(error, dict) else ""
        return next(iter(text.strip().splitlines()), f"exit status {self.status}, see {self.run_dir / 'output'}")


def devices_of(slots: Sequence[int]) -> dict[str, str]:
    """Return the variable that shows a trial its own accelerators; {}: there are none of NVIDIA."""
    given = variables([VISIBLE])
    if given:
        known = [each for each in given[VISIBLE].split(",") if each.strip()]
    else:
        known = [str(i) for i, _ in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*")))]
    chosen = dict.fromkeys(known[slot % len(known)] for slot in slots) if known else {}
    return {VISIBLE: ",".join(chosen)} if chosen else {}
