"""Train a GPT, and write the speed and the peak memory of this process's devices for benchmarks/gpu/threads.py."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Literal

import torch

import unisono
from benchmarks.gpu.models import loss_of, tasks


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 40
    batch: int = 32
    virtual_ranks: int = 2
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    small: bool = False


def main(run: unisono.Run[Settings]) -> None:
    task = tasks(small=run.settings.small)["GPT"]
    model = run.place(task.build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.track(model=model, optimizer=optimizer)
    counted, began = 0, 0.0
    for step in run.steps(task.data(8 * run.settings.batch)):
        if step.number == run.total_steps // 2:
            counted, began = 0, time.perf_counter()
        for x, y in step:
            step.backward(loss_of(model(x), y), weight=y.numel())
            counted += len(x)
        step.update(optimizer)
    used = [torch.device("cuda", run.rank)] if run.size > 1 else [torch.device("cuda", i) for i in range(2)]
    memory = [torch.cuda.max_memory_allocated(device) for device in used] if run.device.type == "cuda" else []
    found = {"samples_per_second": counted / (time.perf_counter() - began), "memory": memory}
    (run.dir / f"measured-{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    unisono.main(main, Settings)
