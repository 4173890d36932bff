"""Measure what observing a run costs: samples of the host, a tracker, and an open live page.

    python -m benchmarks.observing            about four minutes
    python -m benchmarks.observing --quick    a smoke test

One process trains for steps of about 30 ms on a machine with two cores or more, in runs that alternate:

    off       without samples of the host (machine.every=0)
    default   as every run: timeline, samples of the host
    all       and with a tracker (TensorBoard's files), and the live page, whose numbers are fetched once a second

The figure is the median over rounds of the ratio of the median steps. What belongs to the step itself (the line of the
timeline, the clock) is in all three; `benchmarks.watching` measures it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import parser, ratio, show
from unisono.monitor import timeline

SCRIPT = Path(__file__).parent / "findings" / "planted.py"
TASK = ["width=1024", "depth=8", "batch=48", "virtual_ranks=1"]
ARMS = {"off": ["machine.every=0"], "default": [], "all": ["track=tensorboard"]}


def step_seconds(folder: Path, sets: list[str], steps: int, *, page: bool) -> float:
    """Return the median seconds of a step of a run."""
    words = [sys.executable, "-m", "unisono", "run", str(SCRIPT), "--run-dir", str(folder), *["--watch"] * page]
    for value in [*TASK, f"steps={steps}", *sets]:
        words += ["--set", value]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    over = threading.Event()
    if page:
        threading.Thread(target=view, args=(process, over), daemon=True).start()
        process.wait()
        over.set()
    else:
        process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed")
    lines = [line for line in timeline.read(folder / "timeline" / "rank-0.jsonl") if "seconds" in line]
    return median(sum(line["seconds"].values()) for line in lines[5:])


def view(process: subprocess.Popen[str], over: threading.Event) -> None:
    """Fetch the numbers of the live page once a second, like an open page."""
    assert process.stderr is not None
    address = next((found[0] for line in process.stderr if (found := re.findall(r"http://\S+", line))), "")
    data = address.replace("/?", "/data?")
    while not over.wait(1.0):
        try:
            urllib.request.urlopen(data, timeout=5).read()
        except OSError:
            return


def main() -> None:
    """Alternate the runs, and print the ratios."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--rounds", type=int, default=4)
    options = options_parser.parse_args()
    rounds, steps = (2, 20) if options.quick else (options.rounds, 300)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds):
            for name in reversed(ARMS) if number % 2 else ARMS:
                folder = Path(place) / f"{name}-{number}"
                seconds[name].append(step_seconds(folder, ARMS[name], steps, page=name == "all"))
    figures: dict[str, Any] = {
        "ms": {name: 1000 * median(column) for name, column in seconds.items()},
        "ratio": {name: ratio(column, seconds["off"]) for name, column in seconds.items()},
    }

    def table() -> str:
        rows = [f"{name:8} {figures['ms'][name]:7.2f} ms  {figures['ratio'][name]:.3f}" for name in ARMS]
        return f"a step, and its ratio to off, median (quartiles) of {rounds} rounds of {steps} steps\n" + "\n".join(
            rows
        )

    show("observing", figures, table, as_json=options.json)


if __name__ == "__main__":
    main()
