"""Train the text recipe's model for int4 weights, and compare it with a model that is quantized after training.

Both train for the same number of steps, from the same initial weights, on the same batches. One of them rounds its
weights in every forward pass (quantization-aware training, arXiv 1712.05877). Then torchao quantizes the linear layers
of both, and the quantized weights are evaluated on held-out files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

from benchmarks.machine import parser
from unisono.config import Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.recipes.datasets.python_source import ByteWindows, load_python_source
from unisono.recipes.text import GPT, Model, bits_per_byte, loss_sum
from unisono.testing import build_run, run_ranks
from unisono.train.run import Run

VALIDATE_BYTES = 2**16
LEARNING_RATE = 7e-3

INT4: Any = vars(torch)["int4"]


def train(run: Run[Any], *, aware: bool) -> tuple[float, float]:
    """Train, and return the bits per byte of the model before and after its conversion to int4."""
    corpus, shape = load_python_source(), Model()
    train_set = ByteWindows(corpus.train, shape.context)
    valid_set = ByteWindows(corpus.valid[:VALIDATE_BYTES], shape.context)
    config = IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32))

    def build() -> GPT:
        model = GPT(shape)
        if aware:
            quantize_(model, QATConfig(config, step="prepare"))
        return model

    model = run.place(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=run.total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(train_set):
        step.run(model, loss_sum)
        step.update(optimizer, schedule, clip=1.0)
    before = run.evaluate(model, valid_set, bits_per_byte)["bits_per_byte"]
    if aware:
        quantize_(model, QATConfig(step="convert"))
    quantize_(model, config)
    return before, run.evaluate(model, valid_set, bits_per_byte)["bits_per_byte"]


def on_rank(world: World, folder: str, settings: Settings, aware: bool) -> tuple[float, float]:
    path = Path(folder)
    with join(world) as group:
        return train(build_run(settings, world, group, path), aware=aware)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--steps", type=int, default=200)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--processes", type=int, default=2)
    given = words.parse_args()
    print("| seed | int4 after training: before, after | int4-aware training: before, after |\n|---|---|---|")
    for seed in range(given.seeds):
        settings, cells = Settings(steps=given.steps, batch=64, seed=seed), []
        for aware in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                before, after = run_ranks(on_rank, given.processes, folder, settings, aware)[0]
            cells.append(f"{before:.4f}, {after:.4f}")
        print(f"| {seed} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
