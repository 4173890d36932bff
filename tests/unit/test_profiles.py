"""Traces of ranks: names and lanes of tracks, one clock, costs of operators, and memory."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono import phases
from unisono.config.schema import ProfileSettings
from unisono.profiles.memory_use import memory_use
from unisono.profiles.merged_trace import merge
from unisono.profiles.operator_costs import (
    NO_OPERATOR,
    OperatorCost,
    operator_costs,
    phase_times,
    step_times,
    waiting_time,
)
from unisono.profiles.profile_folder import DamagedTraceError, ProfileFolder, check_trace, read_trace, write_trace
from unisono.profiles.profiled_steps import parse_ranks, parse_steps, profile_problems
from unisono.profiles.rank_trace import OwnSpan, RecordedRank, build_rank_trace
from unisono.train.profiling.step_recording import StepRecording

CPU = torch.device("cpu")


def recorded(rank: int, host: str, began: int) -> RecordedRank:
    return RecordedRank(rank, host, 4711, "cpu", (3, 3), began, began + 2_000_000, "2.13.0")


def operator(name: str, ts: float, dur: float, number: int = 0, tid: int = 4711, cat: str = "cpu_op") -> dict[str, Any]:
    args = {"External id": number}
    return {"ph": "X", "cat": cat, "name": name, "pid": 4711, "tid": tid, "ts": ts, "dur": dur, "args": args}


def torch_trace(base: int, *events: dict[str, Any]) -> dict[str, Any]:
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": list(events)}


def track_names(trace: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def test_times_of_operators_are_those_of_torch(tmp_path: Path) -> None:
    """torch's own table is computed from the same recording."""
    recording = StepRecording(ProfileSettings(), CPU, 0, "here")
    recording.prepare()
    recording.begin_step()
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1))
    model(torch.ones(20, 30)).sum().backward()
    recording.end_step(3)
    (tmp_path / "profile").mkdir()
    assert recording.write(ProfileFolder(tmp_path)) == (3, 3)
    ours = {cost.name: cost for cost in operator_costs(read_trace(ProfileFolder(tmp_path).rank(0)))}
    theirs = {each.key: each for each in recording._profiler.key_averages()}
    assert len(theirs) > 20
    assert set(ours) == set(theirs)
    for name, cost in ours.items():
        assert cost.calls == theirs[name].count
        assert cost.cpu_us == pytest.approx(theirs[name].self_cpu_time_total, abs=0.01 * cost.calls + 0.01)


def test_kernels_count_for_the_operator_that_starts_them() -> None:
    """Events as torch writes them on CUDA: the process of a kernel is a device, its thread is a stream."""
    kernel = {"ph": "X", "pid": 0, "tid": 7, "args": {"External id": 2, "stream": 7}}
    strange = {**kernel, "args": {"External id": 99}}
    found = torch_trace(
        0,
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        operator("aten::linear", 0, 100, 1),
        operator("aten::addmm", 10, 50, 2),
        {**kernel, "cat": "kernel", "name": "ampere_sgemm", "ts": 40, "dur": 300},
        {**kernel, "cat": "gpu_memcpy", "name": "Memcpy", "ts": 350, "dur": 20},
        {**strange, "cat": "kernel", "name": "other", "ts": 380, "dur": 5},
        {"ph": "s", "id": 5, "pid": 4711, "tid": 4711, "ts": 12, "cat": "ac2g", "name": "ac2g"},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "PyTorch Profiler",
            "ts": 0,
            "dur": 9,
        },
    )
    trace = build_rank_trace(found, recorded(0, "a", 0), [], {4711: "training"})
    costs = {cost.name: cost for cost in operator_costs(trace)}
    assert costs["aten::linear"].cpu_us == 50
    assert costs["aten::addmm"] == OperatorCost("aten::addmm", 1, 50, 320)
    assert costs[NO_OPERATOR].device_us == 5
    assert operator_costs(trace)[0].name == "aten::addmm"
    assert {"training", "GPU 0: stream 7"} <= set(track_names(trace).values())
    assert {each["pid"] for each in trace["traceEvents"]} == {1}
    assert not [each for each in trace["traceEvents"] if each["name"].startswith("PyTorch")]


