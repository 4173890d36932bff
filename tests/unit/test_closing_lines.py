"""The last lines of a run and its report as text, from files alone."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import SettingsError
from unisono.monitor.timeline import Timeline
from unisono.phases import PHASES
from unisono.report.closing_lines import closing_lines, lines_of, time_shares
from unisono.report.findings.evidence import Finding
from unisono.report.result_file import read_result
from unisono.report.run_files import RunFiles
from unisono.report.text_report import seconds_of, text_report

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


FOUND = Finding(
    "data", "Training waits for data in 40% of its time.", ["A fetch sleeps."], "--set loader.workers=3", 0.35
)


def test_findings_have_an_advice_and_a_gain(tmp_path: Path) -> None:
    result = {**RESULT, "phases": {"data": 4.0, "forward": 6.0}}
    lines = closing_lines(result, tmp_path, findings=[FOUND])
    at = lines.index("Training waits for data in 40% of its time.")
    assert lines[at + 1] == "  Next: --set loader.workers=3 (saves about 35% of the time)"
    assert "A fetch sleeps." not in "".join(lines)
    assert "  A fetch sleeps." in lines_of(FOUND, evidence=True)
    changing = lines_of(FOUND._replace(gain=None, changes_result=True))
    assert changing[1] == "  Next: --set loader.workers=3 (changes the result)"
    many = closing_lines(result, tmp_path, findings=[FOUND] * 5)
    assert many.count(FOUND.fact) == 3
    assert f"2 more: unisono report {tmp_path} --text" in many


def test_the_closing_lines(tmp_path: Path) -> None:
    lines = closing_lines({**RESULT, "phases": {"data": 4.0, "forward": 6.0}}, tmp_path)
    assert lines[0] == "where the time went  10.0 s in 200 steps"
    resumed = closing_lines({**RESULT, "resumed_at": 150, "phases": {"data": 4.0, "forward": 6.0}}, tmp_path)
    assert resumed[0] == "where the time went  10.0 s in 50 steps"
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
    (tmp_path / "timeline").mkdir()
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    assert text_report(RunFiles(tmp_path)) == closing_lines(RESULT, tmp_path)


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


def old(path: Path) -> RunFiles:
    """Read a run whose timelines are an hour old."""
    for file in (path / "timeline").iterdir():
        os.utime(file, (time.time() - 3600,) * 2)
    files = RunFiles(path)
    files.read()
    return files


def test_a_crashed_run_is_read_from_its_timeline(crashed: Path) -> None:
    lines = text_report(old(crashed))
    assert lines[0] == "where the time went  9.0 s in 9 steps"
    assert "Rank 1 is slow, and the others wait for it." in lines
    assert "result  9 steps, loss 1.0000" in lines
    assert lines[-1] == "This run did not finish. Next: the same command with --resume"


def test_a_run_that_is_under_way(crashed: Path) -> None:
    files = RunFiles(crashed)
    files.read()
    assert text_report(files)[-1] == "This run is under way."


def test_repeated_steps_count_once(crashed: Path) -> None:
    line = Timeline(crashed / "timeline" / "rank-0.jsonl")
    line.resumed(5)
    line.step(5, {"forward": 1.0})
    line.close()
    files = RunFiles(crashed)
    files.read()
    assert seconds_of(files.ranks[0]) == {"forward": 3.5, "exchange": 2.5}
    assert len(files.ranks[0].rows) == 6


@pytest.mark.parametrize(
    "content", [None, "", "{", "[1]", "\x00"], ids=["missing", "empty", "half", "a list", "a zero"]
)
def test_an_unreadable_result_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    assert read_result(tmp_path) is None
    (tmp_path / "timeline").mkdir()
    assert text_report(RunFiles(tmp_path))[-1].endswith("--resume")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="There is no run"):
        RunFiles(tmp_path / "gone")
    with pytest.raises(SettingsError, match="is not a run directory"):
        RunFiles(tmp_path)


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
