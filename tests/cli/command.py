"""Real commands with real processes, and a pipe through which a test waits for them without guessing a time.

A script of these tests opens the named pipe `alive` in its folder and writes its progress there. A reader of the pipe
reaches the end when the last process that holds the pipe open has ended.

`start` is quicker for many small runs: it forks their processes from one that has loaded torch.
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
PATIENCE_SECONDS = 240.0
"""Enough for a busy machine. Only a hang takes that long."""

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
    """Return the JSON object that --json prints as the last line."""
    return json.loads(screen.splitlines()[-1])


def start(script: Path, arguments: Sequence[str], *, ranks: int, logs: Path, **_: Any) -> RunOutcome:
    """Act as local_launch.run, in forked processes that need not load torch. Errors of the script are raised."""
    run_ranks(_run_script, ranks, str(script), list(arguments))
    return RunOutcome(exit_status=0)


def start_quietly(script: Path, arguments: Sequence[str], *, ranks: int, logs: Path, **_: Any) -> RunOutcome:
    """Act as local_launch.run, in forked processes, for a script whose request is wrong."""
    logs.mkdir(exist_ok=True)
    failed = next(filter(None, run_ranks(_refused_by, ranks, str(script), list(arguments), "", ranks)), None)
    outcome = _outcome(failed)
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr)
    return outcome


def dry_run(script: Path, arguments: Sequence[str], *, ranks: int, **_: Any) -> RunOutcome:
    """Act as local_launch.dry_run, in a forked process."""
    with tempfile.TemporaryDirectory() as folder:
        (failed,) = run_ranks(_refused_by, 1, str(script), list(arguments), folder, ranks)
    return _outcome(failed)


def _outcome(failed: FailureRecord | None) -> RunOutcome:
    if failed is None:
        return RunOutcome(exit_status=0)
    failure = WorkerFailure(0, 1, failed.time, failed, 0, failed.exit_status, Path("rank-0.log"))
    return RunOutcome(failed.exit_status, failure)


def _refused_by(world: World, script: str, arguments: Sequence[str], dry: str, ranks: int) -> FailureRecord | None:
    """Run the script up to its failure, and return the record of the failure."""
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
    """Run the script as launcher/worker_main.py does."""
    gc.freeze()  # without it, garbage collection at the end of a run touches, and so copies, all of torch
    os.chdir(Path(script).parent)
    environment.assign(replace(world, launcher="unisono", folder=os.getcwd()))
    sys.argv = [script, *arguments]
    sys.stdout = sys.stderr
    runpy.run_path(script, run_name="__main__")


@dataclass
class Ended:
    """A command that has ended: its exit status and its output."""

    status: int
    out: str
    err: str
    at: float = field(default_factory=time.time)

    @property
    def last(self) -> str:
        """The last line of standard error, or of standard output if standard error is empty."""
        return (self.err.strip() or self.out.strip()).splitlines()[-1]


class Command:
    """Run `unisono ARGUMENTS` in a folder that contains the script `script.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pipe = folder / "alive"
        # Killed processes leave temporary files, so the folder is deleted at the end. Paths of sockets must be short.
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
        """Train as `unisono run script.py --run-dir RUN_DIR` does, in forked processes: for reference runs."""
        self.open_pipe()
        (self.folder / run_dir).mkdir(exist_ok=True)
        words = [f"--run-dir={run_dir}", *arguments]
        start(self.folder / "script.py", words, ranks=ranks, logs=self.folder / run_dir / "log")

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start `unisono ARGUMENTS`. Like the installed command, it does not import from the current folder (-P)."""
        return self.start_python("-P", "-m", "unisono.cli.main", *map(str, arguments))

    def open_pipe(self) -> None:
        """Create the pipe that scripts open, and open it for reading."""
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
        """Run a command to its end.

        Args:
            times: the number of allowed restarts; the time limit grows with it.
        """
        return self.end(self.start(*arguments), times=times)

    def end(self, running: subprocess.Popen[str], *, times: int = 1) -> Ended:
        out, err = running.communicate(timeout=times * PATIENCE_SECONDS)
        return Ended(running.returncode, out, err)

    def wait_for(self, *words: str) -> None:
        """Wait until the processes have written all of these lines ("ready 0", "ready 1")."""
        while not set(words) <= set(self.words):
            assert self._read_pipe(), f"all processes ended and wrote only {self.words}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Ignore earlier lines inside the block, and keep the pipe open even before a process has opened it."""
        hold = os.open(self.pipe, os.O_WRONLY)
        try:
            while select.select([self._alive], [], [], 0)[0]:
                os.read(self._alive, 4096)
            self.words, self._rest = [], b""
            yield
        finally:
            os.close(hold)

    def wait_until_gone(self) -> None:
        """Wait until no process holds the pipe open."""
        os.close(os.open(self.pipe, os.O_WRONLY))  # a pipe that no process has opened for writing never reports its end
        while self._read_pipe():
            pass

    def _read_pipe(self) -> bool:
        assert select.select([self._alive], [], [], PATIENCE_SECONDS)[0], f"nothing more was written after {self.words}"
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
