"""What benchmarks/sites.py trains in each site: the text recipe's model, and what went through the line meanwhile.

torchrun ... benchmarks/sites_script.py --run-dir DIR --set ...
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

import unisono
from unisono.recipes import text
from unisono.recipes.datasets.python_source import ByteWindows, python_source

COUNTER = Path("/sys/class/net/wan0/statistics/tx_bytes")


@dataclass(frozen=True, kw_only=True)
class Settings(text.Settings):
    validate: bool = True  # or only train


def sent() -> int:
    """Bytes that this site has sent to the other one, headers and all."""
    return int(COUNTER.read_text()) if COUNTER.exists() else 0


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    corpus = python_source()
    train_set = ByteWindows(corpus.train, settings.model.context)
    model = run.place(lambda: text.GPT(settings.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=run.count_steps(train_set))
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    began, before, steps = time.perf_counter(), sent(), 0
    for step in run.steps(train_set):
        if step.number == 0:
            began, before = time.perf_counter(), sent()
        # the first step begins here, the last meeting is before the last one's end: steps - 1 whole ones
        steps, seconds, line = step.number, time.perf_counter() - began, sent() - before
        step.run(model, text.loss_sum)
        step.update(optimizer, schedule)
    run.log(loop_samples_per_second=steps * settings.batch / seconds, line_bytes_per_step=line / max(steps, 1))
    if settings.validate:
        valid_set = ByteWindows(corpus.valid[: settings.validate_bytes], settings.model.context)
        run.log(run.evaluate(model, valid_set, text.bits_per_byte))


if __name__ == "__main__":
    unisono.main(main, Settings)
