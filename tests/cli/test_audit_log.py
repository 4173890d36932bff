"""The audit log of real runs: joins, losses, refusals and stops."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PATIENCE_SECONDS, Command
from unisono.security.audit_trail import read_trail

SCRIPT = """
import torch

def main(run):
    model = run.place(lambda: torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps([(torch.ones(4), torch.ones(1))] * 16):
        for inputs, targets in step:
            step.backward(((model(inputs) - targets) ** 2).sum(), weight=len(inputs))
        step.update(optimizer)
        if step.number == 2:
            BODY

if __name__ == "__main__":
    unisono.main(main)
"""


def entries(run_dir: Path) -> list[dict[str, Any]]:
    """Return the entries of the log, which is whole."""
    seal = json.loads((run_dir / "result.json").read_text())["audit"]
    trail = read_trail((run_dir / "audit.jsonl").read_bytes(), seal)
    assert trail.flaws == []
    assert seal["lines"] == len(trail.entries)
    return [entry for entry in trail.entries if entry is not None]


def events(run_dir: Path) -> list[tuple[str, Any]]:
    return [(entry["event"], entry.get("process")) for entry in entries(run_dir)]


@pytest.mark.slow
def test_joins_losses_and_replacements_are_recorded(command: Command) -> None:
    command.script(SCRIPT.replace("BODY", "world.number == 1 and os.kill(os.getpid(), signal.SIGKILL)"))
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "steps=200", times=2)
    assert ended.status == 0, ended.err
    found = events(command.folder / "out")
    assert found[:3] == [("begin", None), ("join", 0), ("join", 1)]
    assert ("loss", 1) in found
    assert ("leave", 0) in found
    assert found[-1] == ("end", None)
    (loss,) = [entry for entry in entries(command.folder / "out") if entry["event"] == "loss"]
    assert loss["reason"] == "died -9"
    assert loss["host"]
    printed = command.run("audit-log", "out")
    assert (printed.status, printed.err) == (0, "")
    assert "loss      process 1" in printed.out
    log = command.folder / "out" / "audit.jsonl"
    log.write_bytes(b"".join(line for line in log.read_bytes().splitlines(True) if b'"loss"' not in line))
    changed = command.run("audit-log", "out")
    assert changed.status == 1
    assert changed.err.startswith("The audit log was changed.\n  Line ")


@pytest.mark.slow
def test_the_page_stops_a_run_and_the_log_has_the_address(command: Command) -> None:
    """Another process of the user serves the page. A token that may only look stops nothing."""
    command.script(SCRIPT.replace("BODY", "say('ready')"))
    running = command.start("run", "script.py", "--run-dir", "out", "--set", "steps=10000000")
    command.wait_for("ready 0")
    watch = command.start("watch", "out", "--stop")
    assert watch.stdout is not None
    look, stop = (watch.stdout.readline().split(" at ")[1].strip() for _ in range(2))
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(look.replace("/?", "/stop?"), b"", timeout=PATIENCE_SECONDS)
    refused.value.close()
    assert running.poll() is None
    with urllib.request.urlopen(stop.replace("/?", "/stop?"), b"", timeout=PATIENCE_SECONDS) as answer:
        assert answer.read() == b"The run finishes its step, saves and ends.\n"
    ended = command.end(running)
    assert ended.status == 0, ended.err
    watch.send_signal(signal.SIGINT)
    (stopped,) = [entry for entry in entries(command.folder / "out") if entry["event"] == "stop"]
    assert stopped["signal"] == "SIGTERM"
    assert (stopped["by_reason"], stopped["by_address"]) == ("the live page", "127.0.0.1")
    assert json.loads((command.folder / "out" / "result.json").read_text())["stopped"]


@pytest.mark.slow
def test_what_the_page_of_a_run_refuses_is_recorded(command: Command) -> None:
    command.script(SCRIPT.replace("BODY", "say('ready'); time.sleep(600)"))
    running = command.start("run", "script.py", "--run-dir", "out", "--watch", "--set", "steps=10")
    assert running.stderr is not None
    page = next(line for line in running.stderr if line.startswith("Watch ")).split(" at ")[1].strip()
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(page[:-4], timeout=PATIENCE_SECONDS)
    refused.value.close()
    log = command.folder / "out" / "audit.jsonl"
    command.wait_for("ready 0")
    while b'"refusal"' not in log.read_bytes():
        assert running.poll() is None
    (entry,) = [json.loads(line) for line in log.read_bytes().splitlines() if b'"refusal"' in line]
    assert (entry["address"], entry["reason"]) == ("127.0.0.1", "no valid token")
    os.kill(running.pid, signal.SIGKILL)
    command.wait_until_gone()
