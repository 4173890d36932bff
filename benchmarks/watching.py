"""Measure the cost of monitoring a run: heartbeats, hang detection and divergence checks.

    python -m benchmarks.watching            two to three minutes
    python -m benchmarks.watching --quick    a smoke test

Two processes with a rendezvous server train a model whose steps take about 30 ms. Blocks of 100 steps with and without
monitoring alternate. Monitoring is what a run under `unisono run` has by default:

    in every process      thread "membership", a heartbeat a second to the rendezvous server   distributed/membership
                          thread "watch", the status of the main thread, each second         monitor/status_thread.py
                          a count of progress; the loss is observed, for spikes              monitor/loss_spikes.py
                          a comparison of weights and gradients at times                   train/diagnostics
    in other processes    the rendezvous server; the launcher's hang watcher, twice a second  launcher

The first figure is the ratio of blocks with and without, in seconds of the slower process, and in processor time of
both processes with all threads, which excludes other load on the machine. Each block has one comparison, ten times as
many as by default (divergence.every=1000), so both ratios are upper bounds.

Then each part is measured on its own, relative to a step of 30 ms: threads and processes by their clocks, single lines
with timeit. The comparison is that of a GPT of 10.7 million parameters (43 MB): the median, of the slower process.
Parts that cannot be turned off (the count of progress, the check for loss spikes) are only in this sum.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.machine import parser, ratio, show
from benchmarks.tasks import TASKS, loss_of
from unisono import phases
from unisono.config import DivergenceSettings, Settings, WatchdogSettings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.membership.heartbeats import Heartbeats
from unisono.distributed.membership.membership import SCHEME, Membership, membership_of
from unisono.environment import World
from unisono.launcher import failure_record
from unisono.launcher.elastic_policy import ElasticLauncher
from unisono.launcher.hang_watcher import HangWatcher
from unisono.monitor.loss_spikes import LossSpikes
from unisono.monitor.status_thread import StatusThread
from unisono.testing import build_run, close_run, extension_of, run_ranks
from unisono.train.diagnostics.divergence import DivergenceCheck

EVERY = DivergenceSettings.every
STEP_SECONDS = 0.03
"""The step that shares refer to. The target is 1 % for all parts together."""
CHANGES = 12
"""Approximate number of phase changes in a step."""
GPT_WARM_UP = 2


class Threads:
    """Turns the monitoring threads of a process on and off, and sums up their processor time in seconds."""

    def __init__(self, world: World, membership: Membership, place: Path) -> None:
        self.world, self.membership, self.place = world, membership, place
        self.used = {"heartbeat": 0.0, "watch": 0.0}
        membership._heartbeats.stop()

    @contextmanager
    def on(self) -> Iterator[None]:
        with StatusThread(WatchdogSettings(), self.world) as watch:
            beats = Heartbeats(self.membership._send, self.membership._timeout)
            clocks = {"heartbeat": clock_of(beats.thread), "watch": clock_of(watch._thread)}
            yield
            for name, clock in clocks.items():
                self.used[name] += time.clock_gettime(clock)
            beats.stop()
            beats.thread.join()
        self.place.unlink(missing_ok=True)  # so the lookout has nothing to read


def clock_of(thread: threading.Thread | None) -> int:
    """Return the clock of a thread's processor time."""
    assert thread is not None
    assert thread.ident is not None
    return time.pthread_getcpuclockid(thread.ident)


def seconds_of(thread: str) -> float:
    """Return the processor time of a thread of any process, from its folder in /proc."""
    return int(Path("/proc", thread, "schedstat").read_text().split()[0]) / 1e9


