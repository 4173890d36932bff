"""Valid JSON of unexpected types and values in the files of a run: every reader skips the line or the file."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report_size import write_run
from unisono.cli.inspect.top import view
from unisono.json_forms import parse
from unisono.metrics.run_numbers import RunNumbers, TimelineFolder
from unisono.report.live.run_list import RunList
from unisono.report.rank_series import RankSeries
from unisono.report.report_page import run_page
from unisono.report.run_comparison import comparison_page
from unisono.report.run_files import RunFiles
from unisono.report.text_report import text_report
from unisono.train.tracking.follower import Feed, Unsent, describe_run

DEEP = "[" * 100_000
LONG = "1" + "0" * 400

LINES = [
    *(f'{{"t":1,"step":5,"us":[1],{more}}}' for more in ('"n":0', '"n":-1', '"samples":"x"', '"wait":"y"', '"log":5')),
    f'{{"t":1,"step":5,"us":[1],"samples":{LONG}}}',
    f'{{"t":1,"step":5,"us":[{LONG}]}}',
    '{"t":1,"step":1e400,"us":[1]}',
    '{"t":1,"step":-7,"us":[1]}',
    '{"t":1,"step":"9","us":[1]}',
    '{"t":NaN,"step":99,"us":[1]}',
    '{"t":1,"step":99,"us":[NaN]}',
    '{"t":1,"step":99,"us":{"a":1}}',
    '{"step":99,"us":[1]}',
    '{"t":1,"us":[1]}',
    '{"checkpoint":null}',
    '{"t":1,"resumed_at":"x"}',
    '{"t":1,"resumed_at":-1}',
    '{"t":1,"event":"start","host":5,"pid":"x"}',
    '{"t":1,"event":"death","step":1}',
    '{"t":1,"event":"death","step":1,"ranks":2}',
    '{"t":"x","event":"join","step":3,"ranks":[1]}',
    '{"t":1,"event":"spike","step":null}',
    '{"t":1,"event":"assignment","step":3}',
    '{"t":1,"event":"assignment","step":3,"virtual_ranks":[1]}',
    '{"t":1,"media":"image"}',
    '{"t":1,"media":"image","name":"a","step":1,"file":5}',
    '{"t":1,"media":"histogram","name":"a","step":1,"counts":5}',
    DEEP,
]

SAMPLES = [
    '{"t":"x","cpu":1}',
    '{"t":NaN,"cpu":1}',
    f'{{"t":9e9,"cpu":{LONG}}}',
    '{"t":9e9,"processes":5}',
    '{"t":9e9,"processes":{"0":5}}',
    '{"t":9e9,"processes":{"a":{"cpu":1,"resident":5}}}',
    '{"t":9e9,"processes":{"0":{"allowed":"a-b"}}}',
    '{"t":9e9,"processes":{"0":{"allowed":"0-999999999999"}}}',
    '{"t":9e9,"memory":5}',
    '{"t":9e9,"devices":{"a":1}}',
    '{"t":9e9,"devices":[5]}',
    '{"t":9e9,"start":{"memory":5}}',
    '{"t":9e9,"start":{"cores":"x"}}',
    DEEP,
]

RESULTS = [
    *('{"steps":"x"}', '{"phases":5}', '{"phases":{"a":"b"}}', '{"steps":3,"resumed_at":null,"phases":{"data":1.0}}'),
    *('{"energy":{}}', '{"energy":{"kwh":"x"}}', '{"servers":"x"}', '{"bytes_per_step":"x"}', '{"late_mean":"x"}'),
    *('{"weights_sha256":[1]}', '{"promise":[1]}', DEEP, "{"),
]

SETTINGS = [
    "batch = nan\n",
    "batch = inf\nvirtual_ranks=8\n",
    "micro_batch=-3\nbatch=64\nvirtual_ranks=4\n",
    "batch = ",
]


def opened(run: Path) -> RunFiles:
    files = RunFiles(run)
    files.read()
    return files


def serve_metrics(run: Path) -> None:
    TimelineFolder(run / "timeline", RunNumbers()).read()


def follow(run: Path) -> None:
    describe_run(run, "id")
    feed = Feed([], Unsent(run), {})
    for line in (run / "timeline" / "rank-0.jsonl").read_bytes().splitlines():
        feed.line(line)
    feed.finish({"loss": 1.0})


def show(run: Path) -> None:
    Console(file=io.StringIO(), width=100, force_terminal=True).print(view(opened(run), 100))


READERS: dict[str, Callable[[Path], object]] = {
    "report": lambda run: run_page(opened(run)),
    "text": lambda run: text_report(opened(run)),
    "compare": lambda run: comparison_page([opened(run), opened(run)]),
    "list": lambda run: RunList(run.parent).read(),
    "top": show,
    "metrics": serve_metrics,
    "follower": follow,
}


def read_damaged(run: Path, name: str, damages: list[str], *, append: bool = True) -> list[str]:
    """Damage a file in several ways, and return the errors of readers."""
    path, failures = run / name, list[str]()
    before = path.read_text()
    for damage in damages:
        path.write_text(before + damage + "\n" if append else damage)
        for reader, read in READERS.items():
            try:
                read(run)
            except Exception as error:
                failures.append(f"{reader} of {damage[:60]}: {type(error).__name__}: {error}"[:200])
    path.write_text(before)
    return failures


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "runs" / "one", ranks=2, steps=20)
    samples = run / "timeline" / "host-node0.jsonl"
    samples.write_text("".join(samples.read_text().splitlines(keepends=True)[:9]))
    return run


@pytest.mark.parametrize(
    ("name", "damages", "append"),
    [
        ("timeline/rank-0.jsonl", LINES, True),
        ("timeline/host-node0.jsonl", SAMPLES, True),
        ("result.json", RESULTS, False),
        ("settings.toml", SETTINGS, False),
        ("environment.json", ["{", "[1]", DEEP], False),
    ],
    ids=["timeline", "samples", "result", "settings", "environment"],
)
def test_readers_skip_what_is_damaged(run: Path, name: str, damages: list[str], append: bool) -> None:
    assert read_damaged(run, name, damages, append=append) == []


def test_damaged_lines_change_nothing(run: Path) -> None:
    def found() -> tuple[int, list[object], int]:
        files = opened(run)
        return len(files.ranks[0].rows), [dict(event) for event in files.ranks[0].events], len(files.hosts["node0"])

    before = found()
    for name, damages in (("rank-0", LINES), ("host-node0", SAMPLES)):
        with (run / "timeline" / f"{name}.jsonl").open("a") as file:
            file.writelines(line + "\n" for line in damages)
    assert found() == before
    (run / "result.json").write_text('{"servers":"x"}')
    assert opened(run).result == {}


def test_lines_replace_damaged_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one", ranks=1, steps=400)
    monkeypatch.setattr("unisono.report.rank_series.WHOLE_BYTES", 1 << 10)
    blocks = run / "timeline" / "rank-0.blocks"
    whole = blocks.read_text().splitlines(keepends=True)
    assert len(whole) == 3
    damaged = ['{"bytes":5}\n', '{"bytes":["a",1]}\n', '{"bytes":[0,5000000],"steps":[0,1]}\n', '{"bytes":[9,1]}\n']
    blocks.write_text("".join([*damaged, *whole[1:]]))
    series = RankSeries(run / "timeline" / "rank-0.jsonl", 0)
    assert series.read()
    assert sum(row.steps for row in series.rows) == 400


def test_a_host_name_is_no_markup(run: Path) -> None:
    with (run / "timeline" / "rank-0.jsonl").open("a") as file:
        file.write('{"t":1,"event":"start","host":"[/red]","pid":1,"device":"cpu"}\n')
    show(run)


def test_an_object_with_a_number_too_large_for_a_float() -> None:
    assert parse('{"a":1e400}', finite=True) is None
    assert parse(f'{{"a":{LONG}}}', finite=True) is None
    assert parse('{"a":1e400}') == {"a": float("inf")}
