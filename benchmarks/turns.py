"""Loops that take turns, step by step, in the same two processes: what exchange.py and shards.py have in common.

All have one torch thread, the same samples in the same micro-batches, the same AdamW. Ours is the public loop, with
everything that a run does between two steps (timeline, progress). It also refuses gradients that are not finite and
knows its loss, for which a loop by hand does nothing.

A step takes as long as its slower process. The figure is the median, over steps, of ours / by hand in the same turn,
with quartiles; every round starts new processes, and makes the loops in another order. "work" is the same for processor
time, of both processes and all their threads: it counts nothing that others did on the machine in the meantime, and no
waiting. At the end the sets of weights must agree, and the norms of their first gradients.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.machine import parser, ratio, show, spread
from benchmarks.tasks import TASKS, Task, loss_of
from unisono.config import Settings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.plan.assignment import assign_evenly
from unisono.plan.batch_order import BatchOrder
from unisono.testing import SlowAt, build_run, run_ranks

PROCESSES = 2
WARM_UP = 2
"""Steps that are not counted: the first allocates, and DistributedDataParallel rebuilds its buckets after it."""

WIDTH = 26
"""Of a column of the table."""


class Turn(NamedTuple):
    """What a loop yields after each step: the model, and in the first step its gradient's 2-norm (then 0)."""

    model: nn.Module
    norm: float = 0.0


class Course(NamedTuple):
    """Where a loop runs: what all of a race have in common."""

    settings: Settings
    order: BatchOrder
    world: World
    group: ProcessGroup
    model: nn.Module
    data: Dataset[Any]
    folder: Path

    def steps(self) -> Iterator[Iterator[tuple[int, Any]]]:
        """For a loop by hand: step by step, (how many follow, batch) of this process's micro-batches."""
        order = self.order
        span = assign_evenly(order.virtual_ranks, self.group.size)[self.group.rank]
        steps = [[samples for _, samples in order.places(step, span)] for step in range(order.steps_per_epoch)]
        batches = iter(DataLoader(self.data, batch_sampler=list(itertools.chain(*steps))))
        for micro_batches in steps:
            yield ((left, next(batches)) for left in reversed(range(len(micro_batches))))


@dataclass(frozen=True)
class Race:
    """name   of the benchmark
    beside     {a loop of interest: the loop that it is measured against}
    build      (course, loop) -> that loop, before its first step; a function of a module: other processes look it up
    processes  that run the loops
    warm_up    steps that are not counted
    times      (step, rank) -> how many times as long that process takes in that step; a function of a module as well
    tasks      what may be trained
    """

    name: str
    beside: Mapping[str, str]
    build: Callable[[Course, str], Iterator[Turn]]
    processes: int = PROCESSES
    warm_up: int = WARM_UP
    times: Callable[[int, int], float] | None = None
    tasks: Mapping[str, Task] = field(default_factory=lambda: TASKS)

    @property
    def loops(self) -> list[str]:
        return list(dict.fromkeys([*self.beside, *self.beside.values()]))


