"""Measure the memory of placing a model that is divided over processes, and of loading it from a checkpoint.

    python -m benchmarks.placing            about ten minutes, 24 GB of memory
    python -m benchmarks.placing --quick    a smoke test

The model has 2 GB of parameters in 62 equal layers, and is placed on four processes. A process's part is its share of
the parameters; replicas hold all of them. The figure is the increase of a process's peak resident memory (Linux's
VmHWM) over its memory before run.place, or, in the second column, from run.place to the end of run.track with a
checkpoint. It is the largest of the four processes. "part + layer" is what a placement needs at least: its part, and
the largest layer.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.machine import parser, show
from benchmarks.memory import kilobytes, reset_peak
from unisono.config import CheckpointSettings, ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, finish_run, run_ranks

SIZE = 4
ROWS: dict[str, dict[str, Any]] = {
    "replicate=4": {},
    "shard=4": {"shard": 4},
    "shard=4 reshard=step": {"shard": 4, "reshard": "step"},
    "tensor=4": {"tensor": 4},
    "pipeline=4": {"pipeline": 4},
    "shard=2 tensor=2": {"shard": 2, "tensor": 2},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(torch.relu(self.fc1(x)))
        return x + 0.01 * y


class Net(nn.Module):
    """A row of equal layers with the names of a transformer's, of 8 * width**2 parameters each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


def measure_rank(
    world: World, parallel: dict[str, Any], layers: int, width: int, folder: str, phase: str
) -> tuple[float, float]:
    """Return the increase of this process's peak memory, and the memory that it keeps, in MB."""
    settings = Settings(
        steps=1 if phase == "save" else 2,
        batch=SIZE,
        virtual_ranks=SIZE,
        parallel=ParallelSettings(**parallel),
        checkpoint=CheckpointSettings(async_save=False),
    )
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder), resume=phase == "load")
        gc.collect()
        before = reset_peak()
        model = run.place(lambda: Net(layers, width))
        if phase != "place":
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            run.track(model=model, optimizer=optimizer)
        peak = kilobytes("VmHWM") - before
        gc.collect()
        kept = kilobytes("VmRSS") - before
        if phase == "save":
            for step in run.steps(TensorDataset(torch.ones(SIZE, width))):
                step.run(model, loss_of)
                step.update(optimizer)
            finish_run(run)
        close_run(run)
    return peak / 1024, kept / 1024


def measure(name: str, layers: int, width: int) -> dict[str, Any]:
    parallel = ROWS[name]
    layer = 8 * width**2 * 4 / 2**20
    whole = layer * layers
    with tempfile.TemporaryDirectory() as folder:

        def peak(phase: str) -> float:
            ranks = run_ranks(measure_rank, SIZE, parallel, layers, width, folder, phase, seconds=900.0)
            return float(max(found for found, _ in ranks))

        row = {"placement": name, "part_and_layer": (whole / SIZE if parallel else whole) + layer}
        row["placing"] = peak("place")
        if parallel:  # four replicas that train need more memory than this machine has
            peak("save")
            row["loading"] = peak("load")
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'MB':22}  part + layer  run.place  resumed"]
    for row in rows:
        loading = f"{row['loading']:7.0f}" if "loading" in row else ""
        lines.append(f"{row['placement']:22}  {row['part_and_layer']:12.0f}  {row['placing']:9.0f}  {loading}".rstrip())
    return "\n".join(lines)


def main() -> None:
    args = parser(__doc__).parse_args()
    layers, width = (16, 256) if args.quick else (62, 1024)
    rows = [measure(name, layers, width) for name in ROWS]
    show("placing", {"rows": rows}, lambda: table(rows), as_json=args.json)


if __name__ == "__main__":
    main()
