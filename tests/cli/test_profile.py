"""Profiles of real runs: the traces of all ranks, the table of the command, and requests that are wrong."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from collections import defaultdict
from typing import Any

import pytest

from tests.cli.command import Command, last_json
from tests.cli.test_deaths import DYING
from tests.cli.test_training import SCRIPT, result

RUN = ("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "threads=1")
PROFILED = (*RUN, "--set", "profile.steps=8:11")

STEPS = ("--set=threads=1", "--set=profile.steps=8:11")

OWN_PROFILER = SCRIPT.replace(
    "    for step in run.steps(", "    own = torch.profiler.profile()\n    own.start()\n    for step in run.steps("
).replace("\nunisono.main(", "    own.stop()\n    say(f'{len(own.key_averages())} own')\n\nunisono.main(")


def trace_of(command: Command, name: str) -> dict[str, Any]:
    with gzip.open(command.folder / "out" / "profile" / name) as file:
        found: dict[str, Any] = json.load(file)
    return found


def tracks(trace: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Return the spans of a trace by process and name of the track."""
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in trace["traceEvents"]
        if each["ph"] == "M" and each["name"] == "thread_name"
    }
    found = defaultdict(list)
    for each in trace["traceEvents"]:
        if each["ph"] == "X":
            found[each["pid"], names[each["pid"], each["tid"]]].append(each)
    return found


def assert_nested(spans: list[dict[str, Any]]) -> None:
    """Spans of a track do not cross each other, but for the nanosecond to which times are rounded."""
    ends: list[float] = []
    for each in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        while ends and ends[-1] <= each["ts"] + 0.002:
            ends.pop()
        end = each["ts"] + each["dur"]
        assert not ends or end <= ends[-1] + 0.002, each
        ends.append(end)


@pytest.mark.ci
def test_the_steps_of_two_ranks_are_in_one_trace_and_the_bits_are_the_same(command: Command) -> None:
    command.script(SCRIPT)
    began = os.stat(command.folder).st_mtime_ns
    ended = command.run(*PROFILED)
    assert ended.status == 0, ended.err
    assert "profile of steps 8 to 10: unisono profile out" in ended.out
    assert "Profiling failed" not in ended.out + ended.err
    assert "USDT" not in ended.out + ended.err
    trace = trace_of(command, "trace.json.gz")
    assert {each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"} == {
        f"rank {rank} on {os.uname().nodename}" for rank in (0, 1)
    }
    found = tracks(trace)
    for spans in found.values():
        assert_nested(spans)
    for pid in (1, 2):
        assert [each["name"] for each in found[pid, "steps"]] == ["step 8", "step 9", "step 10"]
        phases = {each["name"] for each in found[pid, "phases"]}
        assert phases >= {"data", "forward", "backward", "exchange", "update"}
        assert {each["name"] for each in found[pid, "collectives"]} & {"gloo:all_reduce", "gloo:recv", "gloo:send"}
        assert {each["name"] for each in found[pid, "waiting"]} == {"wait for messages"}
        names = {each["name"] for each in found[pid, "training"]}
        assert names >= {"aten::addmm", "Optimizer.step#AdamW.step"}
        for each in found[pid, "training"]:  # an operator is within a step of its own rank
            if each["name"] == "aten::addmm":
                assert any(covers(step, each) for step in found[pid, "steps"])
    computed = sorted(each["args"]["virtual_rank"] for pid in (1, 2) for each in found[pid, "virtual ranks"])
    assert computed == sorted([*range(8)] * 3)
    for one, other in zip(found[1, "steps"], found[2, "steps"], strict=True):  # they wait for each other
        overlap = min(one["ts"] + one["dur"], other["ts"] + other["dur"]) - max(one["ts"], other["ts"])
        assert overlap > 0
        assert abs(one["ts"] + one["dur"] - other["ts"] - other["dur"]) < 500_000  # on a busy machine
    begin = trace["baseTimeNanoseconds"]
    assert begin > began
    assert all(
        each["ts"] > -1e6 and begin + 1000 * (each["ts"] + each["dur"]) < 1e9 * ended.at
        for spans in found.values()
        for each in spans
    )
    assert not list((command.folder / "out" / "profile").glob("*.part"))
    command.train("whole")
    assert result(command, "out")["weights_sha256"] == result(command, "whole")["weights_sha256"]


