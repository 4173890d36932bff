"""The report as a page: what is in it, what cannot break it, and how large it gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report_size import BEGAN, write_run
from unisono.report.host_series import MOST, HostSeries, host_charts
from unisono.report.rank_table import ranks_now
from unisono.report.report_data import report_data
from unisono.report.report_page import LARGEST, json_of, run_page, write_report
from unisono.report.run_comparison import comparison, comparison_page
from unisono.report.run_files import RunFiles

EVIL = "</script><script>alert(1)</script><!--"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "one", ranks=4, steps=200)


def opened(run_dir: Path) -> RunFiles:
    files = RunFiles(run_dir)
    files.read()
    return files


def data_of(page: str) -> Any:
    """Return the data of a page, read as a browser does."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


def test_a_report_has_the_numbers_of_the_run(run_dir: Path) -> None:
    path = write_report(run_dir)
    page = path.read_text()
    run = data_of(page)["content"]
    assert path == run_dir / "report.html"
    assert (run["name"], run["state"], run["total"]) == ("one", "finished", 200)
    assert len(run["steps"]) == 200
    assert run["values"]["log.accuracy"]["last"][0] == pytest.approx(0.1)
    assert "low" not in run["values"]["loss"], "of single steps, the least and the greatest value are the last one"
    assert [event["kind"] for event in run["events"] if event["kind"] != "checkpoint"] == ["death", "join", "spike"]
    assert set(run["hosts"]) == {"node0"}
    titles = [chart["title"] for chart in run["hosts"]["node0"]["charts"]]
    assert titles[:2] == ["Processors of the host", "Cores in use by each process"]
    assert not list(run_dir.glob(".*")), "no draft is left"


def test_a_page_needs_and_allows_no_network(run_dir: Path) -> None:
    page = run_page(opened(run_dir))
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:\"" in page
    assert not re.search(r"<(?:link|script|img)[^>]+(?:src|href)=[\"'](?!data:)", page)


def test_names_settings_and_logs_are_only_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / EVIL.replace("/", "_"), ranks=2, steps=5)
    (run_dir / "settings.toml").write_text(f"steps = 5 # --set\nname = {json.dumps(EVIL)} # script\n")
    (run_dir / "log" / "rank-0.log").write_bytes(EVIL.encode() + b"\xff\n")
    (run_dir / "environment.json").write_text(json.dumps({"command": EVIL, "host": EVIL}))
    page = run_page(opened(run_dir))
    assert page.count("<script") == page.count("</script>") == 2
    run = data_of(page)["content"]
    assert run["environment"]["host"] == EVIL
    assert run["logs"]["rank-0"][0].startswith(EVIL)
    assert ["name", EVIL, "script"] in run["settings"]
    assert "<title>&lt;_script&gt;" in page


def test_numbers_that_json_does_not_have(run_dir: Path) -> None:
    (run_dir / "result.json").write_text('{"loss": NaN, "steps": 200, "inner": [Infinity, {"a": -Infinity}]}')
    result = data_of(run_page(opened(run_dir)))["content"]["result"]
    assert result == {"loss": "nan", "steps": 200, "inner": ["inf", {"a": "-inf"}]}
    assert json_of({"a": Path("b")}) == '{"a":"b"}'


