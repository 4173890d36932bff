"""Runs whose processes share an accelerator: the bits, a death, and refused requests.

The accelerator is that of the machine, or a stand-in that torch loads in every process (tests/standin).
"""

from __future__ import annotations

import pytest

from tests.cli.command import ROOT, Command
from tests.cli.refused_requests import RequestProblems
from tests.cli.test_deaths import DYING, JOIN_REQUESTED
from tests.cli.test_training import SCRIPT, result

SHARED = ("--ranks", "3", "--ranks-per-device", "3")


@pytest.mark.slow
def test_three_processes_on_one_device_have_the_bits_of_one(command: Command, device_type: str) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "alone", "--set", "steps=6")
    assert ended.status == 0, ended.err
    ended = command.run("run", "script.py", *SHARED, "--run-dir", "shared", "--set", "steps=6")
    assert ended.status == 0, ended.err
    assert f"3 processes on {device_type}, 3 to a device" in ended.out
    alone, shared = result(command, "alone"), result(command, "shared")
    assert shared["promise"] == "exact"
    assert shared["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.slow
def test_the_others_continue_after_a_death_on_a_shared_device(command: Command, device_type: str) -> None:
    wait = f"        while step.number == 4 and not {JOIN_REQUESTED}:\n            time.sleep(0.01)\n"
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "alone")
    assert ended.status == 0, ended.err
    command.script(DYING.replace("        step.update(", wait + "        step.update("))
    ended = command.run("run", "script.py", *SHARED, "--run-dir", "shared", "--set", "deaths=2:1")
    assert ended.status == 0, ended.err
    found = result(command, "shared")
    assert (found["ranks"], [each["process"] for each in found["deaths"]]) == (3, [1])
    assert found["weights_sha256"] == result(command, "alone")["weights_sha256"]


@pytest.mark.slow
def test_an_evaluation_with_loader_workers_and_pinned_memory(command: Command, device_type: str) -> None:
    words = ("run", ROOT / "benchmarks/golden/script.py", "--set", "net=mlp", "--set", "steps=2")
    for workers in ("0", "1"):
        ended = command.run(*words, "--run-dir", workers, "--set", f"loader.workers={workers}")
        assert ended.status == 0, ended.err
    assert result(command, "1")["weights_sha256"] == result(command, "0")["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["parallel.shard=3", "exchange=ddp"])
def test_settings_that_need_a_device_for_each_process_are_refused(
    command: Command, device_type: str, what: str
) -> None:
    name, _, value = what.partition("=")
    ended = command.run("run", "text", *SHARED, "--set", what, "--set", "steps=1", "--run-dir", "out")
    assert ended.status == 2
    assert ended.err.startswith(f"{name} = {value} needs a device for each process.")
    assert not (command.folder / "out").exists()


@pytest.mark.parametrize("number", ["0", "-1"])
def test_an_invalid_number_of_ranks_per_device_is_refused(request_problems: RequestProblems, number: str) -> None:
    (problem,) = request_problems("run", "text", "--ranks", "2", f"--ranks-per-device={number}")
    assert problem.error == f"--ranks-per-device {number} is out of range."
    assert problem.remedy == "unisono run text --ranks 2 --json"
