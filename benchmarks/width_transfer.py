"""Train the text recipe at two widths and several learning rates, with standard and with maximal updates.

    python -m benchmarks.width_transfer             about ten minutes on two cores
    python -m benchmarks.width_transfer --quick     a smoke test

The narrow model is the base, so both parametrizations are the same there. The table has bits per byte on held-out
files: with maximal updates (unisono.scaling) the best learning rate of the narrow model should be that of the wide one.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import parser
from unisono import scaling
from unisono.config import CheckpointSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.recipes.datasets.python_source import ByteWindows, load_python_source
from unisono.recipes.text import GPT, Model, bits_per_byte, loss_sum
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run

HOUR = 3600.0
HEAD_WIDTH = 16
"""Wider models have more heads of the same width, so attention needs no other scale."""

CONTEXT = 64
VALIDATE_BYTES = 2**15
RATES = [0.002 * 2**n for n in range(7)]


def shape(width: int) -> Model:
    return Model(width=width, depth=2, heads=width // HEAD_WIDTH, context=CONTEXT)


def build_wide(widths: scaling.WidthScaling, width: int, base: int) -> GPT:
    """Build the model with initial weights and an output scale for maximal updates."""
    model = widths.apply_init(GPT(shape(width)))
    # The recipe's scale falls with the square root of the width; here it is that of the base, times base / width.
    model.scale *= math.sqrt(width / base) * scaling.output_scale(width, base)
    return model


def train(run: Run[Any], width: int, base: int, lr: float, maximal: bool) -> float:
    """Train, and return the bits per byte on held-out files."""
    corpus = load_python_source()
    train_set = ByteWindows(corpus.train, CONTEXT)
    if maximal:
        widths = scaling.WidthScaling(lambda: GPT(shape(width)), lambda: GPT(shape(base)))
        model = run.place(lambda: build_wide(widths, width, base))
        groups = widths.groups(model, lr=lr, weight_decay=0.1)
    else:
        model = run.place(lambda: GPT(shape(width)))
        groups = [{"params": list(model.parameters()), "lr": lr, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    schedule = scaling.warmup_cosine(optimizer, warmup=max(run.total_steps // 10, 1), total=run.total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(train_set):
        step.run(model, loss_sum)
        step.update(optimizer, schedule, clip=1.0)
    valid_set = ByteWindows(corpus.valid[:VALIDATE_BYTES], CONTEXT)
    return run.evaluate(model, valid_set, bits_per_byte)["bits_per_byte"]


def on_rank(world: World, folder: str, settings: Settings, *words: Any) -> float:
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder))
        try:
            return train(run, *words)
        finally:
            close_run(run)


def row(name: str, steps: int, seeds: int, processes: int, rates: Sequence[float], *words: Any) -> None:
    """Train at each learning rate, and print the row."""
    width, base, maximal = words
    means = []
    for lr in rates:
        found = []
        for seed in range(seeds):
            settings = Settings(steps=steps, batch=32, seed=seed, checkpoint=CheckpointSettings(every=0))
            with tempfile.TemporaryDirectory() as folder:
                found.append(run_ranks(on_rank, processes, folder, settings, width, base, lr, maximal, seconds=HOUR)[0])
        means.append(sum(found) / len(found))
    cells = [f"**{mean:.3f}**" if mean == min(means) else f"{mean:.3f}" for mean in means]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--base", type=int, default=32, help="the width of the narrow model")
    words.add_argument("--width", type=int, default=128, help="the width of the wide one")
    words.add_argument("--steps", type=int, default=100)
    words.add_argument("--seeds", type=int, default=1)
    words.add_argument("--processes", type=int, default=1)
    given = words.parse_args()
    steps, rates = (2, RATES[:2]) if given.quick else (given.steps, RATES)
    how = steps, given.seeds, given.processes, rates
    print(f"| learning rate | {' | '.join(f'{rate:g}' for rate in rates)} |\n|---|{'---|' * len(rates)}")
    row(f"width {given.base}", *how, given.base, given.base, False)
    row(f"width {given.width}, standard", *how, given.width, given.base, False)
    row(f"width {given.width}, maximal updates", *how, given.width, given.base, True)


if __name__ == "__main__":
    main()
