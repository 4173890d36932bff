"""Train the text recipe's model at one site, and count the bytes it sends. benchmarks/sites.py starts this script.

torchrun ... benchmarks/sites_script.py --run-dir DIR --set ...
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

import unisono
from unisono.recipes import text
from unisono.recipes.datasets.python_source import ByteWindows, load_python_source

COUNTER = Path("/sys/class/net/wan0/statistics/tx_bytes")


@dataclass(frozen=True, kw_only=True)
class Settings(text.Settings):
    validate: bool = True  # evaluate after training


def bytes_sent() -> int:
    """Return the bytes that this site has sent to the other one, including headers."""
    return int(COUNTER.read_text()) if COUNTER.exists() else 0


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    corpus = load_python_source()
    train_set = ByteWindows(corpus.train, settings.model.context)
    model = run.place(lambda: text.GPT(settings.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=run.count_steps(train_set))
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    start, before, steps = time.perf_counter(), bytes_sent(), 0
    for step in run.steps(train_set):
        if step.number == 0:
            start, before = time.perf_counter(), bytes_sent()
        # This counts complete steps, without the last: its synchronization ends after this line.
        steps, seconds, line = step.number, time.perf_counter() - start, bytes_sent() - before
        step.run(model, text.loss_sum)
        step.update(optimizer, schedule)
    run.log(loop_samples_per_second=steps * settings.batch / seconds, line_bytes_per_step=line / max(steps, 1))
    if settings.validate:
        valid_set = ByteWindows(corpus.valid[: settings.validate_bytes], settings.model.context)
        run.log(run.evaluate(model, valid_set, text.bits_per_byte))


if __name__ == "__main__":
    unisono.main(main, Settings)
