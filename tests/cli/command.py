"""Real commands with real processes, and how to wait for them without guessing: a pipe that every process holds open.

A script of these tests opens the named pipe `alive` beside it. What it writes there says how far it is; and when the
last process that holds it is gone, reading it ends.

`start` is the quicker way for many small runs: their processes are forked from one that has loaded torch.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono import environment
from unisono.environment import World
from unisono.launcher.failure_record import FailureRecord
from unisono.launcher.supervisor import RunOutcome
from unisono.launcher.worker_process import WorkerFailure
from unisono.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120.0
"""For a busy machine; nothing waits that long unless it hangs."""

PRELUDE = """
import os, signal, sys, threading, time
from pathlib import Path
import unisono

world = unisono.World.current()
alive = os.open(Path(__file__).with_name("alive"), os.O_WRONLY)

def say(text):
    os.write(alive, f"{text} {world.rank}\\n".encode())
"""


def last_json(screen: str) -> Any:
    """What --json says: the last line on the screen."""
    return json.loads(screen.splitlines()[-1])


def start(script: Path, arguments: Sequence[str], *, ranks: int, logs: Path, **_: Any) -> RunOutcome:
    """launch.local.run, without waiting for torch to be loaded each time. An error of the script is the test's."""
    run_ranks(_run_script, ranks, str(script), list(arguments))
    return RunOutcome(exit_status=0)


def start_quietly(script: Path, arguments: Sequence[str], *, ranks: int, logs: Path, **_: Any) -> RunOutcome:
    """Do what local_launch.run does, in forked processes, for a script whose request is wrong."""
    logs.mkdir(exist_ok=True)
    failed = next(filter(None, run_ranks(_refused_by, ranks, str(script), list(arguments), "", ranks)), None)
    outcome = _outcome(failed)
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr)
    return outcome


def dry_run(script: Path, arguments: Sequence[str], *, ranks: int, **_: Any) -> RunOutcome:
    """Do what local_launch.dry_run does, in a forked process."""
    with tempfile.TemporaryDirectory() as folder:
        (failed,) = run_ranks(_refused_by, 1, str(script), list(arguments), folder, ranks)
    return _outcome(failed)


def _outcome(failed: FailureRecord | None) -> RunOutcome:
    if failed is None:
        return RunOutcome(exit_status=0)
    failure = WorkerFailure(0, 1, failed.time, failed, 0, failed.exit_status, Path("rank-0.log"))
    return RunOutcome(failed.exit_status, failure)


def _refused_by(world: World, script: str, arguments: Sequence[str], dry: str, ranks: int) -> FailureRecord | None:
    """Run the script as far as it goes, and return the record of its failure."""
    rank = ranks - 1 if dry else world.rank
    world = replace(world, rank=rank, local_rank=rank, size=ranks, local_size=ranks, dry=dry)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            _run_script(world, script, arguments)
        except SystemExit as end:
            return FailureRecord.of(end) if end.code else None
        except BaseException as error:
            return FailureRecord.of(error)
    return None


def _run_script(world: World, script: str, arguments: Sequence[str]) -> None:
    """As launcher/worker_main.py does."""
    gc.freeze()  # or collecting garbage at a run's end walks through all of torch, and copies it
    os.chdir(Path(script).parent)
    environment.assign(replace(world, launcher="unisono", folder=os.getcwd()))
    sys.argv = [script, *arguments]
    sys.stdout = sys.stderr
    runpy.run_path(script, run_name="__main__")


@dataclass
class Ended:
    """A command that is over."""

    status: int
    out: str
    err: str
    at: float = field(default_factory=time.time)

    @property
    def last(self) -> str:
        """The last line on the screen."""
        return (self.err.strip() or self.out.strip()).splitlines()[-1]


class Command:
    """`unisono ARGUMENTS` in a folder, with the script `script.py` there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pipe = folder / "alive"
        # Temporary files of killed processes stay, so they get a place that goes; a short one, for sockets' sake.
        self.temporary = Path(tempfile.mkdtemp(prefix="u-"))
        self.words: list[str] = []
        self._rest = b""
        self._alive = -1
        self._running: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.write_text(PRELUDE + textwrap.dedent(text))
        return path

    def train(self, run_dir: str, *arguments: str, ranks: int = 1) -> None:
        """What `unisono run script.py --run-dir RUN_DIR` would train, in processes that are forked (see `start`): for
        runs that another one is held against."""
        self.open_pipe()
        (self.folder / run_dir).mkdir(exist_ok=True)
        words = [f"--run-dir={run_dir}", *arguments]
        start(self.folder / "script.py", words, ranks=ranks, logs=self.folder / run_dir / "log")

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """`unisono ARGUMENTS`; -P, because the installed command does not import from the folder one is in either."""
        return self.start_python("-P", "-m", "unisono.cli.main", *map(str, arguments))

    def open_pipe(self) -> None:
        """Make the pipe that scripts open, and listen."""
        if not self.pipe.exists():
            os.mkfifo(self.pipe)
            self._alive = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)

    def start_python(self, *arguments: str) -> subprocess.Popen[str]:
        self.open_pipe()
        path = os.pathsep.join([str(ROOT), *environment.variables(["PYTHONPATH"]).values()])
        running = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment.inherited({"PYTHONPATH": path, "TMPDIR": str(self.temporary)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._running.append(running)
        return running

    def run(self, *arguments: str | Path, times: int = 1) -> Ended:
        """`times`: so often it begins again."""
        return self.end(self.start(*arguments), times=times)

    def end(self, running: subprocess.Popen[str], *, times: int = 1) -> Ended:
        out, err = running.communicate(timeout=times * PATIENCE_SECONDS)
        return Ended(running.returncode, out, err)

    def wait_for(self, *words: str) -> None:
        """Until the processes have said all of these ("ready 0", "ready 1")."""
        while not set(words) <= set(self.words):
            assert self._hear(), f"everybody left, and only said {self.words}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block that hears only what is said from now on, also while nobody holds the pipe yet."""
        hold = os.open(self.pipe, os.O_WRONLY)
        try:
            while select.select([self._alive], [], [], 0)[0]:
                os.read(self._alive, 4096)
            self.words, self._rest = [], b""
            yield
        finally:
            os.close(hold)

    def wait_until_gone(self) -> None:
        """Until nobody holds the pipe any more."""
        os.close(os.open(self.pipe, os.O_WRONLY))  # a pipe that nobody ever wrote to has no end
        while self._hear():
            pass

    def _hear(self) -> bool:
        assert select.select([self._alive], [], [], PATIENCE_SECONDS)[0], f"silence after {self.words}"
        data = os.read(self._alive, 4096)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.words += [line.decode() for line in lines]
        return bool(data)

    def log(self, rank: int, run_dir: str = "out") -> str:
        return (self.folder / run_dir / "log" / f"rank-{rank}.log").read_text()

    def close(self) -> None:
        for running in self._running:
            if running.poll() is None:
                running.kill()
                running.wait()
            for pipe in (running.stdout, running.stderr):
                if pipe is not None:
                    pipe.close()
        if self._alive >= 0:
            self.wait_until_gone()
            os.close(self._alive)
        shutil.rmtree(self.temporary)