def time_blocks(
    world: World, pairs: int, steps: int, width: int, folder: str, server: str, others: dict[str, str]
) -> dict[str, Any]:
    """Return seconds and processor time of each block, and the processor time of our and other threads while on."""
    record = Path(folder) / f"rank-{world.rank}.json"
    failure_record.write_to(record)
    world = replace(world, store=f"{SCHEME}{server}")
    divergence_settings = DivergenceSettings(every=steps)
    config = Settings(steps=(2 * pairs + 1) * steps, batch=64, virtual_ranks=2, divergence=divergence_settings)
    data = torch.utils.data.TensorDataset(torch.randn(4096, width), torch.randint(0, 10, (4096,)))
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    seconds_on, used = 0.0, dict.fromkeys(others, 0.0)
    with join(world) as group:
        membership = membership_of(group)
        assert membership is not None
        run = build_run(config, world, group, Path(folder) / "run")
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
        model = run.place(lambda: nn.Sequential(*layers, nn.Linear(width, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        threads = Threads(world, membership, record.with_suffix(".status"))
        left, divergence = iter(run.steps(data)), extension_of(run, DivergenceCheck)
        assert divergence is not None
        for turn in range(-1, 2 * pairs):  # a warm-up; then on, off, off, on, on, off, ...
            on = turn >= 0 and (turn + 1) // 2 % 2 == 0
            divergence.every = steps if on else 0
            with threads.on() if on else nullcontext():
                group.barrier()
                before = {name: seconds_of(thread) for name, thread in others.items()}
                start, worked = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    step = next(left)
                    step.run(model, loss)
                    step.update(optimizer)
                group.barrier()
                elapsed = time.perf_counter() - start, time.process_time() - worked
                seconds_on += on * elapsed[0]
                used = {name: used[name] + on * (seconds_of(others[name]) - then) for name, then in before.items()}
            if turn >= 0:
                found["with" if on else "without"].append(elapsed)
        divergence.every = steps
        list(left)
        close_run(run)
    return {**found, "seconds_on": seconds_on, "used": {**threads.used, **used}}


def loss(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)


def timed(function: Callable[..., Any], seconds: list[float], barrier: Callable[[], None] | None = None) -> Any:
    """Wrap a function to record its time, after a barrier if one is given."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if barrier is not None:
            barrier()
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


def comparisons(world: World, steps: int, folder: str) -> list[float]:
    """Return the seconds of each comparison of two processes: hashes of gradients and weights, and messages."""
    task = TASKS["GPT"]
    torch.manual_seed(1)
    gradients: list[float] = []
    weights: list[float] = []
    settings = Settings(steps=steps + GPT_WARM_UP, batch=2, virtual_ranks=2, divergence=DivergenceSettings(every=1))
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder))
        model = run.place(task.build)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        run.track(model=model, optimizer=optimizer)
        DivergenceCheck.before_update = timed(DivergenceCheck.before_update, gradients)  # type: ignore[method-assign]
        DivergenceCheck.compare = timed(DivergenceCheck.compare, weights, group.barrier)  # type: ignore[method-assign]
        left = run.steps(task.data(settings.batch * 8))
        for step in left:
            for x, y in step:
                step.backward(loss_of(model(x), y), weight=y.numel())
            step.update(optimizer)
        close_run(run)
    return [a + b for a, b in zip(gradients, weights, strict=False)][GPT_WARM_UP : GPT_WARM_UP + steps]


def time_lines() -> dict[str, float]:
    """Return the seconds per step of parts that are always on."""
    line = (
        min(timeit.repeat("position.moves += 1", "from unisono.phases import position", number=100_000, repeat=5))
        / 100_000
    )
    begin = min(timeit.repeat("f(3)", "from unisono.phases import begin_step as f", number=100_000, repeat=5)) / 100_000
    phases.position.steps = 0
    spikes = LossSpikes()
    losses = [2.0 + number % 7 for number in range(20_000)]
    spike_check = min(timeit.repeat(lambda: [spikes.observe(loss) for loss in losses], number=1, repeat=3)) / len(
        losses
    )
    return {"counting": CHANGES * line + begin, "loss spikes": spike_check}


def measure(pairs: int, steps: int, width: int, compared: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        socket, launcher = Path(folder) / "door", ElasticLauncher(1, build=lambda *_: None)  # type: ignore[arg-type]
        with launcher.open(socket, 2, [sys.executable, "-u", "-P"]), HangWatcher(Path(folder)) as hang_watcher:
            assert launcher.server is not None
            others = {
                "rendezvous": f"{launcher.server.pid}",
                "hang watcher": f"{os.getpid()}/task/{hang_watcher._thread.native_id}",
            }
            found = run_ranks(time_blocks, 2, pairs, steps, width, folder, str(socket), others, seconds=900)
        compare_seconds = run_ranks(comparisons, 2, compared, f"{folder}/gpt", seconds=550)
    both = {name: list(zip(found[0][name], found[1][name], strict=True)) for name in ("with", "without")}
    seconds = {name: [max(a[0], b[0]) for a, b in rows] for name, rows in both.items()}
    work = {name: [a[1] + b[1] for a, b in rows] for name, rows in both.items()}
    seconds_on = found[0]["seconds_on"]
    used = {name: max(rank["used"][name] for rank in found) / seconds_on for name in found[0]["used"]}
    comparison = statistics.median(max(pair) for pair in zip(*compare_seconds, strict=True))
    shares = {
        **used,
        **{name: each / STEP_SECONDS for name, each in time_lines().items()},
        "comparison": comparison / EVERY / STEP_SECONDS,
    }
    return {
        "pairs": pairs,
        "steps": steps,
        "step_seconds": statistics.median(seconds["without"]) / steps,
        "seconds": ratio(seconds["with"], seconds["without"])._asdict(),
        "work": ratio(work["with"], work["without"])._asdict(),
        "comparison_ms": 1e3 * comparison,
        "shares": shares,
        "together": sum(shares.values()),
    }


ABOUT = {
    "heartbeat": "of a core: a thread in each process",
    "watch": "of a core: a thread in each process",
    "rendezvous": "of a core: a process, for both",
    "hang watcher": "of a core: a thread of the launcher, for both",
    "counting": "of a step",
    "loss spikes": "of a step, on rank 0",
}


def table(of: dict[str, Any]) -> str:
    shown = {name: "{median:.4f} ({low:.4f} to {high:.4f})".format(**of[name]) for name in ("seconds", "work")}
    about = {**ABOUT, "comparison": f"of a step: {of['comparison_ms']:.2f} ms, every {EVERY} steps"}
    return "\n".join(
        [
            f"a step takes {of['step_seconds'] * 1e3:.1f} ms",
            f"all on over all off, in {of['pairs']} pairs of blocks of {of['steps']} steps:",
            f"  seconds         {shown['seconds']}",
            f"  processor time  {shown['work']}",
            f"each part, for a step of {STEP_SECONDS * 1e3:.0f} ms:",
            *(f"  {name:18}{share:8.4%} {about[name]}" for name, share in of["shares"].items()),
            f"  {'together':18}{of['together']:8.4%}",
        ]
    )


def main() -> None:
    args = parser(__doc__).parse_args()
    figures = measure(*(2, 5, 64, 3) if args.quick else (12, 100, 640, 40))
    show("watching", figures, lambda: table(figures), as_json=args.json)


if __name__ == "__main__":
    main()
