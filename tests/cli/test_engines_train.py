"""`python train.py`, typed once on each node, is one run: with the variables of each engine, by IPv4 and IPv6."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_SECONDS, ROOT, Command
from tests.cli.test_mpirun import REQUEST, SCRIPT, result
from unisono import environment
from unisono.environment import World, inherited
from unisono.environment.routes import interface_with
from unisono.testing import run_ranks


def skypilot(node: int, job: str) -> dict[str, str]:
    return {
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_TASK_ID": job,
    }


def dstack(node: int, job: str) -> dict[str, str]:
    return {
        "DSTACK_NODE_RANK": str(node),
        "DSTACK_NODES_NUM": "2",
        "DSTACK_MASTER_NODE_IP": "127.0.0.1",
        "DSTACK_RUN_ID": job,
    }


def kubernetes(node: int, job: str) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port(job)}


def kubeflow(node: int, job: str) -> dict[str, str]:
    names = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port(job)}
    return {f"PET_{name}": value for name, value in names.items()}


def by_hand_ipv6(node: int, job: str) -> dict[str, str]:
    return {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": port(job)}


def by_hand_brackets(node: int, job: str) -> dict[str, str]:
    return {**by_hand_ipv6(node, job), "MASTER_ADDR": "[::1]"}


def submitit(node: int, job: str) -> dict[str, str]:
    names = {"NTASKS": "2", "GLOBALID": str(node), "LOCALID": str(node), "JOB_ID": job}
    return {f"SUBMITIT_LOCAL_{name}": value for name, value in names.items()}


def dstack_ipv6(node: int, job: str) -> dict[str, str]:
    return {**dstack(node, job), "DSTACK_MASTER_NODE_IP": "::1"}


def port(job: str) -> str:
    """Return a port that other tests do not use."""
    return str(20_000 + int(job, 16) % 10_000)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the fingerprint of a run in one process."""
    command = Command(tmp_path_factory.mktemp("alone"))
    (command.folder / "script.py").write_text(SCRIPT)
    command.train("out", *REQUEST)
    command.close()
    return str(result(command.folder, "out")["weights_sha256"])


def train_on_two_nodes(folder: Path, engine: Callable[[int, str], dict[str, str]]) -> list[subprocess.Popen[str]]:
    (folder / "script.py").write_text(SCRIPT)
    job, words = uuid.uuid4().hex[:8], [sys.executable, "script.py", "--run-dir", "out", *REQUEST]
    return [
        subprocess.Popen(
            words,
            cwd=folder,
            env=inherited({**engine(node, job), "PYTHONPATH": str(ROOT)}),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]


ENGINES = (skypilot, dstack, dstack_ipv6, kubernetes, kubeflow, submitit, by_hand_ipv6, by_hand_brackets)
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__)


def skip_without_ipv6(engine: Callable[[int, str], dict[str, str]]) -> None:
    if any(":" in value for value in engine(0, "0").values()) and interface_with("::1") is None:
        pytest.skip("this machine has no IPv6")


def train_here(world: World, folder: str, variables: list[dict[str, str]]) -> None:
    """Act as `python script.py` on a node, in a process that need not load torch."""
    os.environ.update(variables[world.rank])
    environment.assign(None)
    script = str(Path(folder, "script.py"))
    sys.argv = [script, "--run-dir", str(Path(folder, "out")), *REQUEST]
    sys.stdout = sys.stderr
    runpy.run_path(script, run_name="__main__")


@pytest.mark.ci
@each_engine
def test_two_nodes_train_together(tmp_path: Path, alone: str, engine: Callable[[int, str], dict[str, str]]) -> None:
    skip_without_ipv6(engine)
    (tmp_path / "script.py").write_text(SCRIPT)
    job = uuid.uuid4().hex[:8]
    run_ranks(train_here, 2, str(tmp_path), [engine(node, job) for node in range(2)])
    assert result(tmp_path, "out")["ranks"] == 2
    assert result(tmp_path, "out")["weights_sha256"] == alone


@pytest.mark.slow
@each_engine
def test_the_command_on_two_nodes(tmp_path: Path, alone: str, engine: Callable[[int, str], dict[str, str]]) -> None:
    skip_without_ipv6(engine)
    nodes = train_on_two_nodes(tmp_path, engine)
    output = [node.communicate(timeout=PATIENCE_SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    assert result(tmp_path, "out")["weights_sha256"] == alone
    assert f"fingerprint  {alone}" in output[0]
    assert output[1] == ""


@pytest.mark.slow
def test_a_job_of_the_real_submitit(tmp_path: Path, alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit = pytest.importorskip("submitit", reason="submitit is not installed")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "script.py", "--run-dir", "out", *REQUEST]
    executor = submitit.LocalExecutor(folder=tmp_path / "jobs")
    executor.update_parameters(tasks_per_node=2, timeout_min=3)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *environment.variables(["PYTHONPATH"]).values()]))
    job = executor.submit(submitit.helpers.CommandFunction(words, cwd=tmp_path))
    job.results()
    assert result(tmp_path, "out")["ranks"] == 2
    assert result(tmp_path, "out")["weights_sha256"] == alone
