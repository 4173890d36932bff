"""`unisono ray` on several nodes of a real Ray: whatever dies, the bits are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.clusters.ray_nodes import RayNodes, chain_of, left_behind, missing, ray_nodes, start, wait_for

reason = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(reason), reason=reason),
]

SCRIPT = """
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import unisono
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 24
    batch: int = 16
    lr: float = 0.01
    hurry: str = ""  # the file that ends pauses of half a second from the ninth step on


def main(run):
    model = run.place(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.settings.lr)
    run.track(model=model, optimizer=optimizer)
    points = torch.randn(200, 6, generator=torch.Generator().manual_seed(5))
    print("place", unisono.World.current().host, unisono.World.current().local_rank, flush=True)
    for step in run.steps(torch.utils.data.TensorDataset(points)):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.update(optimizer)
        run.log(loss=step.loss)
        if step.number >= 8 and run.settings.hurry:
            if step.number == 8 and run.rank == 0:
                print("reached step 8", flush=True)
            if not Path(run.settings.hurry).exists():
                time.sleep(0.5)


if __name__ == "__main__":
    unisono.main(main, Settings)
"""
LONG = ("--set", "steps=160")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    work = tmp_path_factory.mktemp("work")
    (work / "train.py").write_text(SCRIPT)
    with ray_nodes(work, tmp_path_factory.mktemp("token") / "token") as running:
        yield running


def fingerprint(cluster: RayNodes, run_dir: str) -> str:
    """Return the fingerprint of a run."""
    result = json.loads((cluster.work / run_dir / "result.json").read_text())
    assert result["promise"] == "exact"
    return str(result["weights_sha256"])


def alone(cluster: RayNodes, *flags: str) -> str:
    """Return the fingerprint of one process."""
    name = "-".join(("alone", *flags[1:]))
    if not (cluster.work / name).exists():
        command = [sys.executable, "train.py", "--run-dir", name, *flags]
        subprocess.run(command, cwd=cluster.work, check=True, capture_output=True)
    return fingerprint(cluster, name)


def test_actors_on_two_nodes_have_the_bits_of_one_process(cluster: RayNodes) -> None:
    cluster.keep_nodes(2)
    done = cluster.run("train.py", "--ranks", "4", "--run-dir", "four")
    assert done.returncode == 0, done.stderr
    assert fingerprint(cluster, "four") == alone(cluster)
    logs = [(cluster.work / "four" / "log" / f"rank-{rank}.log").read_text() for rank in range(4)]
    places = [line.split()[-2:] for log in logs for line in log.splitlines() if "place " in line]
    assert sorted(local for _, local in places) == ["0", "0", "1", "1"], places
    assert len({host for host, _ in places}) == 2
    assert all(f"place {host} {local}" in cluster.logs() for host, local in places)
    assert left_behind("four") == []


def kill_process(cluster: RayNodes, chain: list[psutil.Process]) -> None:
    chain[0].kill()


def kill_actor(cluster: RayNodes, chain: list[psutil.Process]) -> None:
    chain[2].kill()


def kill_raylet(cluster: RayNodes, chain: list[psutil.Process]) -> None:
    cluster.kill_raylet(chain[3].pid)


def remove_node(cluster: RayNodes, chain: list[psutil.Process]) -> None:
    cluster.remove_node(chain[3].pid)


@pytest.mark.parametrize(
    ("fault", "nodes"), [(kill_process, 2), (kill_actor, 2), (kill_raylet, 3), (remove_node, 3)], ids=lambda each: ""
)
def test_survivors_continue_with_a_fresh_actor(
    cluster: RayNodes, fault: Callable[[RayNodes, list[psutil.Process]], None], nodes: int, tmp_path: Path
) -> None:
    cluster.keep_nodes(nodes)
    name, output, hurry = fault.__name__, tmp_path / "output", tmp_path / "hurry"
    words = cluster.words("train.py", "--ranks", "4", "--run-dir", name, *LONG, "--set", f"hurry={hurry}")
    with start(words, cluster.work, output) as command:
        try:
            wait_for(lambda: "reached step 8" in output.read_text(), "the run has not reached step 8")
            chain = chain_of(name, 3)
            assert "raylet" in chain[3].name()
            fault(cluster, chain)
            lost = 1 if nodes == 2 else 2  # a node has two actors
            wait_for(lambda: output.read_text().count(" joined after ") >= lost, "no fresh actor has joined")
            hurry.touch()
            assert command.wait(240) == 0, output.read_text()
        except BaseException:
            command.terminate()
            print(output.read_text())
            raise
    assert fingerprint(cluster, name) == alone(cluster, *LONG)
    assert left_behind(name) == []


def test_nothing_outlives_the_launcher(cluster: RayNodes, tmp_path: Path) -> None:
    cluster.keep_nodes(2)
    output = tmp_path / "output"
    words = cluster.words("train.py", "--ranks", "2", "--run-dir", "killed", "--set", f"hurry={tmp_path}/never", *LONG)
    with start(words, cluster.work, output) as command:
        try:
            wait_for(lambda: "reached step 8" in output.read_text(), "the run has not reached step 8")
            worker = chain_of("killed", 1)[2]
        finally:
            command.kill()
    assert left_behind("killed") == []
    wait_for(lambda: not worker.is_running(), "the worker of the actor is still running", 30)


CALLING = """
import ray
import train
import unisono

