"""Processes that mpirun starts train one model together."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PATIENCE_SECONDS, ROOT, Command
from unisono.environment import inherited

SCRIPT = """
import torch
import unisono
from torch import nn


def main(run):
    model = run.place(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    points = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    for step in run.steps(torch.utils.data.TensorDataset(points)):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.update(optimizer)


if __name__ == "__main__":
    unisono.main(main)
"""
REQUEST = ("--set", "steps=3", "--set", "batch=16")


@pytest.fixture
def folder(command: Command) -> Path:
    """Return a folder with the script and a run of it in one process."""
    (command.folder / "script.py").write_text(SCRIPT)
    command.train("alone", *REQUEST)
    return command.folder


def result(folder: Path, run_dir: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / run_dir / "result.json").read_text())
    return content


@pytest.mark.slow
def test_processes_with_variables_of_mpirun_have_the_bits_of_one_process(folder: Path) -> None:
    words = [sys.executable, "script.py", "--run-dir", "both", *REQUEST]
    ended = []
    for rank in range(2):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 2, "LOCAL_SIZE": 2}
        variables = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}
        variables |= {
            "PMIX_NAMESPACE": folder.name + str(hash(folder)),
            "PMIX_RANK": str(rank),
            "PYTHONPATH": str(ROOT),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ended.append(subprocess.Popen(words, cwd=folder, env=inherited(variables), text=True, **pipes))  # type: ignore[call-overload]
    output = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in ended]
    assert [process.returncode for process in ended] == [0, 0], output
    assert result(folder, "both")["ranks"] == 2
    assert result(folder, "both")["weights_sha256"] == result(folder, "alone")["weights_sha256"]


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not here: Debian's openmpi-bin has it")
def test_a_run_under_mpirun_has_the_bits_of_one_process(folder: Path) -> None:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "script.py"]
    about = inherited({"PYTHONPATH": str(ROOT)})
    ended = subprocess.run(
        [*words, "--run-dir", "mpi", *REQUEST], cwd=folder, env=about, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    assert result(folder, "mpi")["ranks"] == 2
    assert result(folder, "mpi")["weights_sha256"] == result(folder, "alone")["weights_sha256"]