@pytest.mark.slow
def test_a_page_stays_small(tmp_path: Path) -> None:
    """Many ranks, many hosts, long logs and many logged names: the curves get fewer points."""
    run_dir = write_run(tmp_path / "wide", ranks=128, steps=800, distinct=2)
    for log in (run_dir / "log").iterdir():
        log.write_text("a long line of a log\n" * 5000)
    lines = (run_dir / "timeline" / "rank-0.jsonl").read_text().splitlines()
    names = ",".join(f'"name{i}":{i}.12345' for i in range(60))
    lines = [line[:-1] + f',"log":{{{names}}}}}' if '"us"' in line and "log" not in line else line for line in lines]
    (run_dir / "timeline" / "rank-0.blocks").unlink()
    (run_dir / "timeline" / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    page = run_page(opened(run_dir))
    assert len(page) < LARGEST
    run = data_of(page)["content"]
    assert run["values"]["log.name7"]["last"][-1] == pytest.approx(7.1234, abs=1e-3)
    assert len(run["table"]) == 128
    (hosts,) = run["hosts"].items()
    assert hosts[0] == "16 hosts"
    assert list(hosts[1]["charts"][1]["curves"]) == ["rank, greatest", "rank, mean"]


@pytest.mark.parametrize("damage", ["empty", "garbage", "half", "folder"])
def test_a_damaged_run_has_a_report(run_dir: Path, damage: str) -> None:
    for name in (
        "result.json",
        "settings.toml",
        "environment.json",
        "timeline/rank-1.jsonl",
        "timeline/host-node0.jsonl",
    ):
        path = run_dir / name
        content = path.read_bytes()
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            path.write_bytes(
                {"empty": b"", "garbage": b'\xff{"step":[]\n\0\n[1]\n"a"\n', "half": content[: len(content) // 2]}[
                    damage
                ]
            )
    run = data_of(run_page(opened(run_dir)))["content"]
    assert len(run["steps"]) == 200


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "new" / "timeline").mkdir(parents=True)
    run = data_of(run_page(opened(tmp_path / "new")))["content"]
    assert "steps" not in run
    assert run["hosts"] == {}


def test_the_map_of_ranks_marks_what_is_unknown_and_bears_one_long_step(run_dir: Path) -> None:
    import base64

    path = run_dir / "timeline" / "rank-2.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:100]))  # it died
    (run_dir / "timeline" / "rank-2.blocks").unlink()
    found = report_data(opened(run_dir))["map"]
    rows = [base64.b64decode(found["cells"])[i * found["columns"] : (i + 1) * found["columns"]] for i in range(4)]
    assert rows[2][-1] == 0
    assert min(rows[1]) > 0
    assert sum(rows[1]) > 2 * sum(rows[0]), "rank 1 is slow"


def test_samples_of_a_long_run_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "host-a.jsonl"
    with path.open("w") as file:
        file.write('{"t":0,"start":{"host":"a.b","cores":4}}\n')
        for i in range(5 * MOST):
            file.write(json.dumps({"t": BEGAN + i, "cpu": float(i % 2), "processes": {"10": {"resident": i}}}) + "\n")
    series = HostSeries(path)
    assert series.read()
    assert not series.read()
    assert series.name == "a.b"
    assert MOST <= len(series.rows) <= 2 * MOST
    assert sum(row.count for row in series.rows) == 5 * MOST
    found = host_charts([series], BEGAN, MOST)["a.b"]
    assert found["time"][-1] == 5 * MOST - 1
    assert len(found["time"]) == MOST
    assert found["charts"][0]["curves"]["busy"][5] == 0.5
    assert list(found["charts"][1]["curves"]) == ["rank 10"]
    mean = sum(row.count * row.numbers["resident", "rank 10"] for row in series.rows) / (5 * MOST)
    assert mean == pytest.approx((5 * MOST - 1) / 2)


def test_of_many_samples_some_are_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = opened(run_dir).hosts["node0"]
    monkeypatch.setattr("unisono.report.run_files.HOST_BYTES", 32 << 10)
    some = opened(run_dir).hosts["node0"]
    assert "start" in some[0]
    assert 20 < len(some) < len(everything) / 3
    assert some[-1]["t"] == pytest.approx(everything[-1]["t"], abs=2.0)


def test_runs_are_compared(run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other" / "one", ranks=2, steps=300)
    found = comparison([opened(run_dir), opened(other)])
    assert [run["name"] for run in found["runs"]] == [str(run_dir), str(other)], "folders of one name"
    assert ["steps", ["200", "300"]] in found["differences"]["settings"]
    assert "lr" not in dict(found["differences"]["settings"])
    assert ["ranks", [4, 2]] in found["differences"]["result"]
    assert found["fingerprints"] == 1
    page = comparison_page([opened(run_dir), opened(other)])
    assert len(data_of(page)["content"]["runs"]) == 2


def test_the_clock_is_set_back_by_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "timeline"
    folder.mkdir(parents=True)

    def at(i: int, count: int) -> float:
        return BEGAN + i - (3600 if i >= count / 2 else 0)

    steps = [{"step": i, "t": at(i, 100), "us": [0, 0, 900_000], "samples": 8, "loss": 1.0} for i in range(100)]
    samples = [{"t": at(2 * i, 100), "cpu": 0.25 if i < 25 else 0.75} for i in range(50)]
    for name, lines in (("rank-0", steps), ("host-a", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = report_data(opened(tmp_path / "run"))
    assert run["time"] == sorted(run["time"])
    assert 0 <= run["time"][0] < run["time"][-1] < 100
    assert None not in run["rate"]["samples"]
    assert run["rate"]["samples"][-1] == pytest.approx(8 / 0.9, rel=1e-3)
    host = run["hosts"]["a"]
    assert host["time"] == sorted(host["time"])
    busy = next(chart for chart in host["charts"] if chart["id"] == "cpu")["curves"]["busy"]
    assert (busy[0], busy[-1]) == (0.25, 0.75)
    assert None not in busy
    assert ranks_now(opened(tmp_path / "run"))[0].steps_per_second == pytest.approx(1 / 0.9)