def ours(course: Course, settings: Settings, group: ProcessGroup, loop: str) -> Iterator[Turn]:
    """The public loop; advanced by one, it takes one step."""
    run = build_run(settings, course.world, group, course.folder / loop)
    model = run.place(copy.deepcopy(course.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(course.data):
        for x, y in step:
            step.backward(loss_of(model(x), y), weight=y.numel())
        norm = step.grad_norm if step.number == 0 else 0.0
        step.update(optimizer)
        yield Turn(model, norm)


def compete(world: World, race: Race, name: str, virtual_ranks: int, start: int, steps: int, folder: str) -> Any:
    """Let the loops take turns: {"seconds": {loop: [of a step]}, "work": ..., "apart": {loop: ...}, "norms": ...}."""
    task, loops, warm_up = race.tasks[name], race.loops, race.warm_up
    torch.manual_seed(1)
    total = steps + warm_up
    settings = Settings(epochs=1, batch=task.batch, virtual_ranks=virtual_ranks)
    order = BatchOrder(length=total * task.batch, batch=task.batch, virtual_ranks=virtual_ranks)
    with join(world) as group, SlowAt(1.0) if race.times else nullcontext() as slow:
        course = Course(settings, order, world, group, task.build(), task.data(total * task.batch), Path(folder))
        running = {loop: race.build(course, loop) for loop in shuffled(loops, f"start {start}")}
        times, work = torch.empty(2, len(loops), total, dtype=torch.float64)
        last: dict[str, Turn] = {}
        norms: dict[str, float] = {}
        for number in range(total):
            for loop in shuffled(loops, f"{start} {number}"):  # nobody always comes after the same
                group.barrier()
                if slow is not None and race.times is not None:
                    slow.times = race.times(number, world.rank)
                began, worked = time.perf_counter(), time.process_time()
                last[loop] = next(running[loop])
                times[loops.index(loop), number] = time.perf_counter() - began
                work[loops.index(loop), number] = time.process_time() - worked
                norms[loop] = norms.get(loop) or last[loop].norm
        weights = {loop: torch.cat([whole(p) for p in turn.model.parameters()]) for loop, turn in last.items()}
        for generator in running.values():
            generator.close()  # type: ignore[attr-defined]
        group.max_(times)
        group.sum_(work)
        true = weights[loops[-1]]
        return {
            "params": len(true),
            "seconds": {loop: row[warm_up:].tolist() for loop, row in zip(loops, times, strict=True)},
            "work": {loop: row[warm_up:].tolist() for loop, row in zip(loops, work, strict=True)},
            "apart": {loop: float((weights[loop] - true).norm() / true.norm()) for loop in loops},
            "norms": norms,
        }


def shuffled(loops: Sequence[str], seed: str) -> list[str]:
    return random.Random(seed).sample(loops, len(loops))


def whole(p: Any) -> torch.Tensor:
    """A parameter's content, flat, whatever this process holds of it."""
    full: torch.Tensor = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return full.flatten()


def measure(race: Race, name: str, virtual_ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Several rounds of a race, each in new processes: a row of the table."""
    seconds: dict[str, list[float]] = {loop: [] for loop in race.loops}
    work: dict[str, list[float]] = {loop: [] for loop in race.loops}
    found: dict[str, Any] = {}
    for start in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(compete, race.processes, race, name, virtual_ranks, start, steps, folder, seconds=550)[0]
        true = found["norms"][race.loops[-1]]
        for loop in race.loops:
            if not found["apart"][loop] <= 1e-4 or not math.isclose(found["norms"][loop], true, rel_tol=1e-4):
                raise AssertionError(f"{loop} did not compute what the others did: {found}")
            seconds[loop] += found["seconds"][loop]
            work[loop] += found["work"][loop]

    def ratios(of: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        return {loop: ratio(of[loop], of[other]) for loop, other in race.beside.items()}

    return {
        "model": name,
        "params": found["params"],
        "virtual_ranks": virtual_ranks,
        "micro_batch": race.tasks[name].batch // virtual_ranks,
        "steps": rounds * steps,
        "seconds": {loop: spread(values).median for loop, values in seconds.items()},
        "ratio": ratios(seconds),
        "work": ratios(work),
        "apart": found["apart"],
    }


def table(race: Race, rows: Sequence[Mapping[str, Any]]) -> str:
    """Of each row: time and processor time over that of the loop by hand, and how long a step of each took."""

    def line(first: str, cells: Sequence[str]) -> str:
        return f"{first:32} {' '.join(f'{cell:{WIDTH}}' for cell in cells)}".rstrip()

    lines = [line("", [f"{loop} / {other}" for loop, other in race.beside.items()])]
    for row in rows:
        for first, key in (
            (f"{row['model']}, {row['params'] / 1e6:.1f} M parameters", "ratio"),
            (f"  V={row['virtual_ranks']}, micro-batches of {row['micro_batch']}, work", "work"),
        ):
            lines.append(line(first, [f"{row[key][loop]:.3f}" for loop in race.beside]))
        lines.append("  seconds a step: " + ", ".join(f"{loop} {row['seconds'][loop]:.3f}" for loop in race.loops))
    return "\n".join(lines)


def main(race: Race, words: str | None) -> None:
    flags = parser(words)
    flags.add_argument("--rounds", type=int, default=3, help="how often the processes are started anew (3)")
    flags.add_argument("--steps", type=int, default=14, help="steps of each loop in a round (14)")
    flags.add_argument("--model", choices=list(TASKS), help="only this one")
    flags.add_argument("--virtual-ranks", type=int, help="only this many (2 and 8)")
    asked = flags.parse_args()
    rounds, steps = (1, 2) if asked.quick else (asked.rounds, asked.steps)
    rows: list[dict[str, Any]] = []
    for name in [asked.model] if asked.model else TASKS:
        for virtual_ranks in [asked.virtual_ranks] if asked.virtual_ranks else (2, 8):
            rows.append(measure(race, name, virtual_ranks, rounds, steps))
            print(table(race, rows[-1:]), file=sys.stderr, flush=True)
    show(race.name, {"rows": rows}, lambda: table(race, rows), as_json=asked.json)
