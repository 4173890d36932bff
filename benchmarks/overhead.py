"""One process: what the loop costs over the one that is written by hand, in microseconds a step.

    python -m benchmarks.overhead            about a minute
    python -m benchmarks.overhead --quick    a smoke test

A network so small (two linear layers, 32-32-32, batch 8) that a step is nothing but Python and dispatch. Both loops
take turns in blocks of steps, in one process with one torch thread; the figure is the median, over pairs of blocks, of
what ours takes longer. By hand: DataLoader(shuffle=True), sum loss, backward, gradients divided by the weight, SGD.
Ours does the same, and keeps its clock, timeline and progress line, knows its loss, seeds every micro-batch twice, and
refuses gradients that are not finite.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import parser, show, spread
from unisono.env import World
from unisono.settings import Settings
from unisono.train.run import Run
from unisono.world.start import group as join

BATCH, WIDTH, BLOCK = 8, 32, 500


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def points() -> TensorDataset:
    return TensorDataset(torch.randn(BLOCK * BATCH, WIDTH), torch.randn(BLOCK * BATCH, WIDTH))


def by_hand(data: TensorDataset) -> Iterator[None]:
    """The loop that one writes; advanced by one, it takes BLOCK steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        for x, y in DataLoader(data, batch_size=BATCH, shuffle=True):
            loss = F.mse_loss(model(x), y, reduction="sum")
            loss.backward()
            weight = len(x)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= weight
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield


def ours(run: Run[Settings], data: TensorDataset) -> Iterator[None]:
    """The public loop; advanced by one, it takes BLOCK steps."""
    model = run.place(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(F.mse_loss(model(x), y, reduction="sum"), weight=len(x))
        step.update(optimizer)
        if (step.number + 1) % BLOCK == 0:
            yield


def measure(pairs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    data = points()
    with tempfile.TemporaryDirectory() as folder, join(World()) as group:
        run: Run[Settings] = Run(
            Settings(epochs=pairs + 1, batch=BATCH, virtual_ranks=1),
            world=World(),
            group=group,
            run_dir=Path(folder),
            identity={},
            resumed=None,
            output=io.StringIO(),
        )
        arms = [ours(run, data), by_hand(data)]
        seconds: list[list[float]] = [[], []]
        for pair in range(pairs + 1):
            for i in (0, 1) if pair % 2 else (1, 0):
                began = time.perf_counter()
                next(arms[i])
                seconds[i].append(time.perf_counter() - began)
        del arms
    mine, hand = ([1e6 * s / BLOCK for s in column[1:]] for column in seconds)  # the first pair warms up
    return {
        "pairs": pairs,
        "steps": pairs * BLOCK,
        "by_hand_us": spread(hand),
        "ours_us": spread(mine),
        "more_us": spread([a - b for a, b in zip(mine, hand, strict=True)]),
        "ratio": spread([a / b for a, b in zip(mine, hand, strict=True)]),
    }


def table(found: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"microseconds a step, median (quartiles) of {found['pairs']} pairs of {BLOCK} steps",
            f"by hand     {found['by_hand_us']:.1f}",
            f"ours        {found['ours_us']:.1f}",
            f"difference  {found['more_us']:.1f}",
            f"ratio       {found['ratio']:.3f}",
        ]
    )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=100, help="pairs of blocks (100)")
    asked = flags.parse_args()
    found = measure(4 if asked.quick else asked.pairs)
    show("overhead", found, lambda: table(found), as_json=asked.json)


if __name__ == "__main__":
    main()
