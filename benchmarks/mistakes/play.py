"""Run a case: ours and DistributedDataParallel in this Python, another library in a Python where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.mistakes.stage import DDP, Place, case
from unisono.config import CheckpointSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World, inherited
from unisono.testing import build_run, close_run, run_ranks

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0


def play_ours(name: str, size: int) -> Any:
    """Return our figure on `size` processes, which must agree on it."""
    return _agreed(_launched(_ours, name, size))


def play_ddp(name: str, size: int) -> Any:
    """Return the figure of rank 0 in a loop with DistributedDataParallel by hand."""
    return _launched(_ddp, name, size)[0]


def play_peer(name: str, player: str, size: int, python: str) -> Any:
    """Return the figure of another library, from processes of `python` that torchrun starts."""
    with tempfile.TemporaryDirectory() as folder:
        for launch in range(case(name).launches):
            command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
            command += ["-m", "benchmarks.mistakes.stage", name, player, folder, str(launch)]
            variables = inherited({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, errors="replace", timeout=SECONDS
            )
            figures = list(_figures(done.stdout))
            if not figures:  # the exit status means nothing: some libraries abort at exit, after the end of training
                raise RuntimeError(f"{player} printed no figure for {name}:\n{done.stdout}\n{done.stderr}")
    return figures[-1]


def _figures(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("figure "):
            yield json.loads(line.removeprefix("figure "))


def _launched(function: Any, name: str, size: int) -> list[Any]:
    """Return the results of all processes in the last launch."""
    figures: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for launch in range(case(name).launches):
            figures = run_ranks(function, size, name, folder, launch, seconds=SECONDS)
    return figures


def _agreed(figures: list[Any]) -> Any:
    assert all(figure == figures[0] for figure in figures), figures
    return figures[0]


def _ours(world: World, name: str, folder: str, launch: int) -> Any:
    played, run_dir = case(name), Path(folder) / "run"
    run_dir.mkdir(exist_ok=True)
    with join(world) as group:
        run = build_run(settings(played.settings), world, group, run_dir, resume=launch > 0)
        try:
            return played.ours(run, Place(world.rank, world.size, Path(folder), launch))
        finally:
            close_run(run)


def settings(given: Any) -> Settings:
    own = {name: value for name, value in given.items() if "." not in name}
    every = given.get("checkpoint.every", 0)
    return Settings(**{"virtual_ranks": 8, **own}, checkpoint=CheckpointSettings(every=every))


def _ddp(world: World, name: str, folder: str, launch: int) -> Any:
    warnings.simplefilter("ignore")
    with join(world):
        return case(name).peers[DDP](Place(world.rank, world.size, Path(folder), launch))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        played = case(name)
        for size in played.sizes:
            try:
                found = play_ours(name, size)
                print(name, size, "ours", found, played.is_right(found))
            except AssertionError as e:
                print(name, size, "ours", str(e)[-1500:])
            if DDP in played.peers:
                found = play_ddp(name, size)
                print(name, size, "ddp", found, played.is_right(found))
