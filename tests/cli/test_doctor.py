"""`unisono doctor`: its findings. A broken library affects only its own line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command
from unisono.cli.commands.doctor import Finding, network, print_finding, run_isolated
from unisono.environment.addresses import port_of_job
from unisono.environment.routes import interface_with


@pytest.mark.slow
def test_a_broken_torchvision_does_not_stop_other_checks(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    package = command.folder / "packages" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    ended = command.run("doctor", "--json")
    assert ended.status == 1
    report = json.loads(ended.out)
    found = {finding["what"]: finding for finding in report["findings"]}
    assert report["broken"] == sum(finding["level"] == "broken" for finding in report["findings"]) >= 1
    broken = found["torchvision"]
    assert broken["level"] == "broken"
    assert "operator torchvision::nms does not exist" in broken["facts"]
    assert "-m pip uninstall torchvision" in broken["remedy"]
    assert found["torch"]["level"] == "ok"
    assert "gloo" in found["torch"]["facts"]
    assert found["exchange"]["level"] == "ok"
    assert "us for 4 bytes" in found["exchange"]["facts"]
    assert {"machine", "python", "libraries", "instructions", "device", "disk", "shared memory"} <= set(found)
    assert all(finding["remedy"] for finding in found.values() if finding["level"] == "broken")


def test_isolated_code_that_fails_is_reported_by_its_last_line() -> None:
    assert run_isolated("print('noise'); print('answer')") == ("answer", "")
    assert run_isolated("raise RuntimeError('half\\nwhole')") == (None, "whole")
    assert run_isolated("import os; os.abort()") == (None, "it crashed (signal 6)")
    assert run_isolated("raise SystemExit(3)") == (None, "no message")


def test_a_finding_shows_the_next_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print_finding(Finding("broken", "disk", f"0.0 GB free in {tmp_path}", "free some"))
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"broken disk           0.0 GB free in {tmp_path}"
    assert second.strip() == "Next: free some"


def test_networks_and_the_place_in_a_run_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
    for name in (*names, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (alone,) = network()
    assert (alone.level, alone.what) == ("ok", "network")
    loopback = interface_with("127.0.0.1")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "127.0.0.1\n127.0.0.2")
    monkeypatch.setenv("SKYPILOT_TASK_ID", "mine")
    _, place = network()
    port = port_of_job("mine")
    assert place.facts == f"skypilot: process 1 of 2, which meet at 127.0.0.1:{port}, by {loopback}"
    monkeypatch.delenv("SKYPILOT_NODE_RANK")
    _, broken = network()
    assert (broken.level, broken.what) == ("broken", "launcher")
    assert broken.facts == "Cannot join the nodes of a SkyPilot task. SKYPILOT_NODE_RANK is not set."
