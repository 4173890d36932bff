"""The metrics of a run: what is added up from timelines, and the page and the dashboard that show it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.authority import Authority
from tests.house.sources import ROOT
from unisono.metrics.exporter import serve
from unisono.metrics.prometheus_page import resident_bytes
from unisono.metrics.run_numbers import RankProcess, RunNumbers, TimelineFolder
from unisono.monitor.timeline import Timeline

LABELS = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.M)


def write_timelines(folder: Path) -> None:
    """Write the timelines of two ranks as a run does: 20 steps, a checkpoint, a death, a resume, a lowered promise."""
    for rank in range(2):
        timeline = Timeline(folder / "timeline" / f"rank-{rank}.jsonl")
        timeline.event({"event": "start", "step": 0, "host": socket.gethostname(), "pid": os.getpid()})
        for step in range(20):
            more = {"samples": 32, "lr": 0.1, "grad_norm": 2.0} if rank == 0 else {}
            log = {"bleu": 0.5 * step, "name": "text", "worst": float("nan")}
            timeline.step(step, {"forward": 0.25, "exchange": 0.5}, 1.0 / (step + 1), log, wait=0.125 * rank, more=more)
        if rank == 0:
            timeline.event({"checkpoint": 16})
        timeline.event({"event": "death", "step": 20, "ranks": [2]})
        timeline.event({"promise": "tolerance", "reason": "a test"})
        timeline.close()


def numbers_of(folder: Path) -> RunNumbers:
    numbers = RunNumbers()
    TimelineFolder(folder / "timeline", numbers).read()
    return numbers


def page_of(numbers: RunNumbers) -> str:
    """Return the page as Prometheus gets it."""
    server = serve(numbers, {"run": "mine", "promise": "exact", "virtual_ranks": "8"}, threading.Lock(), "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    finally:
        server.shutdown()
        server.server_close()


def values_of(page: str) -> dict[tuple[str, str], float]:
    return {(name, labels): float(value) for name, labels, value in LABELS.findall(page)}


def test_the_page_has_the_numbers_of_the_timelines(tmp_path: Path) -> None:
    write_timelines(tmp_path)
    values = values_of(page_of(numbers_of(tmp_path)))
    expected = {
        ("unisono_step", ""): 20,
        ("unisono_loss", ""): 0.05,
        ("unisono_learning_rate", ""): 0.1,
        ("unisono_gradient_norm", ""): 2.0,
        ("unisono_checkpoint_step", ""): 16,
        ("unisono_samples_total", ""): 640,
        ("unisono_samples_per_second", ""): pytest.approx(32 / 0.75),
        ("unisono_deaths_total", ""): 1,
        ("unisono_logged", 'name="bleu"'): 9.5,
        ("unisono_phase_seconds_total", 'phase="forward",rank="0"'): 5.0,
        ("unisono_phase_seconds_total", 'phase="exchange",rank="1"'): 10.0,
        ("unisono_wait_seconds_total", 'rank="0"'): 0.0,
        ("unisono_wait_seconds_total", 'rank="1"'): 2.5,
        ("unisono_info", 'promise="tolerance",run="mine",virtual_ranks="8"'): 1.0,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["unisono_resident_bytes", 'rank="1"'] > 10_000_000
    assert values["unisono_logged", 'name="worst"'] != values["unisono_logged", 'name="worst"']  # NaN
    assert ("unisono_logged", 'name="name"') not in values


def test_a_page_before_the_first_step_leaves_out_what_is_unknown(tmp_path: Path) -> None:
    names = {name for name, _ in values_of(page_of(numbers_of(tmp_path)))}
    assert names == {"unisono_info", "unisono_samples_total", "unisono_deaths_total"}


def test_a_death_counts_once_and_another_one_at_the_same_step_counts_too() -> None:
    numbers = RunNumbers()
    for rank, t in ((0, 1000.0), (1, 1001.5), (3, 1000.2), (0, 5000.0), (1, 5000.1)):
        numbers.add(rank, {"event": "death", "step": 7, "ranks": [2], "t": t})
    assert numbers.run["deaths"] == 2


def test_the_speed_is_that_of_the_last_seconds() -> None:
    numbers = RunNumbers()
    for step in range(100):
        seconds = 10.0 if step < 50 else 1.0
        numbers.add(0, {"step": step, "t": 0.0, "seconds": {"forward": seconds}, "samples": 64})
    assert numbers.speed.per_second == pytest.approx(64.0)


def test_lines_are_read_once_also_if_they_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "rank-0.jsonl"
    write_timelines(tmp_path)
    whole = path.read_bytes()
    numbers = RunNumbers()
    path.write_bytes(b"")
    timelines = TimelineFolder(path.parent, numbers)
    for start in range(0, len(whole), 37):
        with path.open("ab") as file:
            file.write(whole[start : start + 37])
        timelines.read()
    assert numbers.run == numbers_of(tmp_path).run
    assert numbers.run["samples"] == 640


def test_memory_is_that_of_the_same_process() -> None:
    now = time.time()
    assert resident_bytes(RankProcess(socket.gethostname(), os.getpid(), now)) is not None
    began = psutil.Process().create_time()
    assert resident_bytes(RankProcess(socket.gethostname(), os.getpid(), began - 60)) is None  # an earlier process


def test_memory_on_another_host_is_that_of_its_last_sample(tmp_path: Path) -> None:
    write_timelines(tmp_path)
    path = tmp_path / "timeline" / "rank-1.jsonl"
    path.write_text(path.read_text().replace(socket.gethostname(), "another-host"))
    samples = [{"t": 1000.0 + i, "processes": {"1": {"resident": 4096 * i}}} for i in range(3)]
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (tmp_path / "timeline" / "host-another-host.jsonl").write_text(lines)
    values = values_of(page_of(numbers_of(tmp_path)))
    assert values["unisono_resident_bytes", 'rank="1"'] == 8192
    assert values["unisono_resident_bytes", 'rank="0"'] > 10_000_000


def test_promtool_accepts_the_page(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    write_timelines(tmp_path)
    page = page_of(numbers_of(tmp_path))
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bunisono_[a-z_]+", text))


def test_the_dashboard_and_the_guide_have_the_metrics_of_the_page(tmp_path: Path) -> None:
    write_timelines(tmp_path)
    known = {name for name, _ in values_of(page_of(numbers_of(tmp_path)))}
    dashboard = json.loads((ROOT / "unisono" / "metrics" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [json.dumps(variable["query"]) for variable in dashboard["templating"]["list"]]
    assert len(queries) > 10
    assert names_in(" ".join(queries)) == known
    assert names_in((ROOT / "docs" / "guide" / "monitoring" / "metrics.md").read_text()) == known


def test_with_certificates_only_clients_that_show_one_get_the_page(tmp_path: Path) -> None:
    write_timelines(tmp_path)
    authority = Authority(tmp_path)
    own = authority.issue(["127.0.0.1"])
    files = [str(path) for path in own]
    server = serve(numbers_of(tmp_path), {"run": "mine"}, threading.Lock(), "127.0.0.1", 0, *files)
    url = f"https://127.0.0.1:{server.server_port}/metrics"
    try:
        shows = ssl.create_default_context(cafile=authority.ca)
        shows.load_cert_chain(*authority.issue(["prometheus"])[1:])
        with urllib.request.urlopen(url, timeout=10, context=shows) as answer:
            assert "unisono_step 20.0" in answer.read().decode()
        silent = socket.create_connection(("127.0.0.1", server.server_port))  # no handshake: others are still served
        with urllib.request.urlopen(url, timeout=5, context=shows) as answer:
            assert answer.status == 200
        silent.close()
        for context in (ssl.create_default_context(cafile=authority.ca), ssl.create_default_context()):
            with pytest.raises(OSError):
                urllib.request.urlopen(url, timeout=10, context=context).read()
            with (
                socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as plain,
                pytest.raises(ssl.SSLError, match=r"(?i)certificate"),
                context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                connection.recv(1)  # a client that sends nothing reads the alert for sure
    finally:
        server.shutdown()
        server.server_close()
