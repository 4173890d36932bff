"""What slows a run down: each planted cause is found in the files of a run, and healthy runs have none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from unisono.monitor.timeline import Timeline
from unisono.plan.batch_order import BatchOrder
from unisono.report.findings.balance_rules import fewer_micro_batches
from unisono.report.findings.evidence import Evidence
from unisono.report.findings.find_all import RULES, find_all
from unisono.report.run_files import RunFiles

HEALTHY = {"other": 0.001, "data": 0.002, "forward": 0.03, "backward": 0.06, "exchange": 0.005, "update": 0.002}
FACTS = {"host": "a", "ranks": 2, "threads": 1, "cores": 4, "cpus": 4, "memory": {"total": 1e10, "swap": 0}}
SAMPLE = {
    "cpu": 0.5,
    "memory": {"available": 5e9, "swap_in": 0, "swap_out": 0},
    "processes": {str(rank): {"cpu": 1.0, "delayed": 0.01} for rank in range(2)},
}


class Planted(NamedTuple):
    """The files of a run.

    Attributes:
        phases: Seconds of a step, of each rank.
        partial: Seconds of waiting, running and collecting garbage, of each rank; by default a thread that always runs.
        settings: Settings that differ from those of a healthy run.
        spans: The virtual ranks of each rank.
        facts: Facts of the host that differ, and `sample`: values of its samples.
        every: Steps between two evaluations or checkpoints, whose seconds are in `rare`.
        device: Of each rank.
        result: The content of result.json.
        short: Phases that differ in the last step of an epoch, which has 16 samples; an epoch has three steps.
    """

    phases: Sequence[Mapping[str, float]] = (HEALTHY, HEALTHY)
    partial: Sequence[Mapping[str, float]] = ({}, {})
    settings: Mapping[str, Any] = {}
    spans: Sequence[tuple[int, int]] = ((0, 4), (4, 8))
    facts: Mapping[str, Any] = {}
    sample: Mapping[str, Any] = {}
    every: int = 0
    rare: Mapping[str, float] = {}
    device: str = "cpu"
    result: Mapping[str, Any] = {}
    short: Mapping[str, float] = {}


def write(folder: Path, run: Planted) -> RunFiles:
    """Write the files of a run of 400 steps."""
    for rank, phases in enumerate(run.phases):
        now = [time.time() - 600.0]
        line = Timeline(folder / "timeline" / f"rank-{rank}.jsonl", now=lambda now=now: now[0])  # type: ignore[misc]
        host = {"host": "a", "pid": 1, "device": run.device, "ranks": len(run.phases), "threads": 1}
        host |= {"samples_per_epoch": 2 * 64 + 16} if run.short else {}
        line.event({"event": "start", "step": 0, **host})
        line.event({"event": "assignment", "step": 0, "virtual_ranks": list(run.spans[rank])})
        for step in range(400):
            spent = dict(phases)
            now[0] += 1.0
            if run.every and step % run.every == 0:
                spent |= run.rare
            if step % 3 == 2:
                spent |= run.short
            wait, gc = run.partial[rank].get("wait", 0.0), run.partial[rank].get("gc", 0.0)
            cpu = run.partial[rank].get("cpu", sum(spent.values()) - wait)
            line.step(step, spent, 1.0, wait=wait, cpu=cpu, gc=gc, more={"samples": 64})
        line.close()
    values = {"batch": 64, "virtual_ranks": 8, "loader.workers": 0, "checkpoint.every": 0, **run.settings}
    (folder / "settings.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    (folder / "result.json").write_text(json.dumps({"steps": 400, **run.result}))
    t = time.time()
    lines = [{"t": t, "start": {**FACTS, **run.facts}}, *[{"t": t + i, **SAMPLE, **run.sample} for i in range(10)]]
    (folder / "timeline" / "host-a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = RunFiles(folder)
    files.read()
    return files


def changed(**seconds: float) -> dict[str, float]:
    """Return the phases of a healthy step with some changed."""
    return {**HEALTHY, **seconds}


def both(**seconds: float) -> list[dict[str, float]]:
    """Return the same phases for both ranks."""
    return [changed(**seconds)] * 2


def processes(**values: Any) -> dict[str, Any]:
    """Return the sample of a host on which both processes have these values."""
    return {"processes": {str(rank): {"cpu": 1.0, "delayed": 0.01, **values} for rank in range(2)}}


SLEEPS = [{"cpu": 0.1}] * 2
CASES: dict[str, tuple[str, str, float | None, Planted]] = {
    # the kind that is found, a part of the advice, the expected gain
    "decoding": ("data", "loader.workers=1", 0.47, Planted(both(data=0.09))),
    "storage": ("storage", "loader.workers=5", 0.8, Planted(both(data=0.4), [{"cpu": 0.1}] * 2)),
    "few workers": (
        "storage",
        "loader.workers=5",
        0.5,
        Planted(both(data=0.1), SLEEPS, {"loader.workers": 2}, sample=processes(workers={"count": 2, "cpu": 0.1})),
    ),
    "no free core": (
        "data",
        "cheaper",
        0.25,
        Planted(
            both(data=0.1),
            SLEEPS,
            {"loader.workers": 1},
            facts={"cores": 4},
            sample=processes(workers={"count": 1, "cpu": 0.98}),
        ),
    ),
    "straggler": (
        "straggler",
        "look at a",
        0.46,
        Planted([changed(forward=0.08, backward=0.1), changed(exchange=0.095)], [{}, {"wait": 0.09}]),
    ),
    "uneven virtual ranks": (
        "uneven",
        "--ranks 3",
        0.235,
        Planted(
            [changed(forward=0.06, backward=0.12), changed(exchange=0.095)],
            [{}, {"wait": 0.09}],
            {"virtual_ranks": 3, "batch": 72},
            spans=((0, 2), (2, 3)),
        ),
    ),
    "uneven batch": (
        "uneven",
        "batch=4",
        0.235,
        Planted(
            [changed(exchange=0.095), changed(forward=0.06, backward=0.12)],
            [{"wait": 0.09}, {}],
            {"virtual_ranks": 2, "batch": 3},
            spans=((0, 1), (1, 2)),
        ),
    ),
    "micro-batches": (
        "micro-batches",
        "virtual_ranks=2",
        0.61,  # the 4 micro-batches of a rank take 80 of 97 ms whatever their size; one would take 20
        Planted([changed(forward=0.03, backward=0.06)] * 2, short={"forward": 0.03, "backward": 0.0525}),
    ),
    "bubbles": (
        "bubbles",
        "micro_batch=16",
        0.15,
        Planted(
            [
                changed(forward=0.02, backward=0.04, exchange=0.035),
                changed(forward=0.02, backward=0.04, other=0.031),
            ],
            [{"wait": 0.03}] * 2,
            {"parallel.pipeline": 2, "virtual_ranks": 2},
            spans=((0, 2), (0, 2)),
        ),
    ),
    "exchange": (
        "exchange",
        "compress.kind=bf16",
        0.27,
        Planted(both(exchange=0.11), [{"wait": 0.1}] * 2, result={"bytes_per_step": 10**7}),
    ),
    "gathers": (
        "gathers",
        "parallel.reshard=step",
        0.6,
        Planted(
            both(forward=0.05, backward=0.08),
            [{"wait": 0.05}] * 2,
            {"parallel.shard": 2, "parallel.reshard": "layer"},
            spans=((0, 8), (0, 8)),
        ),
    ),
    "checkpoints": (
        "checkpoints",
        "checkpoint.every=160",
        0.43,
        Planted(settings={"checkpoint.every": 10}, every=10, rare={"checkpoint": 0.85}),
    ),
    "evaluations": ("evaluations", "times less often", 0.43, Planted(every=10, rare={"evaluate": 0.85})),
    "garbage": ("garbage", "gc.freeze()", 0.2, Planted(both(other=0.03), [{"gc": 0.025}] * 2)),
    "script": (
        "script",
        "step.every",
        0.3,
        Planted([changed(other=0.045), changed(exchange=0.05)], [{}, {"wait": 0.045}]),
    ),
    "threads": (
        "threads",
        "--set threads=2",
        None,
        Planted(facts={"threads": 4}, sample=processes(delayed=0.4)),
    ),
    "shared cores": ("shared-cores", "stop them", 0.3, Planted(sample={"cpu": 1.0, **processes(delayed=0.3)})),
    "quota": (
        "quota",
        "raise its limit",
        None,
        Planted(facts={"cgroup": {"cpus": 1.0}, "cores": 1.0}, sample={"cgroup": {"throttled_periods": 0.6}}),
    ),
    "memory": ("memory", "micro_batch=4", None, Planted(sample={"memory": {"available": 2e8}})),
    "memory limit": (
        "memory",
        "micro_batch=4",
        None,
        Planted(facts={"cgroup": {"memory": 1e9}}, sample={"cgroup": {"memory": 0.98e9}}),
    ),
    "device memory": (
        "memory",
        "micro_batch=4",
        None,
        Planted(facts={"devices": [{"index": 0, "memory": 80e9}]}, sample={"devices": [{"index": 0, "memory": 79e9}]}),
    ),
    "swapping": (
        "swapping",
        "micro_batch=4",
        None,
        Planted(sample={"memory": {"available": 2e9, "swap_in": 4e6, "swap_out": 6e6}}),
    ),
    "heat": ("heat", "cooling", 0.3, Planted(sample={"cores": {"throttled": 0.3}})),
    "device heat": ("heat", "cooling", None, Planted(sample={"devices": [{"index": 0, "throttled": ["thermal"]}]})),
    "copies": (
        "copies",
        "keep tensors on the device",
        None,
        Planted(
            device="cuda:0",
            facts={"devices": [{"index": 0, "link": 31.5e9}]},
            sample={"devices": [{"index": 0, "utilization": 0.35, "from_host": 9e9, "to_host": 3e9}]},
        ),
    ),
    "launches": (
        "launches",
        "parallel.cuda_graphs=true",
        0.65,
        Planted(device="cuda:0", sample={"devices": [{"index": 0, "utilization": 0.35}]}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_planted_cause_is_the_only_finding(tmp_path: Path, case: str) -> None:
    kind, advice, gain, run = CASES[case]
    found = find_all(write(tmp_path, run))
    assert [finding.kind for finding in found] == [kind]
    assert advice in found[0].advice
    assert found[0].gain is None if gain is None else found[0].gain == pytest.approx(gain, abs=0.04)
    assert all(sentence.endswith(".") for sentence in (found[0].fact, *found[0].evidence))


HEALTHY_RUNS = {
    "two ranks": Planted(),
    "one rank": Planted([HEALTHY], spans=((0, 8),)),
    "a little slower": Planted([changed(forward=0.033), HEALTHY]),
    "rare checkpoints": Planted(every=100, rare={"checkpoint": 0.3}, settings={"checkpoint.every": 100}),
    "one evaluation at the end": Planted(every=399, rare={"evaluate": 9.0}),
    "busy workers": Planted(settings={"loader.workers": 2}, sample=processes(workers={"count": 2, "cpu": 1.9})),
    "fetches as quick as a worker": Planted(both(data=0.012), spans=((0, 8), (0, 8))),
    "workers that pass small micro-batches": Planted(
        both(data=0.011),
        SLEEPS,
        {"loader.workers": 1},
        spans=((0, 8), (0, 8)),
        sample=processes(workers={"count": 1, "cpu": 0.25}),
    ),
    "an even pipeline": Planted(settings={"parallel.pipeline": 2, "micro_batch": 1}, spans=((0, 8), (0, 8))),
    "shards in few rounds": Planted(
        settings={"parallel.shard": 2, "parallel.reshard": "layer"}, spans=((0, 8), (0, 8))
    ),
    "a busy accelerator": Planted(device="cuda:0", sample={"devices": [{"index": 0, "utilization": 0.97}]}),
    "an accelerator at its power limit": Planted(sample={"devices": [{"index": 0, "throttled": ["power"]}]}),
    "small micro-batches that take little time": Planted(short={"forward": 0.009, "backward": 0.018}),
    "an accelerator with few copies": Planted(
        device="cuda:0",
        facts={"devices": [{"index": 0, "link": 31.5e9}]},
        sample={"devices": [{"index": 0, "utilization": 0.9, "from_host": 12e9, "to_host": 1e6}]},
    ),
    "other programs that leave cores": Planted(sample={"cpu": 0.8}),
}


@pytest.mark.parametrize("run", HEALTHY_RUNS)
def test_a_healthy_run_has_no_finding(tmp_path: Path, run: str) -> None:
    assert find_all(write(tmp_path, HEALTHY_RUNS[run])) == []


def test_every_rule_has_a_planted_case(tmp_path: Path) -> None:
    found: set[Callable[..., Any]] = set()
    for number, (_, _, _, run) in enumerate(CASES.values()):
        files = write(tmp_path / str(number), run)
        found |= {rule for rule in RULES if rule(Evidence(files)) is not None}
    assert found == set(RULES)


def test_only_the_steps_since_a_resume_count(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "rank-0.jsonl"
    for first, data in ((0, 0.2), (30, 0.001)):
        line = Timeline(path)
        if first:
            line.resumed(first)
        line.event({"event": "start", "step": first, "host": "a", "device": "cpu", "ranks": 1, "threads": 1})
        for step in range(first, first + 30 + 10 * first):
            line.step(step, changed(data=data), 1.0, cpu=0.1)
        line.close()
    files = RunFiles(tmp_path)
    files.read()
    assert Evidence(files).steps == 330 - 3
    assert find_all(files) == []


def test_a_rank_that_has_left_is_not_judged(tmp_path: Path) -> None:
    """Rank 1 was slow, and the run is resumed without it."""
    write(tmp_path, Planted([HEALTHY, changed(forward=0.3)], [{"wait": 0.2}, {}]))
    line = Timeline(tmp_path / "timeline" / "rank-0.jsonl")
    line.resumed(400)
    line.event({"event": "start", "step": 400, "host": "a", "device": "cpu", "ranks": 1, "threads": 1})
    line.event({"event": "assignment", "step": 400, "virtual_ranks": [0, 8]})
    for step in range(400, 800):
        line.step(step, HEALTHY, 1.0, cpu=0.1, more={"samples": 64})
    line.close()
    files = RunFiles(tmp_path)
    files.read()
    assert list(Evidence(files).ranks) == [0]
    assert find_all(files) == []


def test_small_pieces_of_virtual_ranks_become_larger() -> None:
    order = BatchOrder(length=144, batch=64, virtual_ranks=8, micro_batch=3)  # 8 samples of a virtual rank in 3 pieces
    choices = list(fewer_micro_batches(order, 24, ranks=2))
    assert choices == [("--set micro_batch=6, if memory allows", 8.0), ("--set micro_batch=8, if memory allows", 4.0)]
    order = BatchOrder(length=144, batch=64, virtual_ranks=8, micro_batch=8)
    assert list(fewer_micro_batches(order, 4, ranks=2)) == []  # 6, 4 and 2 virtual ranks would need as many pieces
    order = BatchOrder(length=144, batch=64, virtual_ranks=8)
    assert [advice.split("=")[1] for advice, _ in fewer_micro_batches(order, 4, ranks=2)] == ["6", "4", "2"]


def test_few_bytes_are_not_compressed(tmp_path: Path) -> None:
    slow = Planted(both(exchange=0.11), [{"wait": 0.1}] * 2, result={"bytes_per_step": 4000})
    (found,) = find_all(write(tmp_path, slow))
    assert (found.kind, "compress" in found.advice) == ("exchange", False)
    assert not found.changes_result, "fewer ranks have the same bits"


def test_a_short_run_has_no_finding(tmp_path: Path) -> None:
    line = Timeline(tmp_path / "timeline" / "rank-0.jsonl")
    for step in range(5):
        line.step(step, changed(data=0.1), 1.0)
    line.close()
    files = RunFiles(tmp_path)
    files.read()
    assert find_all(files) == []


def test_a_run_without_steps_or_files(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    assert find_all(RunFiles(tmp_path)) == []