def covers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["ts"] <= other["ts"] and other["ts"] + other["dur"] <= one["ts"] + one["dur"])


def test_the_command_shows_operators_phases_and_memory(command: Command) -> None:
    command.script(SCRIPT)
    command.train("out", *STEPS, "--set=profile.ranks=1", "--set=profile.memory=true", "--set=steps=12", ranks=2)
    assert [path.name for path in (command.folder / "out" / "profile").glob("rank-*")] == ["rank-1.json.gz"]
    shown = command.run("profile", "out", "--rows", "200")
    assert shown.status == 0, shown.err
    for words in ("rank 1 on", "aten::addmm", "phases  ", "forward", "memory  ", "ui.perfetto.dev", "chrome://tracing"):
        assert words in shown.out, shown.out
    assert "rank 0 on" not in shown.out
    found = last_json(command.run("profile", "out", "--json").out)
    assert found["problems"] == []
    (rank,) = found["ranks"].values()
    assert rank["steps"] == [8, 10]
    assert set(rank["step_ms"]) == {"8", "9", "10"}
    assert abs(sum(rank["phase_ms"].values()) - (rank["ended"] - rank["began"]) / 1e6) < 5.0
    calls = {each["name"]: each["calls"] for each in rank["operators"]}
    assert calls["aten::addmm"] >= 3 * 4 * 2  # steps, virtual ranks of this process, layers; and a check of the promise
    assert rank["memory"]["peak_bytes"] > 0
    assert sum(each["bytes"] for each in rank["memory"]["holders"]) == rank["memory"]["peak_bytes"]
    assert max(count for _, count in rank["memory"]["course"]) == rank["memory"]["peak_bytes"]


