"""Measure the report of a very long run: seconds and memory to write it, its size, and how a browser shows it.

    python -m benchmarks.report_size --ranks 64 --steps 1000000

The timelines are those of a simulated clock, written by the class that training uses. Writing them takes about 10 s for
1,000,000 steps; so only `--distinct` ranks (4) are simulated, and the files of the others are links to these.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.monitor.timeline import Timeline

BEGAN = 1_790_000_000.0
MEAN_SECONDS = {"data": 0.004, "forward": 0.05, "backward": 0.098, "exchange": 0.016, "update": 0.006, "other": 0.001}


class Clock:
    """A clock that a simulation sets."""

    def __init__(self) -> None:
        self.time = BEGAN

    def __call__(self) -> float:
        return self.time


def write_run(folder: Path, ranks: int, steps: int, *, distinct: int = 4, seed: int = 0) -> Path:
    """Write the directory of a simulated run, and return it: one rank is slow, one dies and is replaced."""
    (folder / "log").mkdir(parents=True)
    for rank in range(ranks):
        timeline = folder / "timeline" / f"rank-{rank}.jsonl"
        if rank < distinct:
            write_timeline(timeline, rank, ranks, steps, random.Random(seed + rank))
        else:
            for suffix in (".jsonl", ".blocks"):
                origin = folder / "timeline" / f"rank-{1 + rank % max(1, distinct - 1)}{suffix}"
                if origin.exists():
                    os.link(origin, timeline.with_suffix(suffix))
        (folder / "log" / f"rank-{rank}.log").write_text(f"rank {rank} of a simulated run\n" * 50)
    seconds = steps * sum(MEAN_SECONDS.values())
    for host in range(max(1, ranks // 8)):
        write_samples(folder, f"node{host}", list(range(ranks))[8 * host : 8 * host + 8], seconds)
    result = {
        "loss": 1.9, "steps": steps, "samples": 64 * steps, "seconds": seconds, "samples_per_second": 366.0,
        "ranks": ranks, "virtual_ranks": 2 * ranks, "promise": "exact", "reason": "one fixed tree adds the gradients",
        "survival": "survivors", "weights_sha256": "5eb6f7" * 10 + "0123", "stopped": False,
        "deaths": [{"step": int(0.4 * steps), "ranks": [ranks - 1]}],
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    command = f"unisono run train.py --ranks {ranks} --set steps={steps}"
    (folder / "environment.json").write_text(json.dumps({"command": command, "torch": "2.13.0", "host": "node0"}))
    (folder / "settings.toml").write_text(f'steps = {steps} # --set\nlr = 0.1 # script\nprecision = "fp32" # default\n')
    return folder


def write_timeline(path: Path, rank: int, ranks: int, steps: int, draw: random.Random) -> None:
    """Write the timeline of a rank."""
    clock = Clock()
    timeline = Timeline(path, now=clock)
    start = {"host": f"node{rank // 8}", "pid": 1, "device": "cpu", "ranks": ranks, "total": steps}
    timeline.event({"event": "start", "step": 0, **start})
    timeline.event({"event": "assignment", "step": 0, "virtual_ranks": [2 * rank, 2 * rank + 2]})
    save, slow = max(1, steps // 20), 1.25 if rank == 1 else 1.0
    for step in range(steps):
        seconds = {name: mean * slow * (0.85 + 0.3 * draw.random()) for name, mean in MEAN_SECONDS.items()}
        wait = 0.5 * seconds["exchange"] if rank == 1 else 0.9 * seconds["exchange"] + 0.02
        seconds["exchange"] += 0.0 if rank == 1 else 0.02
        more, log = values(step, steps, draw) if rank == 0 else ({}, None)
        loss = 1.8 + 4 * math.exp(-12 * step / steps) + 0.15 * draw.random()
        seconds |= {"evaluate": 0.1} if log else {}
        seconds |= {"checkpoint": 0.08} if step and step % save == 0 else {}
        clock.time += sum(seconds.values())
        timeline.step(step, seconds, loss, log, wait=wait, cpu=sum(seconds.values()) - wait, more=more)
        if step and step % save == 0 and rank == 0:
            timeline.event({"checkpoint": step})
        for event in events(step, steps, rank, ranks):
            timeline.event({**event, "step": step})
    timeline.close()


def values(step: int, steps: int, draw: random.Random) -> tuple[dict[str, float], dict[str, float] | None]:
    """Return what the main process writes for a step, and what the loop has logged."""
    progress, warm = step / steps, min(1.0, step / (0.05 * steps + 1))
    more = {
        "samples": 64.0,
        "weight": 8192.0 + (step % 7),
        "lr": 0.1 * warm * 0.5 * (1 + math.cos(math.pi * progress)),
        "grad_norm": 0.5 + 4.0 * math.exp(-20 * progress) * draw.random() + 0.2 * draw.random(),
    }
    if step % max(1, steps // 40):
        return more, None
    return more, {"accuracy": 1 - 0.9 * math.exp(-4 * progress), "bits_per_byte": 1 + 2 * math.exp(-3 * progress)}


def events(step: int, steps: int, rank: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the events after a step: a death at 40 %, a replacement at 45 %, a spike at 70 % of the steps."""
    last, death = ranks - 1, int(0.4 * steps)
    own = [2 * rank, 2 * rank + 2]
    if step == death:
        yield {"event": "death", "ranks": [last]}
        yield {"event": "assignment", "virtual_ranks": [own[0], own[1] + 2 * (rank == last - 1)]}
    if step == death + steps // 20:
        yield {"event": "join", "ranks": [last]}
        yield {"event": "assignment", "virtual_ranks": own}
    if step == int(0.7 * steps) and rank == 0:
        yield {"event": "spike", "loss": 7.1, "typical": 1.9}