if __name__ == "__main__":
    result = unisono.ray.run(train.main, train.Settings(lr=0.02), ranks=2, run_dir="function")
    again = unisono.ray.run("train.py", {"lr": 0.02}, ranks=3, run_dir="script", strategy="SPREAD")
    assert result["weights_sha256"] == again["weights_sha256"]
    assert not ray.is_initialized()
    try:
        unisono.ray.run(train.main, train.Settings(), ranks=8, wait=1)
    except unisono.SettingsError as error:
        print(error)
"""


def run_python(cluster: RayNodes, text: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a driver of the cluster."""
    (cluster.work / name).write_text(text)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, name]
    return subprocess.run(command, cwd=cluster.work, env=environment, capture_output=True, text=True, timeout=300)


def test_a_function_and_a_script_train_from_python(cluster: RayNodes) -> None:
    cluster.keep_nodes(2)
    done = run_python(cluster, CALLING, "calling.py")
    assert done.returncode == 0, done.stderr
    assert fingerprint(cluster, "function") == fingerprint(cluster, "script") == alone(cluster, "--set", "lr=0.02")
    assert "The cluster has no room for the run." in done.stdout
    assert "8 actors with 1 CPU each (PACK); free are 4 of 4 CPU" in done.stdout
    assert left_behind("function") == left_behind("script") == []


TUNING = """
import train
import unisono
from ray import tune


def trial(config):
    unisono.ray.run(train.main, train.Settings(lr=config["lr"]), ranks=2, cpus_per_rank=0.5)


if __name__ == "__main__":
    tuner = tune.Tuner(
        tune.with_resources(trial, unisono.ray.resources(ranks=2, cpus_per_rank=0.5)),
        param_space={"lr": tune.grid_search([0.01, 0.02])},
        run_config=tune.RunConfig(name="study", storage_path=STORAGE),
    )
    for result in tuner.fit():
        assert result.error is None, result.error
        print("trial", result.config["lr"], result.path, result.metrics["step"], result.metrics["loss"])
        print("reports", len(result.metrics_dataframe))
"""


def test_a_trial_of_ray_tune_trains_in_its_placement_group(cluster: RayNodes, tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason="ray[tune] is not installed", exc_type=ImportError)
    cluster.keep_nodes(2)
    done = run_python(cluster, TUNING.replace("STORAGE", repr(str(tmp_path))), "tuning.py")
    assert done.returncode == 0, done.stderr
    trials = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("trial ")]
    assert sorted(lr for lr, *_ in trials) == ["0.01", "0.02"], done.stdout
    assert done.stdout.count("reports 24\n") == 2, done.stdout
    for lr, folder, steps, loss in trials:
        result = json.loads(Path(folder, "run", "result.json").read_text())
        assert result["weights_sha256"] == alone(cluster, "--set", f"lr={lr}")
        assert steps == "24"
        assert float(loss) == pytest.approx(result["loss"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ranks", "9", "--wait", "2"), "The run asks for 9 actors with 1 CPU each (PACK); free are 4 of 4 CPU"),
        (("--ranks", "2", "--gpus-per-rank", "1", "--wait", "2"), "2 actors with 1 CPU, 1 GPU each"),
        (("--ranks", "2", "--address", "127.0.0.1:1"), ":1: connection refused."),
        (("--ranks", "2", "--address", "ray://127.0.0.1:10001"), "--address ray://127.0.0.1:10001 is not supported."),
        (("--ranks", "2", "--strategy", "pack"), "Invalid value for --strategy: pack"),
    ],
)
def test_wrong_requests_are_refused_and_leave_nothing(cluster: RayNodes, flags: tuple[str, ...], message: str) -> None:
    cluster.keep_nodes(2)
    words = cluster.words("train.py", "--run-dir", "refused")
    words = words[:-2] if "--address" in flags else words
    done = subprocess.run([*words, *flags], cwd=cluster.work, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (cluster.work / "refused").exists()
    assert left_behind("refused") == []
