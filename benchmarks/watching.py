"""What it costs that a run is looked after: heartbeats, the stuck watch and the divergence watch, all of them together.

    python -m benchmarks.watching            two to three minutes
    python -m benchmarks.watching --quick    a smoke test

Two processes with a meeting place train a model whose step takes some 30 ms, in turns of 100 steps: with everything
that looks after a run, and with nothing of it. On is what a run under `unisono run` has by default:

    in every process      thread "membership", a heartbeat a second to the rendezvous server   distributed/membership
                          thread "watch", the status of the main thread, each second         monitor/status_thread.py
                          a count of progress; the loss is observed, for spikes              monitor/loss_spikes.py
                          a comparison of weights and gradients, now and then                train/diagnostics
    beside them           the rendezvous server; the launcher's hang watcher, twice a second  launcher

First the ratio of whole turns, with / without, in seconds of the slower process, and in processor time of both with all
their threads, which counts nothing that others do on the machine. In a turn there is one comparison, ten times as many
as by default (divergence.every=1000), so both are more than what is asked for.

Then each part alone, of a step of 30 ms: threads and processes by their own clocks, lines by counting. The comparison
is that of a GPT of 10.7 million parameters (43 MB), the median, of the slower process. What is not turned off for a
turn, since it is always there (the count, the look for spikes), is in this sum only.
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
from contextlib import contextmanager
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
"""What a part of a step is given of: the target is 1 % of it, for all together."""
CHANGES = 12
"""Changes of phase in a step, about."""
GPT_WARM_UP = 2


class Threads:
    """The watching threads of one process, turned on and off, and what they used while they were on (seconds)."""

    def __init__(self, world: World, membership: Membership, place: Path) -> None:
        self.world, self.membership, self.place = world, membership, place
        self.used = {"heartbeat": 0.0, "watch": 0.0}
        membership._stopped.set()  # the heartbeat that it has begun with ends

    @contextmanager
    def on(self) -> Iterator[None]:
        with StatusThread(WatchdogSettings(), self.world) as watch:
            self.membership._stopped.clear()
            beat = threading.Thread(target=self.membership._send_heartbeats, name="membership", daemon=True)
            beat.start()
            clocks = {"heartbeat": clock_of(beat), "watch": clock_of(watch._thread)}
            yield
            for name, clock in clocks.items():
                self.used[name] += time.clock_gettime(clock)
            self.membership._stopped.set()
            beat.join()
        self.place.unlink(missing_ok=True)  # so the lookout has nothing to read


def clock_of(thread: threading.Thread | None) -> int:
    """Of the processor time that it uses."""
    assert thread is not None
    assert thread.ident is not None
    return time.pthread_getcpuclockid(thread.ident)


def seconds_of(thread: str) -> float:
    """Of processor time, of another process's thread by its folder in /proc: nanoseconds in its schedstat."""
    return int(Path("/proc", thread, "schedstat").read_text().split()[0]) / 1e9


