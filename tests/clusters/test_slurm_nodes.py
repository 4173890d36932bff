"""Batch scripts of `unisono slurm` on several nodes of a real Slurm: whatever ends a job, the bits are those of one
process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm_nodes import SlurmNodes, missing, slurm_nodes

reason = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(reason), reason=reason),
]

SCRIPT = """
import os
import time
from dataclasses import dataclass

import torch
import unisono
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 24
    batch: int = 16
    pause: float = 0.0  # seconds per step, from the ninth step, until the job is restarted
    fail: int = 0  # the step that raises an exception


def main(run):
    model = run.place(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    points = torch.randn(200, 6, generator=torch.Generator().manual_seed(5))
    for step in run.steps(torch.utils.data.TensorDataset(points)):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.update(optimizer)
        if step.number >= 8 and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(run.settings.pause)
        if step.number == run.settings.fail > 0:
            raise ValueError("the script fails")


if __name__ == "__main__":
    unisono.main(main, Settings)
"""

UNISONO = (sys.executable, "-P", "-m", "unisono.cli.main")
NODES = ("--nodes", "2", "--ranks-per-node", "2", "--set", "checkpoint.every=4")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmNodes]:
    work = tmp_path_factory.mktemp("work")
    (work / "train.py").write_text(SCRIPT)
    with slurm_nodes(work, "a", "b", "c") as running:
        running.run(sys.executable, "train.py", "--run-dir", "alone")
        yield running


def submit(cluster: SlurmNodes, *flags: str) -> str:
    """Submit a job through `unisono slurm`, and return its number."""
    words = ("slurm", "train.py", *NODES, *flags, "--submit", "--json", "--overwrite")
    shown = json.loads(cluster.run(*UNISONO, *words).stdout.splitlines()[-1])
    assert shown["path"] == "train.sbatch"
    return str(shown["job"])


def result(cluster: SlurmNodes, run_dir: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((cluster.work / run_dir / "result.json").read_text())
    return content


def assert_exact(cluster: SlurmNodes, run_dir: str, alone: str = "alone", *, resumed: bool = True) -> None:
    """Compare a run with one that a single process has made without a break."""
    found, whole = result(cluster, run_dir), result(cluster, alone)
    assert (found["steps"], found["weights_sha256"]) == (whole["steps"], whole["weights_sha256"])
    assert (found["promise"], found["ranks"]) == (whole["promise"], 4)
    assert (found.get("resumed_at") or 0) >= 8 * resumed


def wait_for_step_8(cluster: SlurmNodes, job: str) -> None:
    saved = cluster.work / "runs" / f"train-{job}" / "checkpoints" / "step-00000008"
    cluster.wait_until(saved.exists, f"step 8 of job {job}")


def restarts(cluster: SlurmNodes, job: str) -> int:
    return int(cluster.field(job, "Restarts"))


def test_the_ranks_of_several_nodes_train_one_model(cluster: SlurmNodes) -> None:
    job = submit(cluster)
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.logs()
    assert_exact(cluster, f"runs/train-{job}", resumed=False)
    assert (cluster.field(job, "NumNodes"), restarts(cluster, job)) == ("2", 0)


@pytest.mark.parametrize("place", [0, 1])
def test_a_job_continues_on_other_nodes_when_one_fails(cluster: SlurmNodes, place: int) -> None:
    """The first node runs the batch script, too."""
    job = submit(cluster, "--set", "pause=2")
    wait_for_step_8(cluster, job)
    name = cluster.field(job, "NodeList")
    lost = cluster.nodes[sorted(cluster.expand(name))[place]]
    lost.kill()
    try:
        assert cluster.wait_for_end(job) == "COMPLETED", cluster.logs()
        assert lost.name not in cluster.expand(cluster.field(job, "NodeList"))
    finally:
        lost.boot()
        cluster.start(lost, "slurmd")
        cluster.wait_until(lambda: cluster.idle() == set(cluster.nodes), "idle nodes")
    assert restarts(cluster, job) >= 1
    assert_exact(cluster, f"runs/train-{job}")


@pytest.mark.parametrize("partition", ["all", "patient"])
def test_a_preempted_job_continues(cluster: SlurmNodes, partition: str) -> None:
    """Without a grace time, Slurm kills the ranks; with one, they save."""
    job = submit(cluster, "--set", "pause=2", "--partition", partition)
    wait_for_step_8(cluster, job)
    cluster.run("srun", "--partition=urgent", "--nodes=3", "--exclusive", "true")
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.logs()
    assert restarts(cluster, job) == 1
    assert_exact(cluster, f"runs/train-{job}")


def test_a_job_saves_before_its_time_limit_and_continues(cluster: SlurmNodes) -> None:
    job = submit(cluster, "--set", "pause=9", "--time", "2", "--signal", "20")  # Slurm is at most 30 s early here
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.logs()
    assert restarts(cluster, job) >= 1
    assert "Stopping: the current step is finished and saved." in (cluster.work / f"train-{job}.out").read_text()
    assert_exact(cluster, f"runs/train-{job}")


def test_a_job_continues_after_the_death_of_a_rank(cluster: SlurmNodes) -> None:
    job = submit(cluster, "--set", "pause=2")
    wait_for_step_8(cluster, job)
    cluster.run("scancel", "--signal=KILL", f"{job}.0")
    assert cluster.wait_for_end(job) == "COMPLETED", cluster.logs()
    assert restarts(cluster, job) == 1
    assert_exact(cluster, f"runs/train-{job}")


def test_a_script_that_always_fails_ends(cluster: SlurmNodes) -> None:
    job = submit(cluster, "--set", "fail=10")
    assert cluster.wait_for_end(job) == "FAILED", cluster.logs()
    assert restarts(cluster, job) == 1
    assert "ValueError: the script fails" in (cluster.work / f"train-{job}.out").read_text()


def test_a_canceled_job_does_not_come_back(cluster: SlurmNodes) -> None:
    job = submit(cluster, "--set", "pause=2")
    wait_for_step_8(cluster, job)
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED", cluster.logs()
    cluster.wait_until(lambda: cluster.idle() == set(cluster.nodes), "idle nodes")
    assert (cluster.field(job, "JobState"), restarts(cluster, job)) == ("CANCELLED", 0)


def test_each_job_of_an_array_is_a_run_and_continues_alone(cluster: SlurmNodes) -> None:
    for index in ("1", "2"):
        cluster.run(sys.executable, "train.py", "--run-dir", f"alone-{index}", "--set", f"seed={index}")
    job = submit(cluster, "--array", "1-2", "--set", "seed=%a", "--set", "pause=1")
    wait_for_step_8(cluster, f"{job}_2")
    cluster.run("scancel", "--signal=TERM", f"{job}_2")  # this one has the number of the array, too
    for index in ("1", "2"):
        assert cluster.wait_for_end(f"{job}_{index}") == "COMPLETED", cluster.logs()
        resumed = index == "2"
        assert restarts(cluster, f"{job}_{index}") == resumed
        assert_exact(cluster, f"runs/train-{job}_{index}", f"alone-{index}", resumed=resumed)
    assert result(cluster, "alone-1")["weights_sha256"] != result(cluster, "alone-2")["weights_sha256"]


def test_a_job_that_slurm_refuses_is_one_message(cluster: SlurmNodes) -> None:
    words = ("slurm", "train.py", *NODES, "--partition", "absent", "--write", "absent.sbatch", "--submit")
    before = cluster.run("squeue", "-h", "-o", "%i").stdout
    ended = cluster.run(*UNISONO, *words, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (2, "Slurm does not accept the job.")
    assert "absent.sbatch is written. Invalid partition specified: absent; Batch job" in ended.stderr
    assert cluster.run("squeue", "-h", "-o", "%i").stdout == before


def test_a_controller_that_does_not_answer_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with slurm_nodes(tmp_path, "a") as alone:
        alone.run("scontrol", "shutdown")
        alone.wait_until(lambda: alone.run("scontrol", "ping", check=False).returncode != 0, "the end of slurmctld")
        ended = alone.run(*UNISONO, "slurm", "train.py", "--submit", check=False)
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (2, "Slurm does not answer.")
    assert "train.sbatch is written." in ended.stderr
