"""Runs on accelerators and the CPU at once: the device of each process, the promise, and refused requests.

The accelerator is that of the machine, or a stand-in that torch loads in every process (tests/standin).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.cli.command import PRELUDE, ROOT, Command
from tests.cli.refused_requests import RequestProblems
from tests.cli.test_deaths import DYING, JOIN_REQUESTED
from tests.cli.test_training import SCRIPT, result
from tests.standin import standin
from unisono.environment import variables

REPORT_DEVICE = "    say(f'on {run.device.type}')\n    x = torch.randn("


def environment_record(command: Command, run_dir: str) -> Any:
    return json.loads((command.folder / run_dir / "environment.json").read_text())


@pytest.mark.gpu
@pytest.mark.slow
def test_a_mixed_run_reports_its_devices_and_promises_a_tolerance(command: Command, device_type: str) -> None:
    command.script(SCRIPT.replace("    x = torch.randn(", REPORT_DEVICE))
    words = ("run", "script.py", "--run-dir", "out", "--ranks", "3")
    ended = command.run(*words, "--cpu-ranks", "2", "--set", "steps=6")
    assert ended.status == 0, ended.err
    assert f"1 process on {device_type}, 2 on cpu, 1 thread each" in ended.out
    command.wait_until_gone()
    assert {word for word in command.words if word.startswith("on ")} == {f"on {device_type} 0", "on cpu 1", "on cpu 2"}
    found = result(command, "out")
    (differs,) = environment_record(command, "out")["differences"]
    assert re.fullmatch("device differs between processes: .+ on rank 0, cpu on rank 1", differs)
    assert (found["promise"], found["reason"]) == ("tolerance", differs)
    assert " --ranks 3 --cpu-ranks 2 " in environment_record(command, "out")["command"]

    ended = command.run(
        *words, "--cpu-ranks", "1", "--set", "steps=12", "--resume"
    )  # another division among the same device types
    assert ended.status != 0  # two processes need an accelerator, and there is one
    ended = command.run(*words[:-1], "2", "--cpu-ranks", "1", "--set", "steps=12", "--resume")
    assert ended.status == 0, ended.err
    ended = command.run(*words, "--cpu-ranks", "3", "--resume")
    assert ended.status == 2
    device = environment_record(command, "out")["device"]  # written by the last run above
    assert f"The run was begun with device = {device}, and the result depends on it." in ended.err
    assert len(device.split(" and ")) == 2
    assert "--accept-change device" in ended.last


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_a_replacement_uses_the_device_type_of_the_dead_process(command: Command, device_type: str, dies: int) -> None:
    wait = f"        while step.number == 4 and not {JOIN_REQUESTED}:\n            time.sleep(0.01)\n"
    script = DYING.replace("        step.update(", wait + "        step.update(")
    command.script(script.replace("    x = torch.randn(", REPORT_DEVICE))
    words = ("--ranks", "2", "--cpu-ranks", "1", "--run-dir", "out", "--set", f"deaths=2:{dies}")
    ended = command.run("run", "script.py", *words)
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert (found["steps"], found["ranks"]) == (24, 2)
    assert [each["process"] for each in found["deaths"]] == [dies]
    assert [each["process"] for each in found["joined"]] == [2]
    command.wait_until_gone()
    assert command.words.count(f"on {(device_type, 'cpu')[dies]} {dies}") == 2
    assert found["promise"] == "tolerance"
    assert found["reason"].startswith("device differs")
    command.script(SCRIPT)
    command.train("whole")
    assert found["loss"] == pytest.approx(result(command, "whole")["loss"], rel=1e-4)


@pytest.mark.slow
def test_processes_of_torchrun_detect_their_devices(command: Command, device_type: str) -> None:
    """The rank in HIDE does not see the accelerator."""
    command.open_pipe()
    hide = "import os\nif os.environ.get('RANK') == os.environ.get('HIDE'):\n"
    hide += f"    os.environ.update({standin.HIDDEN})\n"
    (command.folder / "script.py").write_text(hide + PRELUDE + SCRIPT)

    def torchrun(*words: str, hide: str = "1") -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
        path = os.pathsep.join([str(ROOT), *variables(["PYTHONPATH"]).values()])
        environment = {**os.environ, "PYTHONPATH": path, "HIDE": hide}
        return subprocess.run(
            [*start, *words], cwd=command.folder, env=environment, capture_output=True, text=True, timeout=120
        )

    done = torchrun("--set", "steps=6", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    assert f"1 process on {device_type}, 1 on cpu" in done.stdout
    ended = command.run("run", "script.py", "--ranks", "2", "--cpu-ranks", "1", "--set", "steps=6", "--run-dir", "ours")
    assert ended.status == 0, ended.err
    assert result(command, "out")["weights_sha256"] == result(command, "ours")["weights_sha256"]

    done = torchrun("--set", "steps=6", "--run-dir", "first", hide="0")
    assert done.returncode == 0, done.stderr
    assert f"1 process on cpu, 1 on {device_type}" in done.stdout

    done = torchrun("--set", "parallel.shard=2", "--run-dir", "divided")
    assert done.returncode != 0
    assert done.stderr.count("parallel.shard = 2 needs the same kind of device on all processes.") == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_a_server_needs_no_accelerator(command: Command, device_type: str) -> None:
    command.script(SCRIPT)
    words = ("--ranks", "2", "--cpu-ranks", "1", "--set", "exchange=server", "--set", "steps=6", "--run-dir", "out")
    ended = command.run("run", "script.py", *words)
    assert ended.status == 0, ended.err
    assert f"1 process on cpu, 1 on {device_type}" in ended.out


@pytest.mark.slow
def test_more_processes_than_accelerators_are_answered_with_cpu_ranks(command: Command, device_type: str) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.status == 1
    assert f"Process 1 has no {device_type} device.\n  It would use device 1, and this host has 1.\n" in ended.err
    assert "start 1 process here; or let several share a device" in ended.last
    assert "--ranks-per-device N" in ended.last
    assert "--cpu-ranks N" in ended.last


@pytest.mark.parametrize(
    ("words", "error", "true", "do"),
    [
        (
            "--cpu-ranks 3",
            "--cpu-ranks 3 is out of range.",
            "Of 1 process, 0 to 1 can",
            "--ranks 4",
        ),
        ("--ranks 2 --cpu-ranks=-1", "--cpu-ranks -1 is out of range.", "Of 2 processes, 0 to 2", "--cpu-ranks 1"),
        ("--cpu-ranks x", "Invalid value for --cpu-ranks: x", "--cpu-ranks takes a whole number", "--cpu-ranks 1"),
    ],
)
def test_an_invalid_number_of_cpu_ranks_is_refused(
    request_problems: RequestProblems, words: str, error: str, true: str, do: str
) -> None:
    (problem,) = request_problems("run", "text", *words.split())
    assert problem.error == error
    assert problem.facts.startswith(true)
    assert do in problem.remedy


@pytest.mark.ci
@pytest.mark.parametrize(
    "what",
    ["parallel.shard=2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("exchange=ddp", "parallel.tensor=2"))],
)
def test_exchanges_and_axes_that_need_equal_devices_are_refused(command: Command, device_type: str, what: str) -> None:
    """Without an accelerator all processes are on the CPU, and these settings are valid."""
    name, _, value = what.partition("=")
    words = ("run", "text", "--ranks", "2", "--cpu-ranks", "1", "--set", what, "--set", "steps=1", "--run-dir", "out")
    ended = command.run(*words)
    assert ended.status == 2
    assert ended.err.startswith(f"{name} = {value} needs the same kind of device on all processes.")
    assert not (command.folder / "out").exists()


DIFFERING_MODELS = """
from dataclasses import dataclass
import torch

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 3
    how: str = ""