def write_samples(folder: Path, host: str, ranks: list[int], seconds: float, count: int = 600) -> None:
    """Write the samples of a host, in the format of `timeline/host-NAME.jsonl`."""
    draw = random.Random(host)
    devices = [{"index": i, "name": "Simulated", "memory": 80e9, "watts": 700} for i in range(min(2, len(ranks)))]
    facts = {
        "host": host,
        "every": 2.0,
        "cores": 16,
        "ranks": len(ranks),
        "memory": {"total": 64e9},
        "devices": devices,
    }
    lines = [json.dumps({"t": BEGAN, "start": facts})]
    for i in range(count):
        processes = {
            rank: {"cpu": 0.9 + 0.2 * draw.random(), "resident": 2.1e9 + rank * 1e8 + 3e5 * i, "threads": 9}
            for rank in ranks
        }
        usage = [{"index": each["index"], "memory": 61e9, "watts": draw.uniform(420, 620)} for each in devices]
        for each in usage:
            each |= {"utilization": draw.uniform(0.7, 1.0), "celsius": draw.uniform(62, 71)}
        sample = {
            "t": BEGAN + seconds * (i + 1) / count,
            "cpu": draw.uniform(0.5, 0.7),
            "cores": {"runnable": 3, "iowait": draw.uniform(0.0, 0.01), "celsius": draw.uniform(55, 60)},
            "memory": {"available": 50e9 - 4e6 * i},
            "pressure": {"cpu": 0.02, "memory": 0.0, "io": 0.01},
            "network": {"lo": {"sent": 1}, "eth0": {"sent": draw.uniform(0, 3e7), "received": draw.uniform(0, 3e7)}},
            "disk": {"sda": {"read": draw.uniform(0, 2e6), "written": 16384, "busy": 0.002}},
            "processes": processes,
            "devices": usage,
            "energy": {"rapl:package-0": {"joules": 60.0 * i, "counter": 1.0, "watts": draw.uniform(60, 90)}},
        }
        lines.append(json.dumps(sample))
    (folder / "timeline" / f"host-{host}.jsonl").write_text("\n".join(lines) + "\n")


WRITE = """
import resource, sys, time
from pathlib import Path
from unisono.report.report_page import write_report
began = time.perf_counter()
path = write_report(Path(sys.argv[1]))
seconds = time.perf_counter() - began
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(f"{seconds:.1f} s, {memory:.2f} GB, page {path.stat().st_size / 1e3:.0f} kB: {path}")
"""


ZOOM = """async () => {
  const whole = extent(), frames = 90, began = performance.now();
  for (let i = 0; i < frames; i++) {
    const all = whole[1] - whole[0], low = whole[0] + i * all / 1000;
    const span = all * (0.05 + 0.9 * Math.abs(Math.cos(i / 15)));
    setView([low, low + span]);
    await new Promise((next) => requestAnimationFrame(next));
  }
  return 1000 * frames / (performance.now() - began);
}"""
"""Zoom all charts that are visible once in each frame, and return the frames in a second."""


def show_page(page: Path) -> str:
    """Open a page in chromium, and return how long that took and how quickly it zooms."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "browser: playwright is not installed"
    if (chromium := shutil.which("chromium")) is None:
        return "browser: chromium is not installed"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1300, "height": 900})
        began = time.perf_counter()
        tab.goto(page.as_uri())
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        opened = time.perf_counter() - began
        frames = tab.evaluate(ZOOM)
        browser.close()
    return f"browser: opened in {opened:.2f} s, zooms at {frames:.0f} frames a second"


def main() -> None:
    """Write a run and its report, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--distinct", type=int, default=4, help="ranks that are simulated; others are links to these")
    parser.add_argument("--out", type=Path, help="keep the run directory there")
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="report-"))
    began = time.perf_counter()
    run = write_run(folder / "simulated", given.ranks, given.steps, distinct=min(given.distinct, given.ranks))
    size = sum(path.stat().st_size for path in (run / "timeline").iterdir())
    seconds = time.perf_counter() - began
    print(f"{given.ranks} ranks, {given.steps} steps, timelines of {size / 1e9:.2f} GB in {seconds:.0f} s", flush=True)
    subprocess.run([sys.executable, "-c", WRITE, str(run)], check=True)
    print(show_page(run / "report.html"))
    if given.out is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
