"""`unisono logs` of real runs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_SECONDS, ROOT, Command
from unisono.environment import inherited

TALKING = """
import logging, warnings
from dataclasses import dataclass
import torch


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 6
    ends: str = ""
    pause: float = 0.0


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        warnings.warn("old data")
        return torch.full((4,), i / 64)


def main(run):
    model = run.place(lambda: torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Points()):
        for a in step:
            step.backward(model(a).square().sum(), weight=len(a))
        step.update(optimizer)
        if step.number == 2:
            print(f"hello of {run.rank}")
            logging.getLogger("mine").warning("careful")
            logging.getLogger("mine").info("not shown, as without Unisono")
            say("ready")
        if step.number == 4 and run.rank == 1 and run.settings.ends == "raise":
            raise ValueError("no good")
        if step.number == 4 and run.rank == 1 and run.settings.ends == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(run.settings.pause)


unisono.main(main, Settings)
"""
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


def logs(command: Command, *words: str) -> list[str]:
    ended = command.run("logs", "out", *words)
    assert ended.status == 0, ended.err
    return ended.out.splitlines()


@pytest.mark.slow
def test_logs_of_all_ranks_are_merged(command: Command) -> None:
    command.script(TALKING)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "ends=raise")
    assert ended.status == 1
    lines = logs(command)
    assert all(re.match(STAMP, line) for line in lines)
    times = [datetime.fromisoformat(line[:23]).timestamp() for line in lines]
    # a print before a record has the time of its arrival, and the record that at which it was made
    assert all(before <= after + 1 for before, after in pairwise(times))
    places = {text: next(i for i, line in enumerate(lines) if text in line) for text in ("run directory", "no good")}
    assert places["run directory"] < min(i for i, line in enumerate(lines) if "hello of" in line) < places["no good"]
    for rank in (0, 1):
        assert [line for line in lines if re.fullmatch(rf"{STAMP}rank {rank}: hello of {rank}", line)]
        assert [line for line in lines if re.fullmatch(rf"{STAMP}rank {rank} step 2 WARNING mine: careful", line)]
        warned = [line for line in lines if f"rank {rank} " in line and "UserWarning: old data" in line]
        assert len(warned) == 1
    assert not [line for line in lines if "not shown" in line]
    assert command.log(0).count("UserWarning: old data") == 1
    assert ended.out.count("UserWarning: old data") == 1  # rank 0 alone prints it
    errors = [line.partition(": ") for line in logs(command, "--errors")]
    assert {where[24:] for where, *_ in errors} == {"rank 1"}
    assert [errors[0][2], errors[-1][2]] == ["Traceback (most recent call last):", "ValueError: no good"]
    only = [json.loads(line) for line in logs(command, "--rank", "1", "--json")]
    assert {line["rank"] for line in only} == {1}
    record = next(line for line in only if line.get("logger") == "mine")
    assert (record["step"], record["level"]) == (2, "WARNING")
    start = abs(record["time"] - only[0]["time"])
    assert start < 60


@pytest.mark.ci
def test_a_dead_process_shows_its_last_lines(command: Command) -> None:
    command.script(TALKING)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "ends=die")
    assert ended.status == 0, ended.err
    (died, *last) = logs(command, "--errors")
    assert re.fullmatch(rf"{STAMP}rank 1 died of signal 9 \(SIGKILL\)", died)
    assert [line for line in last if line.endswith("hello of 1")]
    assert logs(command, "--errors", "--rank", "0") == []


@pytest.mark.slow
def test_following_ends_with_the_run_and_at_ctrl_c(command: Command) -> None:
    command.script(TALKING)
    running = command.start("run", "script.py", "--run-dir", "out", "--set", "pause=0.3", "--set", "steps=1000")
    command.wait_for("ready 0")
    followers = [command.start("logs", "out", "--follow") for _ in range(2)]
    for follower in followers:
        assert follower.stdout is not None
        while "hello of 0" not in follower.stdout.readline():
            pass
    followers[0].send_signal(signal.SIGINT)
    quiet = command.end(followers[0])
    assert (quiet.status, quiet.err) == (0, "")
    running.send_signal(signal.SIGINT)
    assert command.end(running).status == 0
    ended = command.end(followers[1])
    assert (ended.status, ended.err) == (0, "")
    assert "This run was stopped before its end." in ended.out


def test_a_reader_that_leaves_is_no_error(command: Command, tmp_path: Path) -> None:
    (tmp_path / "out" / "log").mkdir(parents=True)
    (tmp_path / "out" / "log" / "rank-0.log").write_text("a line\n" * 100_000)
    words = [sys.executable, "-P", "-m", "unisono.cli.main", "logs", "out"]
    environment = inherited({"PYTHONPATH": str(ROOT)})
    running = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline() == "rank 0: a line\n"
    running.stdout.close()
    assert running.stderr.read() == ""
    running.stderr.close()
    assert running.wait(PATIENCE_SECONDS) == 0


def test_wrong_requests_are_one_message(command: Command, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine" / "log").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "log" / "rank-0.log").write_text("a line\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "settings.toml").touch()
    for words, error in (
        (["absent"], "There is no folder absent."),
        (["runs"], "runs is not a run directory."),
        (["other"], "There are no logs in other."),
        (["runs/mine", "--rank", "3"], "Rank 3 has no log in runs/mine."),
    ):
        ended = command.run("logs", *words)
        first, _, remedy = ended.err.splitlines()
        assert (ended.status, first) == (2, error)
        assert remedy.strip().startswith("Next: unisono logs runs/mine")
    assert command.run("logs", "runs/mine", "--errors").err == "No errors in 1 log.\n"


@pytest.mark.slow
def test_warnings_of_loader_workers_are_printed_once(command: Command) -> None:
    command.script(TALKING)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "loader.workers=3")
    assert ended.status == 0, ended.err
    assert ended.out.count("UserWarning: old data") == 1
    assert command.log(0).count("UserWarning: old data") >= 3  # the main process may read a sample too


@pytest.mark.slow
def test_under_torchrun_each_rank_has_a_log_of_records(command: Command) -> None:
    command.script(TALKING)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py", "--run-dir", "out"]
    ended = command.end(command.start_python(*words, "--set", "ends=raise"))
    assert ended.status == 1
    assert (ended.out + ended.err).count("UserWarning: old data") == 1
    for rank in (0, 1):
        lines = command.log(rank).splitlines()
        assert sum("UserWarning: old data" in line for line in lines) == 1
        assert [line for line in lines if line.endswith(f"rank {rank} step 2 WARNING mine: careful")]
    errors = [line for line in logs(command, "--errors", "--rank", "1") if "CRITICAL unisono: ValueError" in line]
    assert len(errors) == 1
    assert logs(command, "--errors", "--rank", "1")[-1].endswith("  ValueError: no good")
