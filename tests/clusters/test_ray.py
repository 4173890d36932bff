"""`unisono ray` on several nodes of a real Ray: whatever dies, the bits are those of one process."""

from __future__ import annotations

import json
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
