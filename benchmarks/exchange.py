"""Two processes: what the exact exchange costs over torch's DistributedDataParallel.

    python -m benchmarks.exchange            about seven minutes
    python -m benchmarks.exchange --quick    a smoke test

Four loops take turns, step by step, in the same two processes: ours with exchange=tree (exact), the same with messages
alone, as between hosts (on one host the processes share memory), ours with exchange=allreduce, and
DistributedDataParallel as its documentation advises (no_sync on all micro-batches but the last,
gradient_as_bucket_view). All have one torch thread, the same samples in the same micro-batches, the same AdamW. Ours is
the public loop, with everything that a run does between two steps (timeline, progress). It also refuses gradients that
are not finite and knows its loss, for which the other loop does nothing.

A step takes as long as its slower process. The figure is the median, over steps, of ours / DDP in the same turn; every
round starts new processes, and makes the loops in another order. "work" is the same for processor time, of both
processes and all their threads: it counts nothing that others did on the machine in the meantime, and no waiting. At
the end the sets of weights must agree, and the norms of their first gradients.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.machine import parser, show, spread
from benchmarks.ours import build_run
from benchmarks.tasks import TASKS, loss_of
from unisono.env import World
from unisono.score.order import Order
from unisono.score.placement import place_evenly
from unisono.settings import Settings
from unisono.testing import run_ranks
from unisono.train.run import Run
from unisono.world.collectives import Group
from unisono.world.start import group as join

PROCESSES = 2
OURS = {"tree": "tree / DDP", "messages": "as between hosts", "allreduce": "allreduce / DDP"}
ARMS = (*OURS, "ddp")
WARM_UP = 2
"""Steps that are not counted: the first allocates, and DistributedDataParallel rebuilds its buckets after it."""


Turn = tuple[nn.Module, float]
"""What an arm yields after each step: its model, and in the first step the 2-norm of its gradient (then 0)."""


def ours(run: Run[Settings], start: nn.Module, data: Dataset[Any]) -> Iterator[Turn]:
    """The public loop; advanced by one, it takes one step."""
    model = run.place(copy.deepcopy(start))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(loss_of(model(x), y), weight=y.numel())
        norm = step.grad_norm if step.number == 0 else 0.0
        step.update(optimizer)
        yield model, norm


def ddp(order: Order, group: Group, start: nn.Module, data: Dataset[Any]) -> Iterator[Turn]:
    """DistributedDataParallel over the same micro-batches. It averages over processes; the loss is scaled for that."""
    model = DistributedDataParallel(copy.deepcopy(start), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    span = place_evenly(order.virtual_ranks, group.size)[group.rank]
    steps = [[samples for _, samples in order.places(step, span)] for step in range(order.steps_per_epoch)]
    batches = iter(DataLoader(data, batch_sampler=list(itertools.chain(*steps))))
    for number, micro_batches in enumerate(steps):
        weight = 0
        for left in range(len(micro_batches) - 1, -1, -1):
            x, y = next(batches)
            weight = order.batch * y[0].numel()
            with model.no_sync() if left else nullcontext():
                (loss_of(model(x), y) * (group.size / weight)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = 0.0 if number else float(torch.nn.utils.get_total_norm(grads))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield model.module, norm


def race(world: World, name: str, virtual_ranks: int, start: int, steps: int, folder: str) -> dict[str, Any]:
    """Let the loops take turns: {"seconds": {arm: [of a step]}, "apart": {arm: ...}, "params": ...}."""
    task = TASKS[name]
    torch.manual_seed(1)
    total = steps + WARM_UP
    model, data = task.build(), task.data(total * task.batch)
    settings = Settings(epochs=1, batch=task.batch, virtual_ranks=virtual_ranks)
    order = Order(length=total * task.batch, batch=task.batch, virtual_ranks=virtual_ranks)
    with join(world) as group:
        arms: dict[str, Iterator[Turn]] = {}
        for arm in random.Random(f"start {start}").sample(ARMS, len(ARMS)):
            exchange: Literal["tree", "allreduce"] = "allreduce" if arm == "allreduce" else "tree"
            among = replace(group, neighbours={}) if arm == "messages" else group
            run = build_run(replace(settings, exchange=exchange), world, among, Path(folder) / arm)
            arms[arm] = ddp(order, group, model, data) if arm == "ddp" else ours(run, model, data)
        times, work = torch.empty(2, len(ARMS), total, dtype=torch.float64)
        last: dict[str, Turn] = {}
        norms: dict[str, float] = {}
        for number in range(total):
            for arm in random.Random(f"{start} {number}").sample(ARMS, len(ARMS)):  # nobody always comes after the same
                group.barrier()
                began, worked = time.perf_counter(), time.process_time()
                last[arm] = next(arms[arm])
                times[ARMS.index(arm), number] = time.perf_counter() - began
                work[ARMS.index(arm), number] = time.process_time() - worked
                norms[arm] = norms.get(arm) or last[arm][1]
        for generator in arms.values():
            generator.close()  # type: ignore[attr-defined]
        group.max_(times)
        group.sum_(work)
        weights = {arm: nn.utils.parameters_to_vector(model.parameters()).detach() for arm, (model, _) in last.items()}
        return {
            "params": len(weights["ddp"]),
            "seconds": {arm: row[WARM_UP:].tolist() for arm, row in zip(ARMS, times, strict=True)},
            "work": {arm: row[WARM_UP:].tolist() for arm, row in zip(ARMS, work, strict=True)},
            "apart": {arm: float((weights[arm] - weights["ddp"]).norm() / weights["ddp"].norm()) for arm in ARMS},
            "norms": norms,
        }


def measure(name: str, virtual_ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Several rounds of a race, each in new processes."""
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    work: dict[str, list[float]] = {arm: [] for arm in ARMS}
    round_medians: dict[str, list[float]] = {arm: [] for arm in ARMS}
    found: dict[str, Any] = {}
    for start in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(race, PROCESSES, name, virtual_ranks, start, steps, folder, seconds=400)[0]
        for arm in ARMS:
            if not found["apart"][arm] <= 1e-4 or not math.isclose(
                found["norms"][arm], found["norms"]["ddp"], rel_tol=1e-4
            ):
                raise AssertionError(f"{arm} did not compute what DistributedDataParallel did: {found}")
            seconds[arm] += found["seconds"][arm]
            work[arm] += found["work"][arm]
            round_medians[arm].append(spread(ratios(found["seconds"], arm)).median)
    return {
        "model": name,
        "params": found["params"],
        "virtual_ranks": virtual_ranks,
        "batch": TASKS[name].batch,
        "micro_batch": TASKS[name].batch // virtual_ranks,
        "steps": len(seconds["ddp"]),
        "seconds": {arm: spread(values).median for arm, values in seconds.items()},
        "ratio": {arm: spread(ratios(seconds, arm)) for arm in OURS},
        "work_ratio": {arm: spread(ratios(work, arm)) for arm in OURS},
        "rounds": {arm: round_medians[arm] for arm in OURS},
        "apart": found["apart"],
    }


