"""Under torchrun and srun, without our launcher: a process that does not answer is named and has a row in the table.

The processes are real and started as a user would start them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.environment import inherited
from unisono.monitor.status_thread import FIRST_STEP_TIMES

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import unisono

here, moment, rank = Path(__file__).parent, sys.argv.pop(1), int(sys.argv.pop(1))
mine = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"]) == rank

def stop(now):
    if mine and now == moment:
        if now == "loop":
            at = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
            (here / "keys").write_text(" ".join(torch.distributed.TCPStore(*at).list_keys()))
        (here / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

def main(run):
    data = torch.utils.data.TensorDataset(torch.arange(96.0).view(24, 4) / 96, torch.arange(24) % 3)
    stop("met")
    model = run.place(lambda: torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))
        step.update(optimizer)
        if step.number == 300:
            stop("loop")

stop("before")
unisono.main(main)
"""

LIMIT_SECONDS = 2.0
SETS = (
    "--set",
    "batch=8",
    "--set",
    "steps=1000000",
    "--set",
    "epochs=none",
    "--set",
    f"watchdog.timeout={LIMIT_SECONDS}",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")


STOPPED = r"it is stopped \(SIGSTOP"
SILENT = "it does not answer: it"

CASES = {
    "in the loop": ("torchrun", "loop", 1, f"Ranks 0 and 2 wait for rank 1: {STOPPED}"),
    "the first one in the loop": ("torchrun", "loop", 0, f"Ranks 1 and 2 wait for rank 0: {STOPPED}"),
    "before its first status": ("torchrun", "met", 1, f"Ranks 0 and 2 wait for rank 1: ({STOPPED}|{SILENT})"),
    "before it came": (
        "torchrun",
        "before",
        1,
        f"Ranks 0 and 2 wait for rank 1: {SILENT} has not called unisono.main",
    ),
    "the host of the store": ("by hand", "loop", 0, f"Rank 1 waits for rank 0: {SILENT}"),
    "with TLS": ("torchrun", "loop", 1, f"Ranks 0 and 2 wait for rank 1: {STOPPED}"),
    "the host of the private store": ("torchrun", "loop", 0, f"Rank 1 waits for rank 0: {SILENT}"),
    "a task of Slurm's": ("srun", "loop", 1, f"Ranks 0 and 2 wait for rank 1: {STOPPED}"),
    "a task of Slurm's, before it came": (
        "srun",
        "before",
        1,
        f"Ranks 0 and 2 wait for rank 1: {SILENT} has not called unisono.main",
    ),
    "a task of Slurm's that hosts the store": ("srun", "loop", 0, f"Rank 1 waits for rank 0: {SILENT}"),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def as_torchrun(port: int) -> Callable[[int], dict[str, str]]:
    """Return torchrun's variables for each process, where no agent hosts the store."""
    said = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return lambda number: {**said, "RANK": str(number)}


def as_srun(port: int) -> Callable[[int], dict[str, str]]:
    """Return Slurm's variables for each task of a step."""
    said = {"JOB_ID": "17", "STEP_ID": "0", "STEP_NUM_TASKS": "3", "NODEID": "0"}
    said |= {"STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": "3"}
    step = {f"SLURM_{name}": value for name, value in said.items()} | {"MASTER_PORT": str(port)}
    return lambda number: {**step, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}


BY = {"by hand": as_torchrun, "srun": as_srun}


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_process_is_named(tmp_path: Path, name: str) -> None:
    by, moment, rank, expected = CASES[name]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    asked = [str(script), moment, str(rank), *SETS, "--run-dir", str(tmp_path / "run")]
    if by == "torchrun":
        started = [begin(tmp_path, 0, [*TORCHRUN, *asked, *encryption(tmp_path, name)])]
    else:
        variables = BY[by](free_port())
        started = [begin(tmp_path, number, asked, variables(number)) for number in range(3)]
    said, seconds = said_of(started, tmp_path)
    assert re.search(expected, said), said
    assert re.search(rf"\n    {rank}     - .* (is stopped|does not answer)", said), said
    if moment == "loop":
        assert ("/place-" in (tmp_path / "keys").read_text()) == (not encryption(tmp_path, name))
    limit = LIMIT_SECONDS * (1 if moment == "loop" else FIRST_STEP_TIMES)
    assert seconds < limit + LATE_SECONDS, f"{seconds:.1f} s"


def encryption(folder: Path, name: str) -> list[str]:
    """Return the settings that encrypt the messages of a run, for the cases with a private store."""
    if name not in ("with TLS", "the host of the private store"):
        return []
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("3f" * 32)
    return ["--set", "secure.transport=tls", "--set", f"secure.secret_file={secret}"]


LATE_SECONDS = 15.0
"""Five are enough on a quiet machine. Here other programs run, and a process waits only after it has connected."""


def begin(
    folder: Path, number: int, arguments: list[str], variables: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    with (folder / f"said-{number}").open("w") as said:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=inherited(variables or {}),
            stdout=said,
            stderr=said,
            text=True,
        )


def said_of(started: list[subprocess.Popen[str]], folder: Path) -> tuple[str, float]:
    """Return the output of the processes when one reports a hang, and the seconds until then; then kill all."""
    stopped, began = folder / "stopped", 0.0
    try:
        until = time.monotonic() + 60
        while "No process has made progress" not in (said := told(folder)):
            assert time.monotonic() < until, f"no process has reported a hang\n{said}"
            began = began or (time.monotonic() if stopped.exists() else 0.0)
            time.sleep(0.05)
        seconds = time.monotonic() - began
    finally:
        if stopped.exists():  # torchrun would wait half a minute for it
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(stopped.read_text()), signal.SIGKILL)
        for each in started:
            each.wait(60)
    return told(folder), seconds


def told(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("said-*")))
