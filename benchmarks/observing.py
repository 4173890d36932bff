"""Measure what observing a run costs: samples of the host, a tracker, and an open live page.

    python -m benchmarks.observing            about six minutes
    python -m benchmarks.observing --quick    a smoke test

One process trains with steps of 15 to 30 ms, in blocks that alternate:

    off       without samples of the host
    default   as every run: with samples of the host every two seconds
    all       and with a tracker (TensorBoard's files), and the live page, whose numbers are fetched once a second

The processes of the tracker and of the page are stopped (SIGSTOP) in the other blocks. The figure is the median over
rounds of the ratio of the mean steps of neighboring blocks. On a virtual machine its noise is larger than the cost, so
the processor time of each part follows: of the sampling thread, which is in the training process, and of the other
processes. What belongs to the step itself (the line of the timeline, the clock) is in all three; `benchmarks.watching`
measures it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.machine import parser, ratio, show
from benchmarks.tasks import mlp
from unisono.config import MachineSettings, Settings
from unisono.distributed.init import join_process_group
from unisono.environment import World
from unisono.machine.sampler import SampledRun, Sampler
from unisono.machine.sampling_thread import SamplingThread
from unisono.testing import build_run
from unisono.train.run import Run

WIDTH, DEPTH, BATCH = 1536, 16, 24
EVERY = 2.0
ARMS = ("off", "default", "all")

VIEWER = """
import sys, time, urllib.request
address = sys.stdin.readline().strip()
while True:
    time.sleep(1.0)
    urllib.request.urlopen(address, timeout=20).read()
"""


def steps(run: Run[Settings], block: int) -> Iterator[None]:
    """Train. Each `next` makes a block of steps."""
    data = TensorDataset(torch.randn(block * BATCH, WIDTH), torch.randn(block * BATCH, WIDTH))
    model = run.place(lambda: mlp(*[WIDTH] * (DEPTH + 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(F.mse_loss(model(x), y, reduction="sum"), weight=len(x))
        step.update(optimizer)
        if (step.number + 1) % block == 0:
            yield


@contextmanager
def observers(folder: Path) -> Iterator[list[int]]:
    """Run a tracker's process, the server of the live page and a viewer, stopped. Yield their process ids."""
    piped: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    follower = ["-m", "unisono.train.tracking.follower", str(folder), str(folder / "timeline/rank-0.jsonl")]
    started: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for words in ([*follower, "tensorboard"], ["-m", "unisono", "watch", str(folder)], ["-c", VIEWER]):
            process = subprocess.Popen([sys.executable, "-u", *words], **piped)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        _, page, viewer = started
        assert page.stdout is not None
        assert viewer.stdin is not None
        address = next(word for line in page.stdout for word in line.split() if word.startswith("http"))
        viewer.stdin.write(address.replace("/?", "/data?") + "\n")
        viewer.stdin.flush()
        time.sleep(5.0)  # the tracker's library is loaded
        yield [process.pid for process in started]


def send(processes: Sequence[int], number: int) -> None:
    """Send a signal to processes."""
    for pid in processes:
        os.kill(pid, number)


class Cost(NamedTuple):
    """The cost of observing.

    Attributes:
        seconds: The mean seconds of a step in each block, by arm.
        cores: The cores that the other processes use in the arm "all": tracker, page, viewer.
        sample: Seconds of a sample of the host, the median.
    """

    seconds: dict[str, list[float]]
    cores: list[float]
    sample: float


def running(processes: Sequence[int]) -> list[float]:
    """Return the seconds of processor time of processes."""
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in processes]


def seconds_of_a_sample(sampled: SampledRun) -> float:
    """Return the median seconds of a sample of the host."""
    sampler, seconds = Sampler(sampled, print), list[float]()
    for _ in range(20):
        time.sleep(0.1)  # caches are as cold as in a run
        began = time.perf_counter()
        sampler.sample()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def measure(rounds: int, block: int) -> Cost:
    """Train in alternating blocks."""
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as place, join_process_group(World()) as group:
        folder, world = Path(place), World()
        settings = Settings(
            epochs=len(ARMS) * rounds + 1, batch=BATCH, virtual_ranks=1, machine=MachineSettings(every=0.0)
        )
        training = steps(build_run(settings, world, group, folder), block)
        next(training)
        sampled = SampledRun(run_dir=folder, host=world.host, rank=0, ranks=1, threads=1, every=EVERY)
        with observers(folder) as processes:
            send(processes, signal.SIGSTOP)
            before = running(processes)
            for number in range(rounds):
                for name in reversed(ARMS) if number % 2 else ARMS:
                    thread = SamplingThread(sampled, print)
                    if name != "off":
                        thread.start(first=True)
                    send(processes, signal.SIGCONT if name == "all" else signal.SIGSTOP)
                    began = time.perf_counter()
                    next(training)
                    seconds[name].append((time.perf_counter() - began) / block)
                    send(processes, signal.SIGSTOP)
                    if name != "off":
                        thread.close(over=False)
            spent = [after - first for after, first in zip(running(processes), before, strict=True)]
        del training
        sample = seconds_of_a_sample(sampled)
    return Cost(seconds, [each / (block * sum(seconds["all"])) for each in spent], sample)


def main() -> None:
    """Alternate the blocks, and print the ratios."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--rounds", type=int, default=30)
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    rounds, block = (2, 10) if options.quick else (options.rounds, 120)
    cost = measure(rounds, block)
    seconds = cost.seconds
    figures: dict[str, Any] = {
        "ms": {name: 1000 * median(column) for name, column in seconds.items()},
        "ratio": {name: ratio(column, seconds["off"]) for name, column in seconds.items()},
        "cores": dict(zip(("tracker", "page", "viewer"), cost.cores, strict=True)),
        "sample_ms": 1000 * cost.sample,
    }

    def table() -> str:
        rows = [f"{name:8} {figures['ms'][name]:7.2f} ms  {figures['ratio'][name]:.4f}" for name in ARMS]
        head = f"a step, and its ratio to off, median (quartiles) of {rounds} rounds of blocks of {block} steps"
        rows.append(f"a sample of the host takes {figures['sample_ms']:.2f} ms: {cost.sample / EVERY:.3%} of the time")
        rows += [f"the {name} uses {100 * cores:.2f} % of a core" for name, cores in figures["cores"].items()]
        return "\n".join([head, *rows])

    show("observing", figures, table, as_json=options.json)


if __name__ == "__main__":
    main()
