"""The metrics of runs while they train, read by Prometheus."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT, result
from tests.unit.test_metrics import values_of

LOGGING = SCRIPT.replace("        step.update(", "        run.log(bleu=0.5)\n        step.update(")
WAIT_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(found: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not found():
        assert time.monotonic() < until
        time.sleep(0.1)


def page(port: int) -> str:
    """Return the metrics page; "" if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.ci
def test_the_page_is_read_while_a_run_trains(command: Command) -> None:
    command.script(LOGGING)
    port = free_port()
    words = ["--ranks", "2", "--run-dir", "out", "--set", f"metrics.port={port}", "--set", "pause=0.04"]
    running = command.start("run", "script.py", *words)
    wait_until(lambda: values_of(page(port)).get(("unisono_step", ""), 0) > 2)
    values = values_of(page(port))
    assert values["unisono_logged", 'name="bleu"'] == 0.5
    assert values["unisono_resident_bytes", 'rank="1"'] > 50_000_000
    assert values["unisono_phase_seconds_total", 'phase="exchange",rank="1"'] > 0
    ended = command.end(running)
    assert ended.status == 0, ended.err
    command.train("alone")
    assert result(command, "out")["weights_sha256"] == result(command, "alone")["weights_sha256"]
    assert page(port) == ""


@pytest.mark.slow
def test_a_port_in_use_is_one_message_and_training_continues(command: Command) -> None:
    command.script(LOGGING)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["--run-dir", "out", "--set", f"metrics.port={port}", "--set", "pause=0.03"]
        ended = command.run("run", "script.py", *words)
    assert ended.status == 0, ended.err
    said = [line for line in (ended.out + ended.err).splitlines() if "metrics" in line]
    assert said == [
        f"Cannot serve metrics at 127.0.0.1:{port}: Address already in use. Training continues without them. "
        f"For another port: --set metrics.port={port % 65535 + 1}"
    ]
    assert result(command, "out")["steps"] == 24


@pytest.mark.ci
def test_a_port_out_of_range_is_refused(command: Command) -> None:
    command.script(LOGGING)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "metrics.port=94000")
    assert ended.status == 2
    assert "metrics.port = 94000 is out of range." in ended.err
    assert not (command.folder / "out").exists()


@pytest.mark.slow
def test_the_page_survives_the_death_of_the_main_process(command: Command) -> None:
    command.script(LOGGING)
    port = free_port()
    words = ["--ranks", "3", "--run-dir", "out", "--set", f"metrics.port={port}", "--set", "pause=0.1"]
    running = command.start("run", "script.py", *words)
    wait_until(lambda: values_of(page(port)).get(("unisono_step", ""), 0) > 1)
    lines = (command.folder / "out" / "timeline" / "rank-0.jsonl").read_text().splitlines()
    start = next(entry for entry in map(json.loads, lines) if entry.get("event") == "start")
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(start["pid"])], check=True)
    wait_until(lambda: values_of(page(port)).get(("unisono_deaths_total", "")) == 1)
    step = values_of(page(port))["unisono_step", ""]
    wait_until(lambda: values_of(page(port)).get(("unisono_step", ""), 0) > step)
    ended = command.end(running)
    assert ended.status == 0, ended.err


@pytest.mark.slow
def test_prometheus_reads_the_page(command: Command, tmp_path: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    command.script(LOGGING)
    port, own = free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(
        "scrape_configs:\n- job_name: unisono\n  scrape_interval: 1s\n"
        f"  static_configs:\n  - targets: ['127.0.0.1:{port}']\n"
    )
    server = subprocess.Popen(
        [
            prometheus,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--web.listen-address=127.0.0.1:{own}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def query(text: str) -> list[str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/query?query={text}", timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return [each["value"][1] for each in found]

    try:
        words = ["--ranks", "2", "--run-dir", "out", "--set", f"metrics.port={port}", "--set", "pause=0.1"]
        running = command.start("run", "script.py", *words)
        wait_until(lambda: any(float(step) > 3 for step in query("unisono_step")))
        assert len(query("unisono_phase_seconds_total%7Bphase=%22forward%22%7D")) == 2
        assert query("unisono_info") == ["1"]
        ended = command.end(running)
        assert ended.status == 0, ended.err
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_a_killed_process_beside_the_run_is_one_line_and_training_continues(command: Command) -> None:
    """Trackers and the metrics page have a process each. The script kills both, as a lack of memory does."""
    killing = """        if step.number == 3:
            import psutil
            for child in psutil.Process().children():
                words = child.cmdline()
                if "unisono.metrics.exporter" in words or "unisono.train.tracking.follower" in words:
                    child.kill()
        step.update("""
    command.script(LOGGING.replace("        step.update(", killing))
    options = ["--run-dir", "out", "--set", f"metrics.port={free_port()}", "--set", "track=csv", "--set", "pause=0.03"]
    ended = command.run("run", "script.py", *options, "--set", "steps=12")
    assert ended.status == 0, ended.err
    said = [line for line in (ended.out + ended.err).splitlines() if "SIGKILL" in line]
    assert sorted(said) == [
        "The process of the metrics page died of signal 9 (SIGKILL). Training continues. "
        "The next resume starts it again.",
        "The process of the trackers died of signal 9 (SIGKILL). Training continues. "
        "The next resume sends what is missing.",
    ]
    assert result(command, "out")["steps"] == 12
    ended = command.run("run", "script.py", *options, "--set", "steps=16", "--resume")
    assert ended.status == 0, ended.err
    assert "SIGKILL" not in ended.out + ended.err
    rows = (command.folder / "out" / "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows if row.split(",")[2] == "loss"] == list(range(16))
