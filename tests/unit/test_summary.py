"""The summary of a run: times, bottleneck and advice, from files alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.monitor import summary
from unisono.monitor.summary import bottleneck, closing_lines, read_directory, straggler, time_shares
from unisono.monitor.timeline import Timeline
from unisono.phases import PHASES

RESULT = {
    "steps": 200,
    "loss": 1.2345678,
    "samples_per_second": 1234.5,
    "ranks": 2,
    "virtual_ranks": 8,
    "promise": "exact",
    "reason": "one fixed tree adds the gradients of all virtual ranks, wherever they are computed",
    "weights_sha256": "ab" * 32,
    "phases": {"data": 1.0, "forward": 3.0, "backward": 6.0},
}


def test_the_table() -> None:
    seconds = {"other": 0.05, "data": 25.0, "forward": 50.0, "backward": 125.0, "exchange": 0.0}
    assert time_shares(seconds, steps=1) == "\n".join(
        [
            "where the time went  3:20 min in 1 step",
            "  backward  2:05 min   62%  " + "█" * 32,
            "  forward     50.0 s   25%  " + "█" * 12 + "▊",
            "  data        25.0 s   12%  " + "█" * 6 + "▍",
            "  other      50.0 ms   <1%",
        ]
    )


def test_unwatched_time_is_shown() -> None:
    assert "unwatched  5.0 s   50%" in time_shares({"forward": 5.0}, 10.0)
    assert "unwatched" not in time_shares({"forward": 9.99}, 10.0)


def test_no_time_at_all() -> None:
    assert time_shares({}) == time_shares({"data": 0.0}) == "where the time went: nowhere yet"


seconds_of_phases = st.dictionaries(st.sampled_from(PHASES), st.floats(0, 1e7))


@given(seconds_of_phases)
def test_the_table_fits_eighty_columns_and_any_stream(seconds: dict[str, float]) -> None:
    text = time_shares(seconds, steps=10**9)
    assert max(map(len, text.splitlines())) <= 80
    time_shares(seconds, ascii_only=True).encode("ascii")
    colored = time_shares(seconds, steps=10**9, color=True)
    assert re.sub(r"\x1b\[\d*m", "", colored).split() == text.split()


@pytest.mark.parametrize(
    ("seconds", "workers", "phase", "advice"),
    [
        ({"data": 3.0, "forward": 7.0}, 0, "data", "--set loader.workers=2"),
        ({"data": 3.0, "forward": 7.0}, 4, "data", "fewer workers"),
        ({"exchange": 4.0, "forward": 6.0}, 0, "exchange", "--ranks"),
        ({"checkpoint": 4.0, "forward": 6.0}, 0, "checkpoint", "--set checkpoint.every"),
        ({"evaluate": 4.0, "forward": 6.0}, 0, "evaluate", "evaluate less often"),
        ({"data": 3.0, "exchange": 6.0, "forward": 1.0}, 0, "exchange", "batch"),
    ],
)
def test_a_bottleneck_comes_with_an_advice(seconds: dict[str, float], workers: int, phase: str, advice: str) -> None:
    found = bottleneck(seconds, workers=workers)
    assert found is not None
    assert found.phase == phase
    assert advice in found.advice
    assert f"{seconds[phase] / 10:.0%}" in found.fact


@pytest.mark.parametrize(
    "seconds", [{}, {"data": 0.0}, {"data": 1.9, "forward": 8.1}, {"backward": 10.0}, {"data": 2.9}]
)
def test_no_bottleneck(seconds: dict[str, float]) -> None:
    assert bottleneck(seconds) is None


def test_a_straggler_waits_least() -> None:
    assert straggler({0: 0.5, 1: 0.05, 2: 0.45, 3: 0.55}) == (1, 0.05, 0.5)
    assert straggler({0: 0.3, 1: 0.25}) is None
    assert straggler({0: 0.3}) is None
    assert straggler({}) is None


def test_the_closing_lines(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[loader]\nworkers = 3\n")
    lines = closing_lines({**RESULT, "phases": {"data": 4.0, "forward": 6.0}}, tmp_path)
    assert lines[0] == "where the time went  10.0 s in 200 steps"
    resumed = closing_lines({**RESULT, "resumed_at": 150, "phases": {"data": 4.0, "forward": 6.0}}, tmp_path)
    assert resumed[0] == "where the time went  10.0 s in 50 steps"
    assert any("Waiting for data took 40% of the time." in line for line in lines)
    assert f"run          {tmp_path}" in lines
    assert "result       200 steps, loss 1.2346, 1,234 samples/s, 2 ranks (8 virtual)" in lines
    assert "fingerprint  " + "ab" * 32 in lines
    assert not [line for line in lines if line.startswith("energy")]
    measured = {"joules": 720000.0, "kwh": 0.2, "joules_per_sample": 3.14159, "source": "rapl:package-0"}
    lines = closing_lines({**RESULT, "energy": measured}, tmp_path)
    assert "energy       0.2 kWh, 3.14 J/sample (rapl:package-0)" in lines
    small = closing_lines({**RESULT, "energy": {"joules": 1234.5, "kwh": 0.0003429, "source": "nvml:0"}}, tmp_path)
    assert "energy       1,234 J (nvml:0)" in small
    assert not [line for line in closing_lines({**RESULT, "energy": "not measured: x"}, tmp_path) if "energy" in line]
    text = " ".join(" ".join(lines).split())
    assert "promise exact: one fixed tree adds the gradients of all virtual ranks, wherever they" in text
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)


def test_closing_lines_without_facts(tmp_path: Path) -> None:
    assert closing_lines({}, tmp_path) == [f"run  {tmp_path}"]
    assert closing_lines({"promise": "", "weights_sha256": None, "stopped": True}, tmp_path)[-1].endswith(
        "with --resume"
    )
    one = closing_lines({"steps": 1, "ranks": 1, "virtual_ranks": 1}, tmp_path)
    assert "result  1 step, 1 rank (1 virtual)" in one


def test_a_path_with_spaces_is_not_wrapped() -> None:
    path = "a very long path  with spaces " * 5
    assert closing_lines({}, path)[-1] == f"run  {path}"


def test_a_finished_run_is_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    assert read_directory(tmp_path) == closing_lines(RESULT, tmp_path)


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """Write the files of a run of three processes that was killed in its tenth step; rank 1 is slow."""
    for rank in range(3):
        line = Timeline(tmp_path / "timeline" / f"rank-{rank}.jsonl")
        for step in range(9):
            spent = {"forward": 1.0, "exchange": 0.0} if rank == 1 else {"forward": 0.5, "exchange": 0.5}
            line.step(step, spent, 1.0)
        line.close()
    with (tmp_path / "timeline" / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 9, "t": 17')
    (tmp_path / "timeline" / "rank-x.jsonl").write_text("not ours")
    return tmp_path


def test_a_crashed_run_is_read_from_its_timeline(crashed: Path) -> None:
    lines = read_directory(crashed)
    assert lines[0] == "where the time went  9.0 s in 9 steps"
    assert any(line.startswith("Exchanging gradients, and waiting for other processes, took 50%") for line in lines)
    assert "Rank 1 is a straggler: it spends 0% of its time in the exchange, the others 50%." in lines
    assert "result  9 steps" in lines
    assert lines[-1] == "This run did not finish. Next: the same command with --resume"


def test_repeated_steps_count_as_time(crashed: Path) -> None:
    line = Timeline(crashed / "timeline" / "rank-0.jsonl")
    line.resumed(5)
    line.step(5, {"forward": 1.0})
    line.close()
    assert summary.seconds_of(crashed) == {"forward": 5.5, "exchange": 4.5}
    assert summary.steps_done(crashed) == 6


@pytest.mark.parametrize(
    "content", [None, "", "{", "[1]", "\x00"], ids=["missing", "empty", "half", "a list", "a zero"]
)
def test_an_unreadable_result_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    assert summary.read_result(tmp_path) is None
    assert read_directory(tmp_path)[-1].endswith("--resume")


def test_a_missing_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    shutil.rmtree(gone)
    assert read_directory(gone)[0] == f"run  {gone}"


@pytest.mark.parametrize("settings", ["", "[loader]\n", "loader = 3", "[loader]\nworkers = 'many'", "= ="])
def test_settings_without_workers(tmp_path: Path, settings: str) -> None:
    (tmp_path / "settings.toml").write_text(settings)
    assert "Waiting for data took 100% of the time. Next: --set loader.workers=2" in closing_lines(
        {"phases": {"data": 4.0}}, tmp_path
    )


def test_a_waiting_server_is_no_bottleneck(tmp_path: Path) -> None:
    seconds = {"exchange": 80.0, "evaluate": 60.0, "forward": 10.0}
    text = "\n".join(
        closing_lines({**RESULT, "phases": seconds, "servers": 1, "late_mean": 1.97, "late_most": 3}, tmp_path)
    )
    assert "Evaluating took 40% of the time" in text
    assert "gradients by 2.0 updates on average, 3 at most" in text


def test_sent_bytes_are_compared_with_the_uncompressed_size(tmp_path: Path) -> None:
    compressed = {**RESULT, "bytes_per_step": 555_008, "bytes_uncompressed": 50_874_368}
    text = " ".join(" ".join(closing_lines(compressed, tmp_path)).split())
    assert "sent 555 kB of gradients per step and process, 1.1% of the uncompressed size promise" in text
    more = " ".join(" ".join(closing_lines({**compressed, "bytes_per_step": 60_000_000}, tmp_path)).split())
    assert "117.9% of the uncompressed size: fewer groups send less (compress.groups)" in more
    assert "sent 812 B of gradients per step and process promise" in " ".join(
        " ".join(closing_lines({**RESULT, "bytes_per_step": 812}, tmp_path)).split()
    )
    assert "of gradients" not in "".join(closing_lines({**RESULT, "bytes_per_step": 0}, tmp_path))
