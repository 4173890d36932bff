"""Compare training loops that alternate in the same processes, step by step or every few steps.

All loops have one torch thread, the same samples in the same micro-batches, and the same AdamW. Ours is the public loop
with all that a run does between steps (timeline, progress). Unlike a loop by hand, it also refuses gradients that are
not finite and computes the loss.

The time of a step is that of the slowest process. The figure is the median (with quartiles) of the ratios of steps with
the same number. Each round starts new processes and builds the loops in another order. "work" is the ratio of processor
time of all processes and threads, which excludes waiting and other load on the machine. The final weights of all loops,
and the norms of their first gradients, must agree.
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
"""Steps that do not count: the first one allocates, and DistributedDataParallel rebuilds its buckets after it."""

WIDTH = 26
"""Width of a column of the table."""


class LoopStep(NamedTuple):
    """Result of a step: the model, and in the first step the 2-norm of its gradient (later 0)."""

    model: nn.Module
    norm: float = 0.0


class LoopContext(NamedTuple):
    """The objects that all loops of a comparison share."""

    settings: Settings
    order: BatchOrder
    world: World
    group: ProcessGroup
    model: nn.Module
    data: Dataset[Any]
    folder: Path

    def steps(self) -> Iterator[Iterator[tuple[int, Any]]]:
        """Yield the micro-batches of each step for a loop by hand, as (number of micro-batches that follow, batch)."""
        order = self.order
        span = assign_evenly(order.virtual_ranks, self.group.size)[self.group.rank]
        steps = [[samples for _, samples in order.places(step, span)] for step in range(order.steps_per_epoch)]
        batches = iter(DataLoader(self.data, batch_sampler=list(itertools.chain(*steps))))
        for micro_batches in steps:
            yield ((left, next(batches)) for left in reversed(range(len(micro_batches))))


@dataclass(frozen=True)
class Comparison:
    """The loops of a benchmark.

    Args:
        name: Name of the benchmark.
        baselines: The baseline of each loop of interest.
        build: Builds a loop from its context and name. It must be a function of a module, for other processes.
        processes: Number of processes.
        warm_up: Steps that do not count.
        times: Slows down a process: (step, rank) to a factor. It must be a function of a module, too.
        tasks: Tasks to choose from.
        in_a_row: Steps that a loop takes before the next loop has its turn. If there are several, the first one of each
            turn does not count: connections of the loop have paused longer before it than in a run.
    """

    name: str
    baselines: Mapping[str, str]
    build: Callable[[LoopContext, str], Iterator[LoopStep]]
    processes: int = PROCESSES
    warm_up: int = WARM_UP
    times: Callable[[int, int], float] | None = None
    tasks: Mapping[str, Task] = field(default_factory=lambda: TASKS)
    in_a_row: int = 1

    @property
    def loops(self) -> list[str]:
        return list(dict.fromkeys([*self.baselines, *self.baselines.values()]))

    def turns(self, total: int, round_number: int) -> Iterator[tuple[int, str]]:
        """Yield the number and the loop of each step. No loop always follows the same one."""
        for first in range(0, total, self.in_a_row):
            for loop in shuffled(self.loops, f"{round_number} {first}"):
                yield from ((number, loop) for number in range(first, min(total, first + self.in_a_row)))

    def counted(self, total: int) -> list[int]:
        """Return the numbers of the steps that count."""
        return [n for n in range(self.warm_up, total) if self.in_a_row == 1 or n % self.in_a_row]


def ours(context: LoopContext, settings: Settings, group: ProcessGroup, loop: str) -> Iterator[LoopStep]:
    """Train with our public loop. Each `next` takes one step."""
    run = build_run(settings, context.world, group, context.folder / loop)
    model = run.place(copy.deepcopy(context.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(context.data):
        for x, y in step:
            step.backward(loss_of(model(x), y), weight=y.numel())
        norm = step.grad_norm if step.number == 0 else 0.0
        step.update(optimizer)
        yield LoopStep(model, norm)


def run_loops(
    world: World, comparison: Comparison, name: str, virtual_ranks: int, round_number: int, steps: int, folder: str
) -> Any:
    """Alternate the loops, and return seconds and work of each step, and differences of weights and norms, by loop."""
    task, loops = comparison.tasks[name], comparison.loops
    torch.manual_seed(1)
    total = steps + comparison.warm_up
    settings = Settings(epochs=1, batch=task.batch, virtual_ranks=virtual_ranks)
    order = BatchOrder(length=total * task.batch, batch=task.batch, virtual_ranks=virtual_ranks)
    with join(world) as group, SlowAt(1.0) if comparison.times else nullcontext() as slow:
        context = LoopContext(settings, order, world, group, task.build(), task.data(total * task.batch), Path(folder))
        running = {loop: comparison.build(context, loop) for loop in shuffled(loops, f"start {round_number}")}
        times, work = torch.empty(2, len(loops), total, dtype=torch.float64)
        last: dict[str, LoopStep] = {}
        norms: dict[str, float] = {}
        for number, loop in comparison.turns(total, round_number):
            group.barrier()
            if slow is not None and comparison.times is not None:
                slow.times = comparison.times(number, world.rank)
            start, worked = time.perf_counter(), time.process_time()
            last[loop] = next(running[loop])
            times[loops.index(loop), number] = time.perf_counter() - start
            work[loops.index(loop), number] = time.process_time() - worked
            norms[loop] = norms.get(loop) or last[loop].norm
        weights = {loop: torch.cat([full_tensor(p) for p in turn.model.parameters()]) for loop, turn in last.items()}
        for generator in running.values():
            generator.close()  # type: ignore[attr-defined]
        group.max_(times)
        group.sum_(work)
        expected, counted = weights[loops[-1]], comparison.counted(total)
        return {
            "params": len(expected),
            "seconds": {loop: row[counted].tolist() for loop, row in zip(loops, times, strict=True)},
            "work": {loop: row[counted].tolist() for loop, row in zip(loops, work, strict=True)},
            "difference": {loop: float((weights[loop] - expected).norm() / expected.norm()) for loop in loops},
            "norms": norms,
        }


def shuffled(loops: Sequence[str], seed: str) -> list[str]:
    """Return the loops in random order."""
    return random.Random(seed).sample(loops, len(loops))


def full_tensor(p: Any) -> torch.Tensor:
    """Return a parameter, flat, gathered if it is sharded."""
    full: torch.Tensor = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return full.flatten()


class Turns(NamedTuple):
    """One run of a comparison: the arguments of `run_loops` that are equal on all processes."""

    comparison: Comparison
    name: str
    virtual_ranks: int
    round_number: int
    steps: int
    folder: str


def run_here(turns: Turns) -> Any:
    """Run a comparison in new processes of this machine, and return what `run_loops` returns on rank 0."""
    return run_ranks(run_loops, turns.comparison.processes, *turns, seconds=550)[0]


def measure(
    comparison: Comparison,
    name: str,
    virtual_ranks: int,
    rounds: int,
    steps: int,
    run: Callable[[Turns], Any] = run_here,
) -> dict[str, Any]:
    """Run a comparison several times, each in new processes, and return a row of the table."""
    seconds: dict[str, list[float]] = {loop: [] for loop in comparison.loops}
    work: dict[str, list[float]] = {loop: [] for loop in comparison.loops}
    found: dict[str, Any] = {}
    for start in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = run(Turns(comparison, name, virtual_ranks, start, steps, folder))
        norm = found["norms"][comparison.loops[-1]]
        for loop in comparison.loops:
            if not found["difference"][loop] <= 1e-4 or not math.isclose(found["norms"][loop], norm, rel_tol=1e-4):
                raise AssertionError(f"{loop} computed another result than the others: {found}")
            seconds[loop] += found["seconds"][loop]
            work[loop] += found["work"][loop]

    def ratios(of: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        return {loop: ratio(of[loop], of[other]) for loop, other in comparison.baselines.items()}

    return {
        "model": name,
        "params": found["params"],
        "virtual_ranks": virtual_ranks,
        "micro_batch": comparison.tasks[name].batch // virtual_ranks,
        "steps": len(seconds[comparison.loops[0]]),
        "seconds": {loop: spread(values).median for loop, values in seconds.items()},
        "ratio": ratios(seconds),
        "work": ratios(work),
        "difference": found["difference"],
    }


def table(comparison: Comparison, rows: Sequence[Mapping[str, Any]]) -> str:
    """Format each row: ratios of time and of processor time to the baseline, and seconds per step."""

    def line(first: str, cells: Sequence[str]) -> str:
        return f"{first:32} {' '.join(f'{cell:{WIDTH}}' for cell in cells)}".rstrip()

    lines = [line("", [f"{loop} / {other}" for loop, other in comparison.baselines.items()])]
    for row in rows:
        for first, key in (
            (f"{row['model']}, {row['params'] / 1e6:.1f} M parameters", "ratio"),
            (f"  V={row['virtual_ranks']}, micro-batches of {row['micro_batch']}, work", "work"),
        ):
            lines.append(line(first, [f"{row[key][loop]:.3f}" for loop in comparison.baselines]))
        lines.append(
            "  seconds per step: " + ", ".join(f"{loop} {row['seconds'][loop]:.3f}" for loop in comparison.loops)
        )
    return "\n".join(lines)


def main(comparison: Comparison, description: str | None) -> None:
    """Run a benchmark of two processes from the command line."""
    flags = parser(description)
    flags.add_argument("--rounds", type=int, default=3, help="number of times that new processes are started (3)")
    flags.add_argument("--steps", type=int, default=14, help="steps of each loop in a round (14)")
    flags.add_argument("--model", choices=list(TASKS), help="only this model")
    flags.add_argument("--virtual-ranks", type=int, help="only this number of virtual ranks (2 and 8)")
    args = flags.parse_args()
    rounds, steps = (1, 2) if args.quick else (args.rounds, args.steps)
    rows: list[dict[str, Any]] = []
    for name in [args.model] if args.model else TASKS:
        for virtual_ranks in [args.virtual_ranks] if args.virtual_ranks else (2, 8):
            rows.append(measure(comparison, name, virtual_ranks, rounds, steps))
            print(table(comparison, rows[-1:]), file=sys.stderr, flush=True)
    show(comparison.name, {"rows": rows}, lambda: table(comparison, rows), as_json=args.json)
