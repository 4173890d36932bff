"""The first minutes of a new user, with nothing but the Start pages and a script for DistributedDataParallel.

    python -m tests.guides.new_user            the wheel, into a new environment with the packages of this one
    python -m tests.guides.new_user --pip      the same with pip, which fetches torch, too (needs an index)

It prints the seconds of each stage. `tests/package/test_new_user.py` is the same walk as a test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.guides.page_commands import files
from tests.house.sources import ROOT
from tests.package.builds import build_wheel, copy_of_sources, environment_with
from tools.distributions import tracked_files
from unisono.environment import inherited

PATIENCE_SECONDS = 300.0
LONGER = ("--set", "epochs=60", "--set", "checkpoint.every=100")


@dataclass
class NewUser:
    """A new user in an empty folder.

    Attributes:
        folder: where commands are typed.
        programs: the folder of the environment's programs.
        seconds: how long each stage took.
    """

    folder: Path
    programs: Path
    seconds: dict[str, float] = field(default_factory=dict)

    def type(self, stage: str, *words: str, status: int = 0) -> str:
        """Type a command, wait for its end, and return what it prints."""
        began = time.monotonic()
        running = self.start(*words)
        output, _ = running.communicate(timeout=PATIENCE_SECONDS)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began
        assert running.returncode == status, f"{' '.join(words)}: status {running.returncode}\n{output}"
        return output

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Type a command, and do not wait."""
        path = f"{self.programs}:{inherited({})['PATH']}"
        return subprocess.Popen(
            [str(self.programs / words[0]), *words[1:]],
            cwd=self.folder,
            env=inherited({"PATH": path, "PYTHONPATH": ""}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill_after_a_checkpoint(self, stage: str, run_dir: str, *words: str) -> None:
        """Start a run, and kill it when it has saved."""
        began = time.monotonic()
        running = self.start(*words)
        while not any((self.folder / run_dir).glob("checkpoints/step-*/manifest.json")):
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=PATIENCE_SECONDS)
        self.seconds[stage] = time.monotonic() - began


def last_word(output: str) -> str:
    """Return the fingerprint at the end of a run's summary."""
    return output.split()[-1]


def walk(user: NewUser) -> None:
    """From a script for DistributedDataParallel to a run that was killed, resumed and looked at."""
    (user.folder / "ddp.py").write_text(files("docs/start/from-ddp.md")["ddp.py"], encoding="utf-8")
    assert "ok     exchange" in user.type("doctor", "unisono", "doctor")
    output = user.type("convert and check", "unisono", "convert", "ddp.py", "--ranks", "2")
    assert "Placement-proof" in output, output
    train = ("unisono", "run", "ddp_unisono.py", *LONGER)
    whole = user.type("one process", *train, "--run-dir", "runs/whole")
    two = user.type("two processes", *train, "--ranks", "2", "--run-dir", "runs/two")
    assert last_word(two) == last_word(whole)
    user.kill_after_a_checkpoint("until a kill", "runs/mine", *train, "--ranks", "2", "--run-dir", "runs/mine")
    resumed = user.type(
        "resume", "unisono", "run", "ddp_unisono.py", "--ranks", "2", "--run-dir", "runs/mine", "--resume"
    )
    assert last_word(resumed) == last_word(whole)
    user.type("report", "unisono", "report", "runs/mine")
    assert "uPlot" in (user.folder / "runs" / "mine" / "report.html").read_text(encoding="utf-8")


def wheel_of_sources(folder: Path) -> Path:
    """Build the wheel from the files of the repository."""
    (folder / "dist").mkdir()
    return build_wheel(copy_of_sources(tracked_files(), folder / "source"), folder / "dist")


def with_pip(folder: Path, wheel: Path) -> Path:
    """Make an environment, and install the wheel and all that it needs; return the folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = ("-c", str(ROOT / "constraints.txt"))
    what = (f"{wheel}[convert]", *constraints)
    subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *what], check=True)
    return folder / "bin"


def timed(install: Callable[[Path, Path], Path]) -> dict[str, float]:
    """Walk in a temporary folder, and return the seconds of each stage."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        wheel = wheel_of_sources(place)
        (place / "work").mkdir()
        began = time.monotonic()
        user = NewUser(place / "work", install(place / "environment", wheel))
        user.seconds["install"] = time.monotonic() - began
        walk(user)
        return user.seconds


def main() -> None:
    found = timed(with_pip if "--pip" in sys.argv[1:] else environment_with)
    for stage, seconds in found.items():
        print(f"{stage:20} {seconds:6.1f} s")
    print(f"{'together':20} {sum(found.values()):6.1f} s")


if __name__ == "__main__":
    main()
