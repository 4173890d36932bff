"""Train a small model of the text recipe for int4 weights, and compare it with one that is quantized after training.

A model trains in float. Then two copies of it continue on the same batches, with the same learning rates. One of them
rounds its weights in every forward pass (quantization-aware training, arXiv 1712.05877). At the end torchao quantizes
the linear layers of both, and the quantized weights are evaluated on held-out files. With --from-scratch there is no
common start: both train from the same initial weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

from benchmarks.machine import parser
from unisono import SavedWeights
from unisono.config import CheckpointSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.recipes.datasets.python_source import ByteWindows, load_python_source
from unisono.recipes.text import GPT, Model, bits_per_byte, loss_sum
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run

HOUR = 3600.0
SHAPE = Model(width=64, depth=2, context=64)
"""A smaller model than the recipe's, with 0.1 million parameters."""

VALIDATE_BYTES = 2**15
LEARNING_RATE, CONTINUED_RATE = 7e-3, 2e-3

CONFIG = IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"], granularity=PerGroup(32))


def train(run: Run[Any], start: str, *, aware: bool) -> tuple[float, float]:
    """Train, and return the bits per byte of the model before and after its conversion to int4."""
    corpus = load_python_source()
    train_set = ByteWindows(corpus.train, SHAPE.context)
    valid_set = ByteWindows(corpus.valid[:VALIDATE_BYTES], SHAPE.context)

    def build() -> GPT:
        model = GPT(SHAPE)
        if start:
            SavedWeights(start).load(model)
        if aware:
            quantize_(model, QATConfig(CONFIG, step="prepare"))
        return model

    model, rate = run.place(build), CONTINUED_RATE if start else LEARNING_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=run.total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(train_set):
        step.run(model, loss_sum)
        step.update(optimizer, schedule, clip=1.0)
    before = run.evaluate(model, valid_set, bits_per_byte)["bits_per_byte"]
    if aware:
        quantize_(model, QATConfig(step="convert"))
    quantize_(model, CONFIG)
    return before, run.evaluate(model, valid_set, bits_per_byte)["bits_per_byte"]


def on_rank(world: World, folder: str, settings: Settings, start: str, aware: bool) -> tuple[float, float]:
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder))
        try:
            return train(run, start, aware=aware)
        finally:
            close_run(run)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--steps", type=int, default=200, help="steps of the common start")
    words.add_argument("--more", type=int, default=100, help="steps after it")
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--processes", type=int, default=2)
    words.add_argument("--from-scratch", action="store_true", help="train both STEPS + MORE steps from the start")
    given = words.parse_args()
    steps, more = (2, 2) if given.quick else (given.steps, given.more)
    print("| seed | float | int4 after training | int4-aware | int4-aware, converted |\n|---|---|---|---|---|")
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            start = "" if given.from_scratch else f"{folder}/start"
            settings = Settings(steps=steps, batch=32, seed=seed, checkpoint=CheckpointSettings(every=steps))
            if start:
                run_ranks(on_rank, given.processes, start, settings, "", False, seconds=HOUR)
            settings = Settings(steps=more if start else steps + more, batch=32, seed=seed + 100)
            cells = [
                value
                for aware in (False, True)
                for value in run_ranks(
                    on_rank, given.processes, f"{folder}/{aware}", settings, start, aware, seconds=HOUR
                )[0]
            ]
        print(f"| {seed} | {' | '.join(f'{value:.4f}' for value in cells)} |", flush=True)


if __name__ == "__main__":
    main()
