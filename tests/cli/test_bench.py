"""`unisono bench`: its measurements, files, reports of slow links, and refused requests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command
from tests.cli.refused_requests import RequestProblems
from unisono import environment
from unisono.cli.benchmark.collective_kinds import KINDS
from unisono.cli.benchmark.html_report import page
from unisono.cli.benchmark.pair_rounds import rounds
from unisono.cli.benchmark.slow_links import MeasuredLink, findings
from unisono.cli.commands.bench import collected

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Elements(HTMLParser):
    """Check that every element of a page is closed, and collect the addresses that it would load."""

    EMPTY = ("meta", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_bench_measures_all_collectives_and_writes_files(command: Command) -> None:
    ended = command.run("bench", "--ranks", "3", "--sizes", "64kB,1 kB", "--json", "--run-dir", "out")
    assert ended.status == 0, ended.err
    report = json.loads(ended.out)
    assert report["dir"] == "out"
    assert report["about"]["ranks"] == len(report["about"]["hosts"]) == 3
    assert report["about"]["back_end"] == "gloo"
    rows = {(row["collective"], row["bytes"]): row for row in report["collectives"]}
    kinds = [name for name in KINDS if name != "tree_messages" or report["about"]["neighbors"]]
    assert list(rows) == [(name, size) for name in kinds for size in (1024, 65536)]
    for (name, size), row in rows.items():
        about = -(-size // 12) * 12  # rounded up to a whole number of floats per process
        assert row["times"] >= 5
        assert row["algorithm_bytes_per_second"] == pytest.approx(about / row["seconds"])
        factor = row["bus_bytes_per_second"] / row["algorithm_bytes_per_second"]
        assert factor == pytest.approx({"broadcast": 1, "send_receive": 1, "ring": 4 / 3}.get(name, KINDS[name].bus(3)))
    assert [pair["ranks"] for pair in report["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert json.loads((command.folder / "out" / "bench.json").read_text()) == {
        k: report[k] for k in report if k != "dir"
    }
    assert not (command.folder / "out" / "measured.jsonl").exists()
    text = (command.folder / "out" / "bench.html").read_text()
    found = Elements(text)
    assert not found.open
    assert not found.loads
    assert not re.search(r"https?://|@import|url\(|<script", text)  # it opens without a network
    assert found.count["circle"] == 2 * len(rows)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.slow
@pytest.mark.slow
def test_bench_prints_a_table(command: Command) -> None:
    ended = command.run("bench", "--only", "ring", "--only", "pairs", "--sizes", "4kB,1MB")
    assert ended.status == 0, ended.err
    assert re.search(r"2 processes on 1 host, cpu, gloo", ended.out)
    assert re.search(r"^ring +\d.* (us|ms) +\d+$", ended.out, re.M)
    assert re.search(r"^ranks +0 and +1 .* (us|ms) .*B/s$", ended.out, re.M)
    (page_,) = (command.folder / "runs").glob("bench-*/bench.html")
    assert f"Results and plots: {page_.relative_to(command.folder)}" in ended.out


@pytest.mark.slow
def test_bench_under_torchrun(command: Command) -> None:
    arguments = [*TORCHRUN, "-m", "unisono.cli.main", "bench", "--only", "broadcast", "--sizes", "1kB", "--json"]
    ended = command.end(command.start_python(*arguments))
    assert ended.status == 0, ended.err
    (report,) = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert report["about"]["ranks"] == 2
    assert len(report["collectives"]) == 1
    assert (command.folder / report["dir"] / "bench.html").is_file()


def test_ctrl_c_keeps_results(command: Command) -> None:
    running = command.start("bench", "--sizes", "16MB", "--run-dir", "out")
    assert running.stdout is not None
    assert any(line.startswith("all_reduce") for line in iter(running.stdout.readline, ""))
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert ended.status == 0
    assert "Traceback" not in ended.out + ended.err
    assert "Stopped; results so far: out/bench.html" in ended.out
    report = json.loads((command.folder / "out" / "bench.json").read_text())
    assert report["stopped"]
    assert report["collectives"][0]["collective"] == "all_reduce"


# -- requests


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], ["There is 1 process.", "needs at least 2", "Next: unisono bench --ranks 2"]),
        (["--ranks", "two"], ["--ranks takes a whole number", "unisono bench --ranks 2"]),
        (["--only", "allreduce"], ["no collective allreduce.", "nearest name is all_reduce", "--only all_reduce"]),
        (["--sizes", "1kB,big"], ["Invalid size in --sizes: big", "--sizes 1kB,1MB,64MB"]),
        (["--sizes", "1TB"], ["Invalid size in --sizes: 1TB"]),
        (["--sizes", "100GB"], ["Invalid size in --sizes: 100GB", "4 bytes to 4 GB"]),
        (["--size", "1kB"], ["There is no flag --size.", "The nearest flag is --sizes.", "unisono bench --sizes 1kB"]),
        (["--run-dir", "there"], ["there is a file."]),
        (["--run-dir", "full"], ["full already contains results.", "--run-dir full-2"]),
        (["text"], ["Unexpected argument: text"]),
    ],
)
def test_wrong_requests_are_refused(
    request_problems: RequestProblems, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "bench.json").touch()
    report = "\n".join(map(str, request_problems("bench", *arguments)))
    assert all(each in report for each in words), report


def test_ranks_cannot_be_combined_with_torchrun(
    request_problems: RequestProblems, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    (problem,) = request_problems("bench", "--ranks", "4")
    assert problem.error == "--ranks cannot be combined with torchrun."
    assert problem.facts == "torchrun already started 2 processes, and these are measured."
    assert problem.remedy == "unisono bench --json"


def test_all_problems_of_bench_are_reported_together(request_problems: RequestProblems) -> None:
    assert len(request_problems("bench", "--ranks", "0", "--only", "nothing", "--sizes", "")) == 3


def test_the_help_loads_no_torch() -> None:
    code = "import sys\nfrom unisono.cli.main import main\ntry: main(['bench', '--help'])\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment.inherited({})
    )
    assert "--sizes" in done.stdout
    assert done.stdout.endswith("False False\n")


# -- links


def links(size: int, slow: dict[tuple[int, int], tuple[float, float]]) -> list[MeasuredLink]:
    """Return links of all pairs with 100 us and 1 GB/s, except those in `slow`."""
    pairs = [(one, other) for one in range(size) for other in range(one + 1, size)]
    return [MeasuredLink(pair, *slow.get(pair, (100e-6, 1e9))) for pair in pairs]


def test_a_slow_link_is_reported_with_numbers_and_advice() -> None:
    (report,) = map(str, findings(links(4, {(1, 2): (100e-6, 2e8)}), ["a", "b", "c", "d"]))
    assert "between host b and host c is slow" in report
    assert "200 MB/s, 0.2 times the median (1 GB/s) of 6 links" in report
    assert "100 MB over it take 0.5 s, and 0.1 s at the median" in report
    assert "iperf3 -s on b, iperf3 -c b on c" in report
    (report,) = map(str, findings(links(4, {(0, 1): (900e-6, 1e9)}), ["a"] * 4))
    assert "between rank 0 and rank 1 is slow" in report
    assert "900 us for a small message, 9 times the median (100 us)" in report
    assert "Each exchange waits" not in report
    assert "what else runs on a" in report


@pytest.mark.parametrize("size", [3, 4, 9])
def test_a_slow_process_is_reported_once(size: int) -> None:
    """With three processes, two of three links are slow, and so is their median."""
    far = {(rank, size - 1): (100e-6, 1e8) for rank in range(size - 1)}
    (report,) = map(str, findings(links(size, far), [*"abcdefgh"[: size - 1], "z"]))
    assert "Host z is slow with all others" in report
    assert f"100 MB/s, 0.1 times the median (1 GB/s) of the {size} best links" in report
    assert "iperf3 -s on z, iperf3 -c z on a" in report


def test_links_between_several_processes_of_hosts_are_compared_by_hosts() -> None:
    """Hosts a, b, c with two processes each: all four links between b and c are slow, and are one finding."""
    far = {(one, other): (100e-6, 1e8) for one in (2, 3) for other in (4, 5)}
    hosts = ["a", "a", "b", "b", "c", "c"]
    (report,) = map(str, findings(links(6, far), hosts))
    assert "between host b and host c is slow" in report
    assert "100 MB/s, 0.1 times the median (1 GB/s) of 3 links" in report


def test_similar_links_are_not_slow() -> None:
    assert findings(links(4, {(0, 1): (150e-6, 7e8)}), ["a"] * 4) == []
    assert findings(links(2, {}), ["a"] * 2) == []
    near = {(0, 1): (10e-6, 1e10), (2, 3): (10e-6, 1e10)}  # links within a host are compared with each other
    assert findings(links(4, near), ["a", "a", "b", "b"]) == []


@pytest.mark.parametrize("size", [2, 3, 16, 17, 18])
def test_every_pair_is_measured_once(size: int) -> None:
    turns = list(rounds(size))
    assert sorted(pair for turn in turns for pair in turn) == [(a, b) for a in range(size) for b in range(a + 1, size)]
    for turn in turns:
        ranks = [rank for pair in turn for rank in pair]
        assert len(ranks) == len(set(ranks))
        assert len(turn) == 1 or size > 16


def test_the_page_of_partial_results_is_valid(tmp_path: Path) -> None:
    """The last line of the results is incomplete, and no pairs were measured."""
    row = {"collective": "ring<", "bytes": 1024, "seconds": 1e-4, "times": 5}
    row |= {"algorithm_bytes_per_second": 1e7, "bus_bytes_per_second": 1e7}
    about = {"ranks": 2, "hosts": ["a", "a"], "device": "cpu", "back_end": "gloo", "torch": "2", "time": "now"}
    lines = [json.dumps({"about": about}), json.dumps(row), json.dumps(row)[:20]]
    (tmp_path / "lines").write_text("\n".join(lines))
    text = page(collected(tmp_path / "lines", stopped=True))
    assert "stopped early" in text
    assert "ring&lt;" in text
    assert not Elements(text).open
