"""Asynchronous workers that die or hang, the loss of all workers, the death of a server, and a stop."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.cli.command import Command

SCRIPT = """
import torch

def main(run):
    model = run.place(lambda: torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    say(f"pid {os.getpid()}")
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        for a, b in step:
            time.sleep(0.01)
            step.backward((model(a) - b).pow(2).sum(), weight=len(a))
        step.update(optimizer)
        if run.is_main:
            say(f"update {step.number} {time.time()}")
    say("behind")

if __name__ == "__main__":
    unisono.main(main)
"""

FREE = ["--set", "exchange=server", "--set", "server.staleness=none", "--set", "virtual_ranks=2"]


def start(command: Command, ranks: int, *more: str) -> Any:
    command.script(SCRIPT)
    return command.start("run", "script.py", "--ranks", str(ranks), "--run-dir", "out", *FREE, *more)


def pid(command: Command, rank: int) -> int:
    return next(int(w.split()[1]) for w in command.words if w.startswith("pid") and w.endswith(f" {rank}"))


def updates(command: Command) -> list[tuple[int, float]]:
    """Return (number, time) of every update that was reported."""
    lines = [word.split() for word in command.words if word.startswith("update")]
    return [(int(number), float(when)) for _, number, when, _ in lines]


def wait_for_update(command: Command, number: int) -> None:
    while not any(n >= number for n, _ in updates(command)):
        assert command._read_pipe(), command.words


def longest_gap(command: Command, moment: float, last: int = 10**9) -> float:
    """Return the longest time without an update, from a moment to the update `last`."""
    times = [moment, *(when for number, when in updates(command) if when > moment and number <= last)]
    return max(b - a for a, b in pairwise(times))


def result(command: Command) -> Any:
    return json.loads((command.folder / "out" / "result.json").read_text())


@pytest.mark.slow
def test_other_workers_continue_when_a_worker_dies_or_hangs(command: Command) -> None:
    running = start(command, 4, "--set", "steps=150")
    wait_for_update(command, 10)
    killed = time.time()
    os.kill(pid(command, 2), signal.SIGKILL)
    wait_for_update(command, 50)
    assert longest_gap(command, killed) < 10.0  # it takes some milliseconds: benchmarks/deaths.py
    stopped = time.time()
    os.kill(pid(command, 3), signal.SIGSTOP)
    ended = command.end(running)
    command.wait_until_gone()
    assert ended.status == 0, ended.err
    assert longest_gap(command, stopped, last=148) < 10.0  # step 149 may wait for the stopped worker
    outcome = result(command)
    assert outcome["lost_workers"] == [2]
    assert [number for number, _ in updates(command)] == list(range(150))
    assert "Rank 2 of 4 died of signal 9 (SIGKILL); the others continue without it. Its log is" in ended.err
    assert "Worker 2 is gone." in ended.out
    assert [word for word in command.words if word.startswith("behind")] == ["behind 0"]


@pytest.mark.slow
def test_the_loss_of_all_workers_saves_and_ends_the_run(command: Command) -> None:
    running = start(command, 3, "--set", "steps=1000")
    wait_for_update(command, 5)
    for rank in (1, 2):
        os.kill(pid(command, rank), signal.SIGKILL)
    ended = command.end(running)
    assert ended.status == 1
    assert "Died: rank 1 and 2." in ended.err
    assert ended.last == "  Next: read their logs; then start the same command with --resume."
    done = len(updates(command))  # the death may come between an update and the line that reports it
    saved = [int(path.name.removeprefix("step-")) for path in (command.folder / "out" / "checkpoints").glob("step-*")]
    assert max(saved) in (done - 1, done, done + 1)


@pytest.mark.slow
def test_the_death_of_a_server_restarts_from_the_checkpoint(command: Command) -> None:
    running = start(command, 3, "--set", "steps=60", "--set", "checkpoint.every=10")
    wait_for_update(command, 25)
    os.kill(pid(command, 0), signal.SIGKILL)
    ended = command.end(running)
    assert ended.status == 0, ended.err
    assert "Rank 0 of 3 died of signal 9 (SIGKILL)" in ended.err
    assert "Restarting from the checkpoint after step" in ended.err
    outcome = result(command)
    assert outcome["resumed_at"] >= 10  # the checkpoint after step 20 may not have been written yet
    assert outcome["steps"] == 60


@pytest.mark.slow
def test_the_death_of_a_second_server_restarts_the_run(command: Command) -> None:
    running = start(command, 4, "--set", "steps=60", "--set", "server.count=2")
    wait_for_update(command, 5)
    os.kill(pid(command, 1), signal.SIGKILL)
    ended = command.end(running)
    assert ended.status == 0, ended.err
    assert "Restarting from the beginning, because nothing was saved yet (1 of 3)." in ended.err
    assert "Rank 1 of 4 died of signal 9 (SIGKILL)" in ended.err


@pytest.mark.slow
def test_a_stop_saves_and_ends_all_processes(command: Command) -> None:
    running = start(command, 3, "--set", "steps=100000", "--set", "server.staleness=2")
    wait_for_update(command, 5)
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert ended.status == 0, ended.err
    outcome = result(command)
    assert outcome["stopped"]
    assert outcome["lost_workers"] == []
    assert (command.folder / "out" / "checkpoints" / f"step-{outcome['steps']:08d}").is_dir()