def ratios(seconds: dict[str, list[float]], arm: str) -> list[float]:
    return [mine / theirs for mine, theirs in zip(seconds[arm], seconds["ddp"], strict=True)]


def table(rows: list[dict[str, Any]]) -> str:
    """Two lines for each row: time and processor time, each over DistributedDataParallel's, with quartiles."""
    lines = [f"{'':30} {'DDP step':>9}  " + " ".join(f"{title:23}" for title in OURS.values()).rstrip()]
    for row in rows:
        shape = f"V={row['virtual_ranks']}, micro-batches of {row['micro_batch']}"
        for name, key, step in (
            (f"{row['model']}, {row['params'] / 1e6:.1f} M parameters", "ratio", f"{row['seconds']['ddp']:.3f} s"),
            (f"  {shape}", "work_ratio", "work"),
        ):
            ratios_ = [f"{row[key][arm]:.3f}" for arm in OURS]
            lines.append(f"{name:30} {step:>9}  " + " ".join(f"{ratio:23}" for ratio in ratios_).rstrip())
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=3, help="how often the processes are started anew (3)")
    flags.add_argument("--steps", type=int, default=16, help="steps of each loop in a round (16)")
    flags.add_argument("--model", choices=list(TASKS), help="only this one")
    flags.add_argument("--virtual-ranks", type=int, help="only this many (2 and 8)")
    asked = flags.parse_args()
    rounds, steps = (1, 2) if asked.quick else (asked.rounds, asked.steps)
    rows: list[dict[str, Any]] = []
    for name in [asked.model] if asked.model else TASKS:
        for virtual_ranks in [asked.virtual_ranks] if asked.virtual_ranks else (2, 8):
            rows.append(measure(name, virtual_ranks, rounds, steps))
            print(table(rows[-1:]), file=sys.stderr, flush=True)
    show("exchange", {"rows": rows}, lambda: table(rows), as_json=asked.json)


if __name__ == "__main__":
    main()
