"""A run on accelerators and the CPU at once: who computes where, what is promised, and what cannot be.

The accelerator is the machine's own, or a stand-in that torch loads in every process (tests/standin).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.cli.asking import Ask
from tests.cli.command import PRELUDE, ROOT, Command
from tests.cli.test_survive import DYING
from tests.cli.test_training import SCRIPT, result
from tests.standin import standin
from unisono import env

TELLING = "    say(f'on {run.device.type}')\n    x = torch.randn("


@pytest.fixture
def kind(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commands find one accelerator, of this kind."""
    for name, value in standin.environment(accelerator).items():
        monkeypatch.setenv(name, value)
    return "standin" if accelerator else str(torch.accelerator.current_accelerator())


def about(command: Command, run_dir: str) -> Any:
    return json.loads((command.folder / run_dir / "environment.json").read_text())


def test_the_run_says_what_it_computes_on_and_promises_a_tolerance(command: Command, kind: str) -> None:
    command.script(SCRIPT.replace("    x = torch.randn(", TELLING))
    words = ("run", "script.py", "--run-dir", "out", "--ranks", "3")
    ended = command.run(*words, "--cpu-ranks", "2", "--set", "steps=6")
    assert ended.status == 0, ended.err
    assert f"1 process on {kind}, 2 on cpu, 1 thread each" in ended.out
    command.wait_until_gone()
    assert {word for word in command.words if word.startswith("on ")} == {f"on {kind} 0", "on cpu 1", "on cpu 2"}
    found = result(command, "out")
    (differs,) = about(command, "out")["differences"]
    assert re.fullmatch("device differs between processes: .+ on rank 0, cpu on rank 1", differs)
    assert (found["promise"], found["reason"]) == ("tolerance", differs)
    assert " --ranks 3 --cpu-ranks 2 " in about(command, "out")["command"]

    ended = command.run(*words, "--cpu-ranks", "1", "--set", "steps=12", "--resume")  # others of the same kinds
    assert ended.status != 0  # the third process: there is one accelerator
    ended = command.run(*words[:-1], "2", "--cpu-ranks", "1", "--set", "steps=12", "--resume")
    assert ended.status == 0, ended.err
    ended = command.run(*words, "--cpu-ranks", "3", "--resume")
    assert ended.status == 2
    device = about(command, "out")["device"]  # as the last run before has left it
    assert f"It was begun with device = {device}, and the result depends on it." in ended.err
    assert len(device.split(" and ")) == 2
    assert "--accept-change device" in ended.last


@pytest.mark.parametrize("dies", [0, 1])
def test_a_substitute_computes_where_the_dead_one_did(command: Command, kind: str, dies: int) -> None:
    wait = "        while step.number == 4 and not run._group.company.knocks:\n            time.sleep(0.01)\n"
    script = DYING.replace("        step.update(", wait + "        step.update(")
    command.script(script.replace("    x = torch.randn(", TELLING))
    words = ("--ranks", "2", "--cpu-ranks", "1", "--run-dir", "out", "--set", f"deaths=2:{dies}")
    ended = command.run("run", "script.py", *words)
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert (found["steps"], found["ranks"]) == (24, 2)
    assert [each["process"] for each in found["deaths"]] == [dies]
    assert [each["process"] for each in found["joined"]] == [2]
    command.wait_until_gone()
    assert command.words.count(f"on {(kind, 'cpu')[dies]} {dies}") == 2
    assert found["promise"] == "tolerance"
    assert found["reason"].startswith("device differs")
    command.script(SCRIPT)
    command.train("whole")
    assert found["loss"] == pytest.approx(result(command, "whole")["loss"], rel=1e-4)


def test_processes_of_torchrun_find_out_by_themselves(command: Command, kind: str) -> None:
    """One of them does not see the accelerator."""
    command.open_pipe()
    hide = f"import os\nif os.environ.get('RANK') == '1':\n    os.environ.update({standin.HIDDEN})\n"
    (command.folder / "script.py").write_text(hide + PRELUDE + SCRIPT)

    def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
        path = os.pathsep.join([str(ROOT), *env.variables(["PYTHONPATH"]).values()])
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [*start, *words], cwd=command.folder, env=environment, capture_output=True, text=True, timeout=120
        )

    done = torchrun("--set", "steps=6", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    assert f"1 process on {kind}, 1 on cpu" in done.stdout
    ended = command.run("run", "script.py", "--ranks", "2", "--cpu-ranks", "1", "--set", "steps=6", "--run-dir", "ours")
    assert ended.status == 0, ended.err
    assert result(command, "out")["weights_sha256"] == result(command, "ours")["weights_sha256"]

    done = torchrun("--set", "parallel.shard=2", "--run-dir", "divided")
    assert done.returncode != 0
    assert done.stderr.count("parallel.shard = 2\n  Some processes have an accelerator and others none") == 1


def test_a_server_needs_no_accelerator(command: Command, kind: str) -> None:
    command.script(SCRIPT)
    words = ("--ranks", "2", "--cpu-ranks", "1", "--set", "exchange=server", "--set", "steps=6", "--run-dir", "out")
    ended = command.run("run", "script.py", *words)
    assert ended.status == 0, ended.err
    assert f"1 process on cpu, 1 on {kind}" in ended.out


def test_more_processes_than_accelerators_are_told_how(command: Command, kind: str) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.status == 1
    assert f"Process 1 was asked to use {kind} device 1.\n  This host has 1.\n" in ended.err
    assert "unisono run --cpu-ranks 1" in ended.last


@pytest.mark.parametrize(
    ("words", "asked", "do"),
    [
        (("--cpu-ranks", "3"), "--cpu-ranks 3", "--cpu-ranks 1"),
        (("--cpu-ranks=-1",), "--cpu-ranks -1", "--cpu-ranks 1"),
        (("--cpu-ranks", "1", "--set", "exchange=ddp"), "exchange = ddp", "--set exchange=tree"),
        (("--cpu-ranks", "1", "--set", "parallel.shard=2"), "parallel.shard = 2", "--set parallel.shard=1"),
        (("--cpu-ranks", "1", "--set", "parallel.tensor=2"), "parallel.tensor = 2", "--set parallel.tensor=1"),
    ],
)
def test_what_cannot_be_is_said_before_the_start(ask: Ask, words: tuple[str, ...], asked: str, do: str) -> None:
    (problem,) = ask("run", "text", "--ranks", "2", *words)
    assert problem.asked == asked
    assert do in problem.do