def test_collectives_that_overlap_are_in_lanes() -> None:
    spans = [
        ("gloo:send", 0.0, 10.0),
        ("gloo:recv", 5.0, 10.0),
        ("gloo:recv", 12.0, 3.0),
        ("nccl:all_reduce", 30.0, 1.0),
    ]
    found = torch_trace(0, *(operator(*span, cat="user_annotation") for span in spans))
    trace = build_rank_trace(found, recorded(2, "a", 0), [], {})
    names = track_names(trace)
    lanes = [(names[e["tid"]], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert lanes == [("collectives", 0), ("collectives 2", 5), ("collectives", 12), ("collectives", 30)]
    assert operator_costs(trace) == []


def test_threads_have_the_names_of_python_and_of_libraries() -> None:
    say = {"ph": "M", "name": "thread_name", "pid": 4711}
    found = torch_trace(
        0,
        {**say, "tid": 5, "args": {"name": "thread 5 (pt_gloo_runloop)"}},
        {**say, "tid": 5, "args": {"name": "thread 5 (python)"}},
        {**say, "tid": 6, "args": {"name": "thread 6 (python3)"}},
        operator("a", 0, 1, tid=5),
        operator("b", 0, 1, tid=6),
    )
    names = track_names(build_rank_trace(found, recorded(0, "a", 0), [], {6: "ring"}))
    assert [*names.values()][-2:] == ["pt_gloo_runloop", "ring"]


def rank_file(folder: ProfileFolder, rank: int, host: str, base: int, began: int, operator_at: int) -> None:
    """Write the trace of a rank. Times are nanoseconds of the clock of its host."""
    spans = [
        OwnSpan("steps", "step 3", began, began + 2_000_000, {"step": 3}),
        OwnSpan("phases", "forward", began, began + 500_000),
        OwnSpan("phases", "exchange", began + 500_000, began + 2_000_000),
        OwnSpan("waiting", "wait for messages", began + 700_000, began + 900_000),
    ]
    flow = {
        "ph": "s",
        "id": 1,
        "pid": 4711,
        "tid": 4711,
        "ts": (operator_at - base) / 1000,
        "cat": "fwdbwd",
        "name": "f",
    }
    found = torch_trace(base, operator("aten::mm", (operator_at - base) / 1000, 100.0), flow)
    write_trace(folder.rank(rank), build_rank_trace(found, recorded(rank, host, began), spans, {}))


def test_ranks_of_two_hosts_are_on_one_clock(tmp_path: Path) -> None:
    folder = ProfileFolder(tmp_path)
    folder.clear()
    now, ahead = 1_790_000_000_123_456_789, 5_000_000_000
    rank_file(folder, 0, "a", now - 10**15, now, now + 100_000)
    rank_file(folder, 1, "b", now - 10**14, now + ahead + 30_000, now + ahead + 130_000)  # 30 us later in truth
    folder.write_hosts({"clocks": {"b": {"offset_us": ahead / 1000, "round_trip_us": 50.0}}})
    assert merge(folder).ranks == [0, 1]
    with gzip.open(folder.trace) as file:
        trace = json.load(file)
    assert trace["baseTimeNanoseconds"] == now
    steps = {e["pid"]: e["ts"] for e in trace["traceEvents"] if e["name"] == "step 3"}
    assert steps == {1: pytest.approx(0, abs=0.2), 2: pytest.approx(30, abs=0.2)}
    operators = {e["pid"]: e["ts"] for e in trace["traceEvents"] if e["name"] == "aten::mm"}
    assert operators == {1: pytest.approx(100, abs=0.2), 2: pytest.approx(130, abs=0.2)}
    flows = [e["id"] for e in trace["traceEvents"] if e["ph"] == "s"]
    assert len(set(flows)) == 2  # each rank had number 1
    one = read_trace(folder.rank(0))
    assert phase_times(one) == {"exchange": pytest.approx(1.5), "forward": pytest.approx(0.5)}
    assert waiting_time(one) == pytest.approx(0.2)
    assert step_times(one) == {3: pytest.approx(2.0)}


def test_traces_are_merged_again_only_if_there_is_a_new_one(tmp_path: Path) -> None:
    folder = ProfileFolder(tmp_path)
    folder.clear()
    rank_file(folder, 0, "a", 0, 10**9, 10**9)
    merge(folder)
    os.utime(folder.trace, ns=(time.time_ns() + 10**9,) * 2)
    made = folder.trace.stat().st_mtime_ns
    assert merge(folder).ranks == [0]
    assert folder.trace.stat().st_mtime_ns == made
    rank_file(folder, 1, "a", 0, 10**9, 10**9)
    assert merge(folder).ranks == [0, 1]
    assert check_trace(folder.trace)["ranks"] == [0, 1]
    folder.clear()
    assert [path.name for path in folder.path.glob("*")] == [".lock"]


@pytest.mark.parametrize("keep", [0, 30, -1])
def test_a_trace_that_is_cut_off_is_damaged(keep: int, tmp_path: Path) -> None:
    folder = ProfileFolder(tmp_path)
    folder.clear()
    rank_file(folder, 0, "a", 0, 10**9, 10**9)
    folder.rank(0).write_bytes(folder.rank(0).read_bytes()[:keep])
    for read in (check_trace, read_trace):
        with pytest.raises(DamagedTraceError):
            read(folder.rank(0))
    assert list(merge(folder).damaged) == [0]


def test_a_trace_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(b'{"schemaVersion": 1, "traceEvents": []}'))
    for read in (check_trace, read_trace):
        with pytest.raises(DamagedTraceError):
            read(path)


def test_the_peak_of_memory_and_what_holds_it(tmp_path: Path) -> None:
    recording = StepRecording(ProfileSettings(memory=True), CPU, 0, "here")
    (tmp_path / "profile").mkdir()
    recording.begin_step()
    kept = torch.empty(1_000_000)
    with phases.phase("forward"):
        double = kept.relu()  # the peak: 4 MB + 4 MB
    del double
    torch.empty(300_000)
    recording.end_step(3)
    recording.write(ProfileFolder(tmp_path))
    trace = read_trace(ProfileFolder(tmp_path).rank(0))
    use = memory_use(trace)
    assert use is not None
    assert 8_000_000 <= use.peak < 8_010_000
    assert use.step == 3
    large = [holder for holder in use.holders if holder.bytes > 100_000]
    assert sorted(large) == [("aten::empty, other", 4_000_000, 1), ("aten::relu, forward", 4_000_000, 1)]
    assert max(count for _, count in use.course) == use.peak
    counted = [each["args"]["bytes"] for each in trace["traceEvents"] if each["ph"] == "C"]
    assert max(counted) == use.peak
    assert counted[-1] < 5_300_000


def test_a_recording_that_fails_leaves_nothing_on() -> None:
    recording = StepRecording(ProfileSettings(), CPU, 0, "here")
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="the script itself is using a profiler"):
        recording.prepare()
    recording.begin_step()
    recording.end_step(0)
    with pytest.raises((OSError, RuntimeError)):
        recording.write(ProfileFolder(Path("/no such folder")))
    recording.abandon()
    assert not recording.is_on
    before = len(recording.spans.spans)
    with phases.phase("forward"):
        phases.count_wait(0.0)
    assert len(recording.spans.spans) == before


