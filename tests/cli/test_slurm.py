"""Runs as tasks of a real Slurm: they have the same bits, and a requeued job resumes its run."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.slurm import PATIENCE_SECONDS, Slurm, missing_programs, slurm

reason = missing_programs()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(reason), reason=reason),
]

SCRIPT = """
import time
from dataclasses import dataclass

import torch
import unisono
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 24
    batch: int = 16
    pause: float = 0.0  # seconds per step, from the ninth step


def main(run):
    model = run.place(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    points = torch.randn(200, 6, generator=torch.Generator().manual_seed(5))
    for step in run.steps(torch.utils.data.TensorDataset(points)):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.update(optimizer)
        time.sleep(run.settings.pause * (step.number >= 8))


if __name__ == "__main__":
    unisono.main(main, Settings)
"""

TRAIN = f"{sys.executable} train.py --set checkpoint.every=4"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    work = tmp_path_factory.mktemp("work")
    (work / "train.py").write_text(SCRIPT)
    with slurm(work) as running:
        running.run(sys.executable, "train.py", "--run-dir", "alone")
        yield running


def result(cluster: Slurm, run_dir: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((cluster.work / run_dir / "result.json").read_text())
    return content


def bits(cluster: Slurm, run_dir: str | Path) -> tuple[int, str]:
    found = result(cluster, run_dir)
    return found["steps"], found["weights_sha256"]


def wait_for_step_8(cluster: Slurm, job: str, pattern: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not list(cluster.work.glob(f"{pattern}/checkpoints/step-00000008")):
        assert time.monotonic() < until, cluster.output(job)
        time.sleep(0.05)


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_the_tasks_of_a_step_train_one_model(cluster: Slurm, tasks: int) -> None:
    cluster.run("srun", "-n", str(tasks), *TRAIN.split(), "--run-dir", f"tasks-{tasks}")
    assert result(cluster, f"tasks-{tasks}")["ranks"] == tasks
    assert bits(cluster, f"tasks-{tasks}") == bits(cluster, "alone")


def test_unisono_run_can_be_the_task(cluster: Slurm) -> None:
    words = [sys.executable, "-m", "unisono.cli.main", "run", "train.py", "--run-dir", "command"]
    cluster.run("srun", "-n", "2", *words)
    assert bits(cluster, "command") == bits(cluster, "alone")


def test_the_doctor_examines_the_hosts_of_a_step(cluster: Slurm) -> None:
    words = [sys.executable, "-m", "unisono.cli.main", "doctor", "--json", "--script", "train.py"]
    found = json.loads(cluster.run("srun", "-n", "2", *words).stdout)
    assert (found["exit_status"], found["links"]) == (0, [])
    assert [host["reachable"] for host in found["hosts"]] == [True]


@pytest.mark.parametrize("where", ["", "--run-dir again"])
def test_a_requeued_job_resumes_on_another_number_of_tasks(cluster: Slurm, where: str) -> None:
    tasks = "$((2 + ${SLURM_RESTART_COUNT:-0}))"
    job = cluster.submit(f"srun -n {tasks} {TRAIN} --set pause=0.4 {where}", "-n", "3")
    pattern = "again" if where else "runs/train-*"
    wait_for_step_8(cluster, job, pattern)
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.output(job)
    (run_dir,) = cluster.work.glob(pattern)
    found = result(cluster, run_dir)
    assert (found["ranks"], found["resumed_at"] >= 8) == (3, True)
    assert bits(cluster, run_dir) == bits(cluster, "alone")
    shutil.rmtree(run_dir)


def test_a_requeued_job_of_the_launcher_resumes(cluster: Slurm) -> None:
    command = f"{sys.executable} -m unisono.cli.main run train.py --ranks 2 --set checkpoint.every=4"
    job = cluster.submit(f"{command} --set pause=0.4 --run-dir launched", "-n", "2")
    wait_for_step_8(cluster, job, "launched")
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.output(job)
    assert result(cluster, "launched")["resumed_at"] >= 8
    assert bits(cluster, "launched") == bits(cluster, "alone")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_task_ends_the_step_and_the_requeued_job_resumes(cluster: Slurm, rank: int) -> None:
    words = f"srun --kill-on-bad-exit=1 {TRAIN} --set pause=0.4 --run-dir killed-{rank}"
    job = cluster.submit(f"{words} || [ ${{SLURM_RESTART_COUNT:-0}} = 1 ] || scontrol requeue $SLURM_JOB_ID", "-n", "2")
    wait_for_step_8(cluster, job, f"killed-{rank}")
    cluster.task(job, rank).send_signal(signal.SIGKILL)
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.output(job)
    assert f"task {rank}: Killed" in cluster.output(job)  # Slurm's message
    assert result(cluster, f"killed-{rank}")["resumed_at"] >= 8
    assert bits(cluster, f"killed-{rank}") == bits(cluster, "alone")


def test_a_signal_before_the_time_limit_saves_and_ends_the_job(cluster: Slurm) -> None:
    job = cluster.submit(f"srun {TRAIN} --set pause=0.4 --run-dir stopped", "-n", "2")
    wait_for_step_8(cluster, job, "stopped")
    cluster.run("scancel", "--signal=TERM", job)  # as sbatch --signal=TERM@60 does
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.output(job)
    steps = result(cluster, "stopped")["steps"]
    assert result(cluster, "stopped")["stopped"]
    assert 8 <= steps < 24
    cluster.run("srun", "-n", "3", *TRAIN.split(), "--run-dir", "stopped", "--resume")
    assert result(cluster, "stopped")["resumed_at"] == steps
    assert bits(cluster, "stopped") == bits(cluster, "alone")


def test_a_job_stopped_by_a_signal_can_requeue_itself(cluster: Slurm) -> None:
    more = "grep -q '\"stopped\": true' back/result.json && scontrol requeue $SLURM_JOB_ID"
    job = cluster.submit(f"srun {TRAIN} --set pause=0.4 --run-dir back\n{more}\nexit 0", "-n", "2")
    wait_for_step_8(cluster, job, "back")
    cluster.run("scancel", "--signal=TERM", job)
    until = time.monotonic() + PATIENCE_SECONDS
    while "continuing after step" not in cluster.output(job):
        assert time.monotonic() < until, cluster.output(job)
        time.sleep(0.2)
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.output(job)
    assert bits(cluster, "back") == bits(cluster, "alone")
