"""Written manifests of Kubernetes as processes in hosts: the bits of one process, evictions and deaths of pods."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_training import SCRIPT
from tests.network.hosts import ROOT, Host, hosts, missing
from tests.network.pods import PodJob
from unisono.environment import inherited

yaml = pytest.importorskip("yaml")
reason = missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)

WRITE = [sys.executable, "-m", "unisono", "kubernetes"]


class Cluster:
    """Two hosts for pods, a folder for the image and one for the volume of runs."""

    def __init__(self, nodes: list[Host], folder: Path) -> None:
        self.nodes, self.image, self.volume = nodes, folder / "image", folder / "volume"
        self.image.mkdir()
        self.volume.mkdir()
        prelude = "import time\nimport unisono\nsay = lambda text: print(text, flush=True)\n"
        (self.image / "train.py").write_text(prelude + SCRIPT)

    def job(self, name: str, *words: str) -> PodJob:
        """Write the manifests of a run of four processes in two pods, and prepare the pods."""
        given = ["--image", "test", "--claim", "runs", "--name", name, "--run-dir", f"/run/volume/{name}"]
        if not {"--ranks"} & set(words):
            given += ["--ranks", "4", "--ranks-per-pod", "2"]
        done = subprocess.run(
            [*WRITE, "train.py", *given, *words],
            cwd=self.image,
            env=inherited({"PYTHONPATH": str(ROOT)}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        job = PodJob(list(yaml.safe_load_all(done.stdout)), self.nodes, self.image, self.volume)
        for log in self.image.glob("pod-*.log"):
            log.unlink()
        for index in range(2):
            job.prepare(index)
        return job

    def result(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.volume / name / "result.json").read_text())
        return found

    def timeline(self, name: str) -> Path:
        return self.volume / name / "timeline" / "rank-0.jsonl"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(2, shared=[tmp_path]) as nodes:
        yield Cluster(nodes, tmp_path)


@pytest.fixture
def fingerprint(tmp_path: Path, cluster: Cluster) -> str:
    """Return the fingerprint of one process."""
    words = [sys.executable, "train.py", "--run-dir", str(tmp_path / "whole")]
    done = subprocess.run(
        words, cwd=cluster.image, env=inherited({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads((tmp_path / "whole" / "result.json").read_text())["weights_sha256"])


def check(cluster: Cluster, name: str, fingerprint: str) -> None:
    found = cluster.result(name)
    assert (found["weights_sha256"], found["promise"]) == (fingerprint, "exact")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--script-from-config-map",),
        ("--job-set",),
        ("--ranks", "2"),
        ("--secret-name", "keys", "--set", "secure.transport=tls"),
    ],
    ids=["job", "job-set", "one-each", "tls"],
)
def test_pods_have_the_bits_of_one_process(cluster: Cluster, fingerprint: str, words: tuple[str, ...]) -> None:
    job = cluster.job("mine", *words)
    for index in (1, 0):
        job.start(index)
    assert [job.wait(index) for index in range(2)] == [0, 0], job.text()
    check(cluster, "mine", fingerprint)
    assert cluster.result("mine")["ranks"] == (2 if "--ranks" in words else 4)
    assert re.search(r"hosts: node-0 \d \(eth0\), node-1 \d \(eth0\)", job.log(0).read_text())
    assert ("between hosts: TLS 1.3" in job.log(0).read_text()) is ("--secret-name" in words)
    assert ("Without --secret-file" in job.log(0).read_text()) is ("--secret-name" not in words)


@pytest.mark.slow
def test_an_evicted_pod_returns_while_the_others_continue(cluster: Cluster, fingerprint: str) -> None:
    job = cluster.job("evicted", "--set", "pause=0.4")
    for index in range(2):
        job.start(index)
    job.wait_for(cluster.timeline("evicted"), '"step":2,')
    status = job.terminate(1)
    assert (status, job.on_exit(status)) == (143, "restart"), job.text()
    job.start(1)
    job.wait_for(job.log(0), "Host node-1 is back.")
    assert [job.wait(index) for index in range(2)] == [0, 0], job.text()
    check(cluster, "evicted", fingerprint)
    assert {death["process"] for death in cluster.result("evicted")["deaths"]} == {2, 3}


@pytest.mark.slow
def test_the_run_continues_after_pod_0_was_evicted(cluster: Cluster, fingerprint: str) -> None:
    job = cluster.job("moved", "--set", "pause=0.2")
    for index in range(2):
        job.start(index)
    job.wait_for(cluster.timeline("moved"), '"step":3,')
    assert job.terminate(0) == 143, job.text()
    assert job.wait(1) == 143, job.text()
    assert job.on_exit(143) == "restart"
    assert cluster.result("moved")["stopped"] is True
    for index in range(2):
        job.start(index)
    assert [job.wait(index) for index in range(2)] == [0, 0], job.text()
    check(cluster, "moved", fingerprint)
    assert "resum" in job.log(0).read_text().lower()


@pytest.mark.slow
def test_the_run_continues_after_pod_0_was_killed(cluster: Cluster, fingerprint: str) -> None:
    job = cluster.job("killed", "--set", "pause=0.2")
    for index in range(2):
        job.start(index)
    job.wait_for(cluster.timeline("killed"), '"step":6,')
    job.signal(0, signal.SIGKILL)
    assert job.wait(0) == 1  # so unshare reports SIGKILL
    assert job.wait(1) == 1, job.text()
    assert job.on_exit(1) == "count"
    for index in range(2):
        job.start(index)
    assert [job.wait(index) for index in range(2)] == [0, 0], job.text()
    check(cluster, "killed", fingerprint)


@pytest.mark.slow
def test_the_others_finish_without_a_node(cluster: Cluster, fingerprint: str) -> None:
    job = cluster.job("dead", "--set", "pause=0.3")
    for index in range(2):
        job.start(index)
    job.wait_for(cluster.timeline("dead"), '"step":2,')
    cluster.nodes[1].kill()
    job.wait_for(job.log(0), "Host node-1 is lost")
    cluster.nodes[1].boot()
    job.prepare(1)
    job.start(1)
    assert [job.wait(index) for index in range(2)] == [0, 0], job.text()
    check(cluster, "dead", fingerprint)
    assert "Host node-1 is back." in job.log(0).read_text()


@pytest.mark.slow
def test_pods_may_start_at_different_times(cluster: Cluster, fingerprint: str) -> None:
    job = cluster.job("late")
    job.start(1)
    with pytest.raises(subprocess.TimeoutExpired):
        job.running[1].wait(15.0)
    assert job.terminate(1) == 143
    job.start(1)
    job.start(0)
    assert [job.wait(index) for index in range(2)] == [0, 0], job.text()
    check(cluster, "late", fingerprint)


@pytest.mark.slow
def test_a_wrong_request_fails_the_job(cluster: Cluster) -> None:
    job = cluster.job("wrong", "--set", "stps=5")
    for index in range(2):
        job.start(index)
    status = job.wait(0)
    assert (status, job.on_exit(status)) == (2, "fail"), job.text()
    assert "stps" in job.log(0).read_text()
    assert job.wait(1) == 2


@pytest.mark.slow
def test_torchrun_reads_the_variables_of_kubeflow(cluster: Cluster, fingerprint: str) -> None:
    """Kubeflow Trainer gives each pod the flags of torchrun as variables."""
    words = [sys.executable, "-m", "torch.distributed.run", "train.py", "--run-dir", str(cluster.volume / "torchrun")]
    port, first = "29400", cluster.nodes[0]
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": first.name, "PET_MASTER_PORT": port}
    started = []
    for index, node in enumerate(cluster.nodes):
        environment = inherited({**variables, "PET_NODE_RANK": str(index), "PYTHONPATH": str(ROOT)})
        log = (cluster.image / f"pod-{index}.log").open("w")
        started.append(node.start(words, cwd=cluster.image, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    statuses = [process.wait(180.0) for process in started]
    assert statuses == [0, 0], "".join(path.read_text() for path in cluster.image.glob("pod-*.log"))
    check(cluster, "torchrun", fingerprint)
    assert cluster.result("torchrun")["ranks"] == 4