def test_ranges_of_steps() -> None:
    assert parse_steps(" ") is None
    assert parse_steps("20:23") == (20, 23)
    steps = parse_steps("0:1")
    assert steps is not None
    assert (str(steps), steps.covers(0), steps.covers(1)) == ("step 0", True, False)
    assert parse_ranks("all") is None
    assert parse_ranks("0, 3") == frozenset((0, 3))


@pytest.mark.parametrize(
    ("values", "error", "do"),
    [
        ({"profile.steps": "20"}, "profile.steps = 20 is no range of steps.", "profile.steps=20:21"),
        ({"profile.steps": "-1:4"}, "profile.steps = -1:4 is no range of steps.", "profile.steps=20:23"),
        ({"profile.steps": "5:5"}, "profile.steps = 5:5 names no step.", "profile.steps=5:6"),
        ({"profile.steps": "9:3"}, "profile.steps = 9:3 names no step.", "profile.steps=3:9"),
        ({"profile.steps": "1:2", "profile.ranks": ""}, "profile.ranks =  names no ranks.", "profile.ranks=0"),
        ({"profile.steps": "1:2", "profile.ranks": "a"}, "profile.ranks = a names no ranks.", "profile.ranks=0"),
        (
            {"profile.steps": "1:2", "profile.ranks": "1,4,5"},
            "profile.ranks = 1,4,5 names a rank that does not exist: 4.",
            "profile.ranks=1",
        ),
        (
            {"profile.steps": "", "profile.memory": True},
            "profile.memory has no effect without profile.steps.",
            "profile.steps=20:23",
        ),
    ],
)
def test_a_wrong_request_is_one_problem(values: dict[str, Any], error: str, do: str) -> None:
    (problem,) = profile_problems(values, 4, lambda text: text)
    assert (problem.error, problem.remedy) == (error, do)


def test_a_right_request_is_no_problem() -> None:
    for values in ({}, {"profile.steps": ""}, {"profile.steps": "1:2", "profile.ranks": "0,3", "profile.memory": True}):
        assert profile_problems(values, 4, lambda text: text) == []
