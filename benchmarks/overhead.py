"""Measure the overhead of our loop on one process over a loop by hand, in microseconds per step.

    python -m benchmarks.overhead            about two minutes
    python -m benchmarks.overhead --quick    a smoke test

The network is so small (two linear layers, 32-32-32, batch 8) that a step is Python and dispatch. Both loops run in one
process with one torch thread, in alternating blocks of steps. The figure is the median of the differences between pairs
of blocks. By hand: DataLoader(shuffle=True), sum loss, backward, gradients divided by the weight, SGD. Ours does the
same, and also keeps clock, timeline, progress line and loss, and refuses gradients that are not finite. If
lightning-fabric is installed (pip install lightning-fabric lightning-utilities --no-deps), its loop is a third arm with
the same loss and division.

There are two data sets: a TensorDataset, which ours reads in batches, and a custom data set, which is read by sample,
and for which ours seeds the random generators before each fetch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.machine import parser, ratio, show, spread
from benchmarks.tasks import Points, mlp
from unisono.config import Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run
from unisono.train.run import Run

BATCH, WIDTH, BLOCK = 8, 32, 500


DATA: dict[str, Callable[..., Dataset[Any]]] = {"TensorDataset": TensorDataset, "a custom data set": Points}


def network() -> nn.Module:
    """Build the model."""
    return mlp(WIDTH, WIDTH, WIDTH)


def points() -> Iterator[torch.Tensor]:
    """Yield random inputs and targets for a block of steps."""
    return (torch.randn(BLOCK * BATCH, WIDTH) for _ in range(2))


def by_hand(data: Dataset[Any], fabric: Any = None) -> Iterator[None]:
    """Train with a loop by hand, or with the same loop with Fabric. Each `next` takes BLOCK steps."""
    model: Any = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
    while True:
        for x, y in loader:
            loss = F.mse_loss(model(x), y, reduction="sum")
            if fabric is not None:
                fabric.backward(loss)
            else:
                loss.backward()
            weight = len(x)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= weight
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield


def ours(run: Run[Settings], data: Dataset[Any]) -> Iterator[None]:
    """Train with our public loop. Each `next` takes BLOCK steps."""
    model = run.place(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(F.mse_loss(model(x), y, reduction="sum"), weight=len(x))
        step.update(optimizer)
        if (step.number + 1) % BLOCK == 0:
            yield


def measure(pairs: int, data: Dataset[Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, join(World()) as group:
        settings = Settings(epochs=pairs + 1, batch=BATCH, virtual_ranks=1)
        run = build_run(settings, World(), group, Path(folder))
        arms = {"by hand": by_hand(data), "ours": ours(run, data)}
        if find_spec("lightning_fabric") is not None:
            arms["Fabric"] = by_hand(data, _fabric())
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for pair in range(pairs + 1):
            for name in reversed(arms) if pair % 2 else arms:
                start = time.perf_counter()
                next(arms[name])
                seconds[name].append(1e6 * (time.perf_counter() - start) / BLOCK)
        del arms
    seconds = {name: column[1:] for name, column in seconds.items()}  # the first pair warms up
    hand = seconds["by hand"]
    return {
        "pairs": pairs,
        "steps": pairs * BLOCK,
        "us": {name: spread(column) for name, column in seconds.items()},
        "least_us": {name: min(column) for name, column in seconds.items()},
        "more_us": {
            name: spread([a - b for a, b in zip(column, hand, strict=True)]) for name, column in seconds.items()
        },
        "ratio": {name: ratio(column, hand) for name, column in seconds.items()},
    }


def _fabric() -> Any:
    from lightning_fabric import Fabric  # type: ignore[import-not-found]

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


def table(name: str, found: dict[str, Any]) -> str:
    lines = [
        f"{name}: microseconds per step, median (quartiles) of {found['pairs']} blocks of {BLOCK} steps",
        f"{'':9} {'per step':28} {'least':>7}  {'over the loop by hand':28} ratio",
    ]
    for arm, us in found["us"].items():
        least, more, over = found["least_us"][arm], found["more_us"][arm], found["ratio"][arm]
        overhead = f"  {f'{more:.1f}':28} {over:.3f}" if arm != "by hand" else ""
        lines.append(f"{arm:9} {f'{us:.1f}':28} {least:7.1f}{overhead}")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=100, help="pairs of blocks (100)")
    args = flags.parse_args()
    torch.set_num_threads(1)
    figures = {name: measure(4 if args.quick else args.pairs, build(*points())) for name, build in DATA.items()}
    show("overhead", figures, lambda: "\n".join(table(name, of) for name, of in figures.items()), as_json=args.json)


if __name__ == "__main__":
    main()
