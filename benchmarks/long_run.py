"""Measure the report of a long run: 1,000,000 steps on 64 ranks, made by a generator of timelines.

    python -m benchmarks.long_run            about three minutes, 2 GB of disk
    python -m benchmarks.long_run --quick    a smoke test

Timelines are written by the class that writes them in training, with a clock of their own. Eight ranks have content of
their own. The others share the lines of one of them, and have a copy of its blocks, which the report reads. One rank is
slow in the second half, and the loss has a spike.

Figures: bytes of a rank on disk, seconds and peak memory of making the numbers of the report (in a process of its own),
and their size as JSON.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import parser, show
from unisono.monitor.timeline import Timeline

DISTINCT = 8
"""Ranks whose content is generated; the others copy it."""
STEP_SECONDS = 0.3
SLOW_RANK = 5


def generate(folder: Path, ranks: int, steps: int) -> None:
    """Write the files of a run."""
    (folder / "timeline").mkdir(parents=True)
    for rank in range(min(DISTINCT, ranks)):
        write_rank(folder / "timeline" / f"rank-{rank}.jsonl", rank, ranks, steps)
    for rank in range(DISTINCT, ranks):
        source = folder / "timeline" / f"rank-{1 + rank % (DISTINCT - 1)}"
        os.link(source.with_suffix(".jsonl"), folder / "timeline" / f"rank-{rank}.jsonl")
        shutil.copyfile(source.with_suffix(".blocks"), folder / "timeline" / f"rank-{rank}.blocks")
    (folder / "settings.toml").write_text(f"batch = 1024\nvirtual_ranks = {ranks}\n")
    (folder / "result.json").write_text(json.dumps({"steps": steps, "promise": "exact", "ranks": ranks}))


def write_rank(path: Path, rank: int, ranks: int, steps: int) -> None:
    """Write the timeline of a rank."""
    draw, now = random.Random(rank).random, 1.7e9
    clock = [now]
    line = Timeline(path, now=lambda: clock[0])
    line.event({"event": "start", "step": 0, "host": f"node{rank // 8}", "pid": 1, "device": "cuda:0", "ranks": ranks})
    line.event({"event": "assignment", "step": 0, "virtual_ranks": [rank, rank + 1]})
    for step in range(steps):
        slow = 1.3 if rank == SLOW_RANK and step > steps // 2 else 1.0
        forward, backward = 0.08 * slow * (1 + 0.1 * draw()), 0.16 * slow * (1 + 0.1 * draw())
        wait = max(0.0, STEP_SECONDS - forward - backward - 0.01)
        spent = {"other": 0.001, "data": 0.002, "forward": forward, "backward": backward, "exchange": wait + 0.004}
        spent["update"] = 0.003
        if step % 10_000 == 9_999:
            spent["checkpoint"] = 2.0
            line.event({"checkpoint": step + 1})
        loss = 2.0 + 8.0 / math.sqrt(1 + step / 100) + 0.1 * draw() + (30.0 if step == steps // 3 else 0.0)
        clock[0] += sum(spent.values())
        more = {"samples": 1024, "lr": 3e-4 * (1 - step / steps), "grad_norm": 1.0 + draw()} if rank == 0 else {}
        line.step(step, spent, loss, wait=wait, cpu=forward + backward, more=more)
    line.close()


READ = """
import json, resource, sys, time
from pathlib import Path
began = time.perf_counter()
from unisono.report.report_data import report_data
from unisono.report.run_files import RunFiles
files = RunFiles(Path(sys.argv[1]))
files.read()
data = report_data(files)
text = json.dumps(data)
found = max(data["values"]["loss"]["high"])
print(json.dumps({
    "seconds": time.perf_counter() - began,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "json": len(text),
    "spike": found,
    "steps": int(sum(row["steps"] for row in data["table"]) / len(data["table"])),
    "findings": [finding["kind"] for finding in data["findings"]],
}))
"""


def main() -> None:
    """Generate the run, and measure."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--ranks", type=int, default=64)
    options_parser.add_argument("--steps", type=int, default=1_000_000)
    options_parser.add_argument("--keep", type=Path, help="the run directory to write and keep")
    options = options_parser.parse_args()
    if options.quick:
        options.ranks, options.steps = 9, 10_000
    with tempfile.TemporaryDirectory() as place:
        folder = options.keep or Path(place) / "run"
        began = time.perf_counter()
        generate(folder, options.ranks, options.steps)
        generated = time.perf_counter() - began
        done = subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True, check=True)
        figures = json.loads(done.stdout)
        sizes = [sum(f.stat().st_size for f in (folder / "timeline").glob(f"rank-{rank}.*")) for rank in (0, 1)]
    figures |= {"rank_0_bytes": sizes[0], "rank_1_bytes": sizes[1], "generated": generated}

    def table() -> str:
        return (
            f"{options.steps:,} steps on {options.ranks} ranks, generated in {generated:.0f} s\n"
            f"on disk           {sizes[0] / 1e6:.0f} MB rank 0, {sizes[1] / 1e6:.0f} MB each other rank\n"
            f"numbers           {figures['seconds']:.1f} s, {figures['peak'] / 1e6:.0f} MB at the peak\n"
            f"as JSON           {figures['json'] / 1e3:.0f} kB; it has the spike of the loss: {figures['spike'] > 30}\n"
            f"findings          {figures['findings']}"
        )

    show("long_run", figures, table, as_json=options.json)


if __name__ == "__main__":
    main()