def main(run):
    net, there = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3)), run.device.type != "cpu"
    if run.settings.how == "alike" or there and run.settings.how == "format":
        net.to(memory_format=torch.channels_last)
    if there and run.settings.how == "half":
        net.bfloat16()
    if there and run.settings.how == "more":
        net.append(torch.nn.Conv2d(2, 2, 1))
    model = run.place(net)
    if there and run.settings.how == "frozen":
        model[0].requires_grad_(False)
    if there and run.settings.how == "left":
        model[1].cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(torch.ones(64, 3, 8, 8))):
        for x, in step:
            step.backward(model(x).square().sum(), weight=len(x))
        step.update(optimizer)

unisono.main(main, Settings)
"""


@pytest.mark.parametrize(
    ("how", "true"),
    [
        ("format", "0.weight is (4, 3, 3, 3) float32 with strides (27, 1, 9, 3) on rank 0"),
        ("half", "0.weight is (4, 3, 3, 3) bfloat16"),
        ("more", "there are 6 parameters on rank 0, and there are 4 parameters on rank 1"),
        ("frozen", "0.weight is (4, 3, 3, 3) float32 with strides (27, 9, 3, 1), not trained on rank 0"),
        ("left", "1.weight is (2, 4, 3, 3) float32 with strides (36, 9, 3, 1), on another device than the run's on"),
    ],
)
@pytest.mark.slow
def test_models_that_differ_between_device_types_are_refused(
    command: Command, device_type: str, how: str, true: str
) -> None:
    command.script(DIFFERING_MODELS)
    words = ("--ranks", "2", "--cpu-ranks", "1", "--run-dir", "out")
    ended = command.run("run", "script.py", *words, "--set", f"how={how}")
    assert ended.status == 1
    assert f"The model is another one on each: {true}" in ended.err
    assert "EnforceNotMet" not in ended.err


@pytest.mark.slow
def test_equal_models_on_both_device_types_are_accepted(command: Command, device_type: str) -> None:
    command.script(DIFFERING_MODELS)
    for count in ("1", "2"):
        words = ("--ranks", "2", "--cpu-ranks", count, "--run-dir", count, "--set", "how=alike", "--set", "steps=20")
        ended = command.run("run", "script.py", *words)
        assert ended.status == 0, ended.err
    assert result(command, "1")["loss"] == pytest.approx(result(command, "2")["loss"], rel=1e-5)


@pytest.mark.slow
def test_doctor_proposes_a_command_for_this_host(command: Command, device_type: str) -> None:
    ended = command.run("doctor")
    assert f"{device_type}:0" in ended.out
    assert ended.out.splitlines()[-2] == "Ready. Next: unisono run text --ranks 2 --cpu-ranks 1"
