"""One process: what the loop costs over the one that is written by hand, in microseconds a step.

    python -m benchmarks.overhead            about two minutes
    python -m benchmarks.overhead --quick    a smoke test

A network so small (two linear layers, 32-32-32, batch 8) that a step is nothing but Python and dispatch. Both loops
take turns in blocks of steps, in one process with one torch thread; the figure is the median, over pairs of blocks, of
what ours takes longer. By hand: DataLoader(shuffle=True), sum loss, backward, gradients divided by the weight, SGD.
Ours does the same, and keeps its clock, timeline and progress line, knows its loss, and refuses gradients that are not
finite. With lightning-fabric installed (pip install lightning-fabric lightning-utilities --no-deps) its loop is a third
arm, with the same sum loss and division.

It is measured twice, since data decides: with a TensorDataset, which ours reads a batch at a time, and with a data set
of one's own, which is asked for every sample, and for which ours looks in every step whether it drew random numbers.
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


DATA: dict[str, Callable[..., Dataset[Any]]] = {"TensorDataset": TensorDataset, "a data set of one's own": Points}


def network() -> nn.Module:
    return mlp(WIDTH, WIDTH, WIDTH)


def points() -> Iterator[torch.Tensor]:
    """What goes in, and what should come out: a block of it."""
    return (torch.randn(BLOCK * BATCH, WIDTH) for _ in range(2))


def by_hand(data: Dataset[Any], fabric: Any = None) -> Iterator[None]:
    """The loop that one writes, or the same one with Fabric; advanced by one, it takes BLOCK steps."""
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
                began = time.perf_counter()
                next(arms[name])
                seconds[name].append(1e6 * (time.perf_counter() - began) / BLOCK)
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
        f"{name}: microseconds a step, median (quartiles) of {found['pairs']} blocks of {BLOCK} steps",
        f"{'':9} {'a step':28} {'least':>7}  {'over the loop by hand':28} ratio",
    ]
    for arm, us in found["us"].items():
        least, more, over = found["least_us"][arm], found["more_us"][arm], found["ratio"][arm]
        told = f"  {f'{more:.1f}':28} {over:.3f}" if arm != "by hand" else ""
        lines.append(f"{arm:9} {f'{us:.1f}':28} {least:7.1f}{told}")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=100, help="pairs of blocks (100)")
    asked = flags.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(4 if asked.quick else asked.pairs, build(*points())) for name, build in DATA.items()}
    show("overhead", found, lambda: "\n".join(table(name, one) for name, one in found.items()), as_json=asked.json)


if __name__ == "__main__":
    main()
