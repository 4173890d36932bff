"""Two processes that share one model: what the exact sums cost over FSDP2 as it comes.

    python -m benchmarks.shards            about seven minutes
    python -m benchmarks.shards --quick    a smoke test

Five loops take turns, step by step, in the same two processes: ours gathered by layer and once a step; FSDP2 by hand in
the same two ways (by layer: gathered and reduced for every micro-batch; once a step: gathered before the first and
reduced after the last one), and that once more with gradients reduced in float64, the other way to sums that do not
depend on the number of processes. All have one torch thread, the same layers, the same samples in the same
micro-batches, the same AdamW. Ours is the public loop, which also refuses gradients that are not finite and knows its
loss.

A step takes as long as its slower process. The figure is the median, over steps, of ours / by hand in the same turn;
every round starts new processes, and makes the loops in another order. "work" is the same for processor time, of both
processes and all their threads. At the end the sets of weights must agree.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.machine import parser, show, spread
from benchmarks.ours import build_run
from benchmarks.tasks import TASKS, loss_of
from unisono.env import World
from unisono.score.order import Order
from unisono.score.placement import place_evenly
from unisono.settings import ParallelSettings, Settings
from unisono.testing import run_ranks
from unisono.train.run import Run
from unisono.world.collectives import Group
from unisono.world.start import group as join

PROCESSES = 2
BESIDE = {"layer": "layer by hand", "step": "step by hand", "float64": "step by hand"}
"""Which of the loops by hand each of the others is measured against."""
ARMS = (*BESIDE, "layer by hand", "step by hand")
WARM_UP = 2


def ours(run: Run[Settings], start: nn.Module, data: Dataset[Any]) -> Iterator[nn.Module]:
    """The public loop; advanced by one, it takes one step."""
    model = run.place(copy.deepcopy(start))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(loss_of(model(x), y), weight=y.numel())
        step.update(optimizer)
        yield model


def by_hand(order: Order, group: Group, start: nn.Module, data: Dataset[Any], arm: str) -> Iterator[nn.Module]:
    """FSDP2 over the same micro-batches. It averages over processes; the loss is scaled for that."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from unisono.parallel.shard import layers_of

    by_layer = arm == "layer by hand"
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if arm == "float64" else None)
    mesh = init_device_mesh("cpu", (group.size,))
    model = copy.deepcopy(start)
    for part in [*layers_of(model), model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=by_layer, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    span = place_evenly(order.virtual_ranks, group.size)[group.rank]
    steps = [[samples for _, samples in order.places(step, span)] for step in range(order.steps_per_epoch)]
    batches = iter(DataLoader(data, batch_sampler=list(itertools.chain(*steps))))
    for micro_batches in steps:
        for left in range(len(micro_batches) - 1, -1, -1):
            model.set_requires_gradient_sync(by_layer or not left)
            model.set_reshard_after_backward(by_layer or not left)
            x, y = next(batches)
            (loss_of(model(x), y) * (group.size / (order.batch * y[0].numel()))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield model


def race(world: World, name: str, virtual_ranks: int, start: int, steps: int, folder: str) -> dict[str, Any]:
    """Let the loops take turns: {"seconds": {arm: [of a step]}, "apart": {arm: ...}}."""
    task = TASKS[name]
    torch.manual_seed(1)
    total = steps + WARM_UP
    model, data = task.build(), task.data(total * task.batch)
    settings = Settings(epochs=1, batch=task.batch, virtual_ranks=virtual_ranks)
    order = Order(length=total * task.batch, batch=task.batch, virtual_ranks=virtual_ranks)
    with join(world) as group:
        arms: dict[str, Iterator[nn.Module]] = {}
        for arm in random.Random(f"start {start}").sample(ARMS, len(ARMS)):
            if arm in ("layer", "step"):
                parallel = ParallelSettings(shard=group.size, gather="layer" if arm == "layer" else "step")
                run = build_run(replace(settings, parallel=parallel), world, group, Path(folder) / arm)
                arms[arm] = ours(run, model, data)
            else:
                arms[arm] = by_hand(order, group, model, data, arm)
        times, work = torch.empty(2, len(ARMS), total, dtype=torch.float64)
        last: dict[str, nn.Module] = {}
        for number in range(total):
            for arm in random.Random(f"{start} {number}").sample(ARMS, len(ARMS)):  # nobody always comes after the same
                group.barrier()
                began, worked = time.perf_counter(), time.process_time()
                last[arm] = next(arms[arm])
                times[ARMS.index(arm), number] = time.perf_counter() - began
                work[ARMS.index(arm), number] = time.process_time() - worked
        weights = {arm: torch.cat([whole(p) for p in each.parameters()]) for arm, each in last.items()}
        for generator in arms.values():
            generator.close()  # type: ignore[attr-defined]
        group.max_(times)
        group.sum_(work)
        true = weights["step by hand"]
        return {
            "params": len(true),
            "seconds": {arm: row[WARM_UP:].tolist() for arm, row in zip(ARMS, times, strict=True)},
            "work": {arm: row[WARM_UP:].tolist() for arm, row in zip(ARMS, work, strict=True)},
            "apart": {arm: float((weights[arm] - true).norm() / true.norm()) for arm in ARMS},
        }


def whole(p: Any) -> torch.Tensor:
    """A parameter's content, flat, whatever this process holds of it."""
    full: torch.Tensor = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return full.flatten()


def measure(name: str, virtual_ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Several rounds of a race, each in new processes."""
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    work: dict[str, list[float]] = {arm: [] for arm in ARMS}
    found: dict[str, Any] = {}
    for start in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(race, PROCESSES, name, virtual_ranks, start, steps, folder, seconds=400)[0]
        for arm in ARMS:
            if not found["apart"][arm] <= 1e-4:
                raise AssertionError(f"{arm} did not compute what the others did: {found}")
            seconds[arm] += found["seconds"][arm]
            work[arm] += found["work"][arm]
    return {
        "model": name,
        "params": found["params"],
        "virtual_ranks": virtual_ranks,
        "micro_batch": TASKS[name].batch // virtual_ranks,
        "steps": len(seconds["step"]),
        "seconds": {arm: spread(values).median for arm, values in seconds.items()},
        "ratio": {arm: spread(ratios(seconds, arm)) for arm in BESIDE},
        "work_ratio": {arm: spread(ratios(work, arm)) for arm in BESIDE},
        "apart": found["apart"],
    }


def ratios(seconds: dict[str, list[float]], arm: str) -> list[float]:
    return [mine / theirs for mine, theirs in zip(seconds[arm], seconds[BESIDE[arm]], strict=True)]


def table(rows: list[dict[str, Any]]) -> str:
    """Two lines for each row: time and processor time, each over the loop by hand that gathers in the same way."""
    lines = [f"{'over FSDP2 by hand':32} " + " ".join(f"{arm:23}" for arm in BESIDE).rstrip()]
    for row in rows:
        shape = f"V={row['virtual_ranks']}, micro-batches of {row['micro_batch']}"
        lines.append(
            f"{row['model']}, {row['params'] / 1e6:.1f} M parameters".ljust(32)
            + " "
            + " ".join(f"{row['ratio'][arm]:.3f}".ljust(23) for arm in BESIDE).rstrip()
        )
        lines.append(
            f"  {shape}, work".ljust(32)
            + " "
            + " ".join(f"{row['work_ratio'][arm]:.3f}".ljust(23) for arm in BESIDE).rstrip()
        )
        lines.append("  seconds a step: " + ", ".join(f"{arm} {row['seconds'][arm]:.3f}" for arm in ARMS))
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=3, help="how often the processes are started anew (3)")
    flags.add_argument("--steps", type=int, default=12, help="steps of each loop in a round (12)")
    flags.add_argument("--model", choices=list(TASKS), help="only this one")
    flags.add_argument("--virtual-ranks", type=int, help="only this many (2 and 8)")
    asked = flags.parse_args()
    rounds, steps = (1, 2) if asked.quick else (asked.rounds, asked.steps)
    rows: list[dict[str, Any]] = []
    for name in [asked.model] if asked.model else TASKS:
        for virtual_ranks in [asked.virtual_ranks] if asked.virtual_ranks else (2, 8):
            rows.append(measure(name, virtual_ranks, rounds, steps))
            print(table(rows[-1:]), file=sys.stderr, flush=True)
    show("shards", {"rows": rows}, lambda: table(rows), as_json=asked.json)


if __name__ == "__main__":
    main()