@pytest.mark.ci
def test_a_damaged_a_missing_and_a_half_written_trace_are_named(command: Command) -> None:
    command.script(SCRIPT)
    command.train("out", *STEPS, "--set=steps=11", ranks=2)
    folder = command.folder / "out" / "profile"
    whole = (folder / "rank-1.json.gz").read_bytes()
    (folder / "rank-1.json.gz").write_bytes(whole[: len(whole) // 2])
    shown = command.run("profile", "out")
    assert shown.status == 0
    assert "The trace of rank 1 is damaged: it ends in the middle." in shown.out
    assert "rank 0 on" in shown.out
    assert {each["pid"] for each in trace_of(command, "trace.json.gz")["traceEvents"]} == {1}
    (folder / "rank-1.json.gz").rename(folder / "rank-1.json.gz.part")
    assert "The trace of rank 1 is not complete" in command.run("profile", "out").out
    (folder / "rank-1.json.gz.part").unlink()
    assert "There is no trace of rank 1, which ran on" in command.run("profile", "out").out
    (folder / "rank-1.json.gz").write_bytes(whole)
    assert last_json(command.run("profile", "out", "--json").out)["problems"] == []
    assert {each["pid"] for each in trace_of(command, "trace.json.gz")["traceEvents"]} == {1, 2}
    for rank in (0, 1):
        (folder / f"rank-{rank}.json.gz").write_bytes(b"{}")
    shown = command.run("profile", "out")
    assert shown.status == 1
    assert shown.out.count("is damaged") == 2


@pytest.mark.slow
def test_steps_are_profiled_again_if_a_resume_computes_them_again(command: Command) -> None:
    command.script(SCRIPT)
    command.train("out", "--set=profile.steps=5:9", "--set=steps=7")
    first = trace_of(command, "rank-0.json.gz")["unisono"]
    assert first["steps"] == [5, 6]  # the run ended then
    ended = command.run("run", "script.py", "--run-dir", "out", "--resume", "--set", "steps=10")
    assert "profile of steps 5 to 8" in ended.out, ended.err
    second = trace_of(command, "rank-0.json.gz")["unisono"]
    assert second["steps"] == [7, 8]
    command.train("out", "--resume", "--set=steps=11")
    assert trace_of(command, "rank-0.json.gz")["unisono"] == second  # nothing was computed again


@pytest.mark.slow
def test_a_run_without_a_profile_says_what_to_type(command: Command) -> None:
    command.script(SCRIPT)
    command.train("out", "--set=steps=8")
    shown = command.run("profile", "out")
    assert shown.status == 2
    assert "out has no profile." in shown.err
    assert "--resume" in shown.last
    assert "profile.steps=9:12" in shown.last
    typed = shlex.split(shown.last.partition("Next: ")[2])
    assert command.run(*typed[1:]).status == 0  # the command that is proposed works
    assert command.run("profile", "out").status == 0
    (command.folder / "runs").mkdir()
    (command.folder / "out").rename(command.folder / "runs" / "out")
    assert command.run("profile", "nowhere").last.strip() == "Next: unisono profile runs/out"


@pytest.mark.slow
def test_steps_beyond_the_end_are_noted(command: Command) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "steps=5", "--set", "profile.steps=50:80")
    assert ended.status == 0, ended.err
    said = "profile.steps recorded nothing: the run ended after 5 steps, without steps 50 to 79."
    assert ended.out.count(said) == 1
    shown = command.run("profile", "out")
    assert shown.status == 2
    assert "profile.steps names steps 50 to 79, and the run has done 5 steps." in shown.err


def test_a_wrong_request_is_one_message(command: Command) -> None:
    """Other wrong values are in tests/unit/test_profiles.py."""
    command.script(SCRIPT)
    ended = command.run(*PROFILED, "--set", "profile.ranks=0,7")
    assert ended.status == 2
    assert ended.err.startswith("profile.ranks = 0,7 names a rank that does not exist: 7.")
    assert len(ended.err.strip().splitlines()) == 3
    assert "--set profile.ranks=0" in ended.last
    assert not (command.folder / "out").exists()


@pytest.mark.slow
def test_a_profiler_of_the_script_keeps_its_events(command: Command) -> None:
    """torch has one profiler at a time: ours would take the events of the script's."""
    command.script(OWN_PROFILER)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "profile.steps=6:9", "--set", "steps=10")
    assert ended.status == 0, ended.err
    assert (ended.out + ended.err).count("Profiling failed: RuntimeError: the script itself is using a profiler") == 1
    assert result(command, "out")["steps"] == 10
    command.wait_until_gone()
    (own,) = [int(word.split()[0]) for word in command.words if " own " in word]
    assert own > 10


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_does_not_stop_training(command: Command) -> None:
    command.script(SCRIPT)
    (command.folder / "out").mkdir()
    (command.folder / "out" / "profile").write_text("a file in the way")
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "profile.steps=6:9", "--set", "steps=10")
    assert ended.status == 0, ended.err
    assert (ended.out + ended.err).count("Profiling failed: ") == 1
    assert "Profiling failed: NotADirectoryError: " in ended.out
    assert "recorded nothing" not in ended.out
    assert result(command, "out")["steps"] == 10


@pytest.mark.slow
def test_the_others_record_on_when_a_process_dies_in_a_profiled_step(command: Command) -> None:
    command.script(DYING)
    ended = command.run(
        *("run", "script.py", "--ranks", "3", "--run-dir", "out", "--set", "deaths=9:0", "--set", "profile.steps=8:11")
    )
    assert ended.status == 0, ended.err
    assert [each["process"] for each in result(command, "out")["deaths"]] == [0]
    found = last_json(command.run("profile", "out", "--json").out)
    assert set(found["ranks"]) >= {"1", "2"}  # and that of the replacement, if it has joined in time
    assert found["ranks"]["1"]["steps"] == [8, 10]
    assert [each for each in found["problems"] if "There is no trace of rank 0" in each]
    command.train("whole")
    assert result(command, "out")["weights_sha256"] == result(command, "whole")["weights_sha256"]


@pytest.mark.slow
def test_the_command_works_while_the_run_trains(command: Command) -> None:
    command.script(SCRIPT.replace("in (0, 5)", "in (0, 10)"))
    words = ("--set", "profile.steps=8:9", "--set", "pause=0.1", "--set", "steps=16")
    running = command.start("run", "script.py", "--run-dir", "out", *words)
    command.wait_for("step 0 of 0")
    shown = command.run("profile", "out")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith("There is no profile yet: step 8 will be recorded, and the run has done ")
    command.wait_for("step 10 of 0")
    shown = command.run("profile", "out")
    assert running.poll() is None
    assert "rank 0 on" in shown.out
    assert command.end(running).status == 0