def turns(
    world: World, pairs: int, steps: int, width: int, folder: str, door: str, beside: dict[str, str]
) -> dict[str, Any]:
    """Of each turn its seconds and its processor time; and what our threads, and those `beside` us, used when on."""
    told = Path(folder) / f"rank-{world.rank}.json"
    failure_record.write_to(told)
    world = replace(world, store=f"{SCHEME}{door}")
    watched = DivergenceSettings(every=steps)
    config = Settings(steps=(2 * pairs + 1) * steps, batch=64, virtual_ranks=2, divergence=watched)
    data = torch.utils.data.TensorDataset(torch.randn(4096, width), torch.randint(0, 10, (4096,)))
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    lived, used = 0.0, dict.fromkeys(beside, 0.0)
    with join(world) as group:
        membership = membership_of(group)
        assert membership is not None
        run = build_run(config, world, group, Path(folder) / "run")
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
        model = run.place(lambda: nn.Sequential(*layers, nn.Linear(width, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        threads = Threads(world, membership, told.with_suffix(".status"))
        left, divergence = iter(run.steps(data)), extension_of(run, DivergenceCheck)
        assert divergence is not None
        for turn in range(-1, 2 * pairs):  # the first is to warm up; then on, off, off, on, on, off, ...
            on = turn >= 0 and (turn + 1) // 2 % 2 == 0
            divergence.every = steps if on else 0
            with threads.on() if on else nothing():
                group.barrier()
                before = {name: seconds_of(thread) for name, thread in beside.items()}
                began, worked = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    step = next(left)
                    step.run(model, loss)
                    step.update(optimizer)
                group.barrier()
                took = time.perf_counter() - began, time.process_time() - worked
                lived += on * took[0]
                used = {name: used[name] + on * (seconds_of(beside[name]) - then) for name, then in before.items()}
            if turn >= 0:
                found["with" if on else "without"].append(took)
        divergence.every = steps
        list(left)
        close_run(run)
    return {**found, "lived": lived, "used": {**threads.used, **used}}


@contextmanager
def nothing() -> Iterator[None]:
    yield


def loss(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)


def timed(function: Callable[..., Any], seconds: list[float], meet: Callable[[], None] | None = None) -> Any:
    """The function, which notes how long it takes; after all have met, if they must."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if meet is not None:
            meet()
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    return call


def comparisons(world: World, steps: int, folder: str) -> list[float]:
    """Seconds of each comparison of what two processes hold: the number of all gradients, then that of all weights, and
    the message."""
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


def lines() -> dict[str, float]:
    """Seconds in a step of what is always there."""
    line = min(timeit.repeat("Here.moves += 1", "from unisono.phases import Here", number=100_000, repeat=5)) / 100_000
    begin = min(timeit.repeat("f(3)", "from unisono.phases import begin_step as f", number=100_000, repeat=5)) / 100_000
    phases.Position.steps = 0
    spikes = LossSpikes()
    hears = [2.0 + number % 7 for number in range(20_000)]
    look = min(timeit.repeat(lambda: [spikes.observe(each) for each in hears], number=1, repeat=3)) / len(hears)
    return {"counting": CHANGES * line + begin, "a look for spikes": look}


def measure(pairs: int, steps: int, width: int, compared: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        door, survival = Path(folder) / "door", ElasticLauncher(1, build=lambda *_: None)  # type: ignore[arg-type]
        with survival.open(door, 2, [sys.executable, "-u", "-P"]), HangWatcher(Path(folder)) as lookout:
            assert survival.server is not None
            beside = {
                "meeting place": f"{survival.server.pid}",
                "lookout": f"{os.getpid()}/task/{lookout._thread.native_id}",
            }
            found = run_ranks(turns, 2, pairs, steps, width, folder, str(door), beside, seconds=900)
        digests = run_ranks(comparisons, 2, compared, f"{folder}/gpt", seconds=550)
    both = {name: list(zip(found[0][name], found[1][name], strict=True)) for name in ("with", "without")}
    seconds = {name: [max(a[0], b[0]) for a, b in rows] for name, rows in both.items()}
    work = {name: [a[1] + b[1] for a, b in rows] for name, rows in both.items()}
    lived = found[0]["lived"]
    used = {name: max(rank["used"][name] for rank in found) / lived for name in found[0]["used"]}
    comparison = statistics.median(max(pair) for pair in zip(*digests, strict=True))
    shares = {
        **used,
        **{name: each / STEP_SECONDS for name, each in lines().items()},
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
    "heartbeat": "of a core: a process's thread",
    "watch": "of a core: a process's thread",
    "meeting place": "of a core: a process of its own, for both",
    "lookout": "of a core: the launcher's thread, for both",
    "counting": "of a step",
    "a look for spikes": "of a step, on the main process",
}


def table(of: dict[str, Any]) -> str:
    shown = {name: "{median:.4f} ({low:.4f} to {high:.4f})".format(**of[name]) for name in ("seconds", "work")}
    about = {**ABOUT, "comparison": f"of a step: {of['comparison_ms']:.2f} ms, every {EVERY} steps"}
    return "\n".join(
        [
            f"a step takes {of['step_seconds'] * 1e3:.1f} ms",
            f"all on over all off, in {of['pairs']} pairs of turns of {of['steps']} steps:",
            f"  seconds         {shown['seconds']}",
            f"  processor time  {shown['work']}",
            f"each part, where a step takes {STEP_SECONDS * 1e3:.0f} ms:",
            *(f"  {name:18}{share:8.4%} {about[name]}" for name, share in of["shares"].items()),
            f"  {'together':18}{of['together']:8.4%}",
        ]
    )


def main() -> None:
    asked = parser(__doc__).parse_args()
    figures = measure(*(2, 5, 64, 3) if asked.quick else (12, 100, 640, 40))
    show("watching", figures, lambda: table(figures), as_json=asked.json)


if __name__ == "__main__":
    main()
