"""The script that alone.py measures for Unisono.

unisono run benchmarks/race/script.py --ranks 2 --set task=CNN
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import unisono
from benchmarks.race.alone import SIZE, STEPS, make_setup, peak_mib, report


@dataclass(frozen=True)
class Settings(unisono.Settings):
    steps: int = STEPS
    virtual_ranks: int = SIZE
    threads: int = 1
    task: str = "CNN"  # of benchmarks/tasks.py
    batch: int = 32


def main(run: unisono.Run[Settings]) -> None:
    setup = make_setup(run.settings.task, run.rank, run.dir)
    model = run.place(setup.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run.track(model=model, optimizer=optimizer)
    first, peak = 0.0, 0.0
    for step in run.steps(setup.data, shuffle=False):
        for x, y in step:
            step.backward(setup.loss(model(x), y, "sum"), weight=y.numel())
        step.update(optimizer)
        first, peak = first or time.time(), peak_mib()
    report(first, peak)


if __name__ == "__main__":
    unisono.main(main, Settings)
