"""The scripts that the converter is tried with, how each is started, and the loss that it prints last."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore

from unisono import environment
from unisono.environment import World
from unisono.testing import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
FINAL = re.compile(r"final loss (-?[\d.]+(?:e-?\d+)?)")


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        name: its file, without the suffix.
        processes: the number of processes that it is started with.
        spawns: whether it starts them itself.
        sets: settings with which a run computes what the script did.
        ranks: the number of processes of the run.
    """

    name: str
    processes: int = 1
    spawns: bool = False
    sets: tuple[str, ...] = ()
    ranks: int = 2

    @property
    def source(self) -> str:
        return (SCRIPTS / f"{self.name}.py").read_text(encoding="utf-8")

    @property
    def peer(self) -> str:
        """The package that only the script itself needs; "" if there is none."""
        return "accelerate" if "accelerate" in self.source else ""


WHOLE = ("virtual_ranks=1",)
"""In bfloat16, gradients of a batch and of its eight parts are rounded differently."""

CASES = (
    Case("ddp_torchrun", 2),
    Case("ddp_spawn", 2, spawns=True),
    Case("ddp_trainer", 2),
    Case("ddp_no_sync", 2),
    Case("ddp_evaluate", 2),
    Case("ddp_dataclass", 2),
    Case("gpt_style", sets=WHOLE, ranks=1),
    Case("data_parallel"),
    Case("accelerate_basic", 2),
    Case("accelerate_accumulate"),
    Case("plain_globals"),
    Case("mnist_argparse"),
    Case("accumulate"),
    Case("amp_scaler", sets=WHOLE, ranks=1),
    Case("plateau"),
    Case("dict_batches"),
    Case("checkpoint_resume"),
    Case("shared_loaders", 2),
)


def printed_by_script(case: Case, folder: Path) -> float:
    """Run a script as its users start it, and return its last loss."""
    script = SCRIPTS / f"{case.name}.py"
    if case.spawns:
        return final_loss(_run_spawning(script, folder))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the agent
    run_ranks(_run_reference, case.processes, str(script), str(folder), store.port, case.processes, seconds=90)
    return final_loss((folder / "screen-0").read_text())


def _run_spawning(script: Path, folder: Path) -> str:
    """Run a script that starts its processes itself, and return what it prints.

    Such a script calls `destroy_process_group` of torch, which aborts or hangs now and then (see `_run_reference`).
    So it is run up to three times.
    """
    errors = []
    for _ in range(3):
        variables = environment.inherited({"TEST_PORT": str(_free_port()), "PYTHONWARNINGS": "ignore"})
        command = [sys.executable, str(script)]
        try:
            done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=90)
        except subprocess.TimeoutExpired as error:
            errors.append(str(error))
            continue
        if done.returncode == 0:
            return done.stdout
        errors.append(done.stderr)
        assert "SIGABRT" in done.stderr, done.stderr
    raise AssertionError("\n".join(errors))


def printed_by_run(script: Path, folder: Path, case: Case) -> float:
    """Train a converted script, and return its last loss."""
    words = ["--run-dir", str(folder), *(word for each in case.sets for word in ("--set", each))]
    run_ranks(_run_converted, case.ranks, str(script), words, seconds=200)
    return final_loss((folder / "screen-0").read_text())


def final_loss(screen: str) -> float:
    found = FINAL.findall(screen)
    assert found, screen
    return float(found[-1])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _print_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for screen in (sys.stdout, sys.stderr):
        screen.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115  (of the process)


def _run_reference(world: World, script: str, folder: str, port: int, processes: int) -> None:
    """Run a script in the environment that torchrun makes; with one process, in that of plain Python.

    `destroy_process_group` does nothing, because torch 2.13 may deadlock there. The reducer of a DDP model has the last
    reference to the group. It joins the threads of gloo under the interpreter lock, and a thread that frees its last
    all-reduce waits for this lock.
    """
    os.chdir(folder)
    _print_to(Path(folder) / f"screen-{world.rank}")
    if processes > 1:
        of_torchrun = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in of_torchrun.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sys.argv = [script]
    dist.destroy_process_group = lambda group=None: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def _run_converted(world: World, script: str, arguments: list[str]) -> None:
    """Run a converted script as launcher/worker_main.py does."""
    from dataclasses import replace

    folder = Path(arguments[1])
    os.chdir(folder)
    _print_to(folder / f"screen-{world.rank}")
    environment.assign(replace(world, launcher="unisono", folder=str(folder)))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
