"""Real runs whose hosts are sampled: the samples, the result, and a kill of the process that samples."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.command import Command
from tests.cli.test_deaths import DYING
from tests.cli.test_training import SCRIPT, result
from unisono.machine.sample_file import read_samples

QUICK = ("--set", "machine.every=0.1", "--set", "pause=0.05")


def samples_of(command: Command, run_dir: str) -> list[dict[str, Any]]:
    (path,) = (command.folder / run_dir / "timeline").glob("host-*.jsonl")
    return list(read_samples(path))


@pytest.mark.ci
def test_a_run_samples_its_host_and_states_its_traffic(command: Command) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", *QUICK, "--set", "machine.watts=100")
    assert ended.status == 0, ended.err
    start, *samples, end = samples_of(command, "out")
    assert end["end"] == {"rank": 0}
    assert (start["start"]["rank"], start["start"]["ranks"], start["start"]["threads"]) == (0, 2, 1)
    assert len(samples) > 5
    assert all(set(sample["processes"]) <= {"0", "1"} for sample in samples)
    assert {rank for sample in samples for rank in sample["processes"]} == {"0", "1"}
    assert all(sample["processes"]["0"]["resident"] > 50e6 for sample in samples)
    times = [sample["t"] for sample in samples]
    assert times == sorted(times)
    found = result(command, "out")
    assert found["bytes_source"] == "TCP connections of all processes"
    assert found["bytes_sent"] > 0
    assert abs(found["bytes_received"] - found["bytes_sent"]) < 0.1 * found["bytes_sent"]
    energy = found["energy"]
    assert abs(energy["joules"] - energy["joules_per_sample"] * found["samples"]) < 0.01 * energy["joules"]
    if energy["source"] == "estimated from machine.watts":  # this machine has no counter
        assert 100 * found["seconds"] <= energy["joules"] < 100 * (found["seconds"] + 10)
    assert f"({energy['source']})" in " ".join(ended.out.split())


@pytest.mark.slow
def test_another_process_samples_after_the_death_of_the_one_that_does(command: Command) -> None:
    command.script(DYING)
    ended = command.run("run", "script.py", "--ranks", "3", "--run-dir", "out", *QUICK, "--set", "deaths=9:0")
    assert ended.status == 0, ended.err
    lines = samples_of(command, "out")
    starts = [number for number, line in enumerate(lines) if "start" in line]
    assert len(starts) == 2
    first, second = (lines[number]["start"]["rank"] for number in starts)
    assert first == 0
    assert second > 0
    assert "0" in lines[starts[1] - 1]["processes"]
    after = lines[starts[1] + 1 : -1]
    assert lines[-1]["end"] == {"rank": second}
    assert len(after) > 3
    assert not [line for line in after if "0" in line["processes"]]
    assert lines[starts[1]]["t"] - lines[starts[1] - 1]["t"] < 3


@pytest.mark.slow
def test_sampling_can_be_turned_off(command: Command) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "machine.every=0", "--set", "steps=4")
    assert ended.status == 0, ended.err
    assert not list((command.folder / "out" / "timeline").glob("host-*"))
    found = result(command, "out")
    assert found["energy"] == "not measured: machine.every=0"
    assert "bytes_sent" not in found
    assert "energy" not in ended.out
