"""What a checkpoint costs: how long training stands still when it is written beside the steps, and when they wait.

    python -m benchmarks.checkpoint            about two minutes; --ours leaves torch's out
    python -m benchmarks.checkpoint --quick    a smoke test

One process, a model with AdamW's state of 240 MB, in a real run. Saves take turns, on one disk: `waiting`
(checkpoint.async_save=false), `beside` (true), and torch's own, torch.save and the asynchronous save of
torch.distributed.checkpoint, for the same state into files of their own (neither hashes, and torch.save does not wait
for the disk). Stall is the time until the loop may go on. After each save come the same steps of computing, so that
what a writer beside them takes from them is seen as well; the next turn begins when it has ended.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.machine import Spread, parser, ratio, show, spread
from unisono.config import CheckpointSettings, Settings
from unisono.distributed.init import join_process_group
from unisono.environment import World
from unisono.testing import build_run, close_run
from unisono.train.run import Run
from unisono.train.state.save_state import save_checkpoint

WIDTH = 1582
"""Eight layers of it have 20 million parameters: 80 MB, and twice that in AdamW's state."""


def build(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


class Bench:
    """A run that is saved now and then, in one way after the other."""

    def __init__(self, run: Run[Any], width: int, steps: int, folder: Path) -> None:
        self.run, self.steps, self.folder = run, steps, folder
        self.model = run.place(lambda: build(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        run.track(model=self.model, optimizer=self.optimizer)
        self.x = torch.randn(16, width)
        self.step()
        self.future: Any = None

    @property
    def bytes(self) -> int:
        state = [t for of in self.optimizer.state.values() for t in of.values()]
        return sum(t.nbytes for t in [*self.model.parameters(), *state])

    def step(self) -> None:
        self.model(self.x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def waiting(self) -> None:
        save_checkpoint(self.run.context)

    def beside(self) -> None:
        save_checkpoint(self.run.context, in_background=True)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def torch_save(self) -> None:
        torch.save(self.state(), self.folder / "torch.pt")

    def torch_async(self) -> None:
        flat = dict(self.model.state_dict())
        flat |= {f"{i}.{name}": t for i, of in enumerate(self.optimizer.state.values()) for name, t in of.items()}
        self.future = dcp.async_save(flat, checkpoint_id=str(self.folder / "dcp"))

    def end(self) -> None:
        """Until nothing is being written any more."""
        self.run.context.state.settle()
        if self.future is not None:
            self.future.result()
            self.future = None

    def turn(self, save: Callable[[], None]) -> tuple[float, float]:
        """(the stall, the steps after it), in seconds."""
        self.run.context.progress.steps_done += 1
        began = time.perf_counter()
        save()
        stalled = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        computed = time.perf_counter()
        self.end()
        return stalled - began, computed - stalled


def measure(rounds: int, width: int, steps: int, folder: Path, *, torchs: bool) -> dict[str, Any]:
    """Stall and steps of each way to save, over so many rounds; `torchs`: of torch's own as well."""
    torch.set_num_threads(1)
    world = World(rank=0, size=1, local_rank=0, local_size=1, store=f"file://{folder}/store", launcher="test")
    settings = Settings(steps=10_000, virtual_ranks=1, checkpoint=CheckpointSettings(keep=1))
    with join_process_group(world) as alone:
        run = build_run(settings, world, alone, folder)
        bench = Bench(run, width, steps, folder)
        ways = {"waiting": bench.waiting, "beside": bench.beside}
        if torchs:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            ways |= {"torch.save": bench.torch_save, "torch's async_save": bench.torch_async}
        first = bench.turn(bench.beside)[0]  # makes the memory
        for save in ways.values():
            bench.turn(save)
        nothing = [bench.turn(lambda: None)[1] for _ in range(rounds)]
        told: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(rounds):
            for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
                told[name].append(bench.turn(ways[name]))
        size = bench.bytes
        close_run(run)
        if torchs:
            dist.destroy_process_group()
    stalls = {name: [stall for stall, _ in turns] for name, turns in told.items()}
    return {
        "bytes": size,
        "first_beside_seconds": first,
        "steps_alone_seconds": spread(nothing),
        "stall_seconds": {name: spread(values) for name, values in stalls.items()},
        "steps_seconds": {name: spread([after for _, after in turns]) for name, turns in told.items()},
        "stall_beside_over_waiting": ratio(stalls["beside"], stalls["waiting"]),
    }


def table(figures: dict[str, Any]) -> str:
    lines = [f"{figures['bytes'] / 1e6:.0f} MB      stall, ms                 the steps after it, s"]
    alone: Spread = figures["steps_alone_seconds"]
    lines.append(f"{'no save':20} {'':27} {alone:.2f}")
    for name, stall in figures["stall_seconds"].items():
        in_ms = f"{Spread(*(1000 * value for value in stall)):.0f}"
        lines.append(f"{name:20} {in_ms:27} {figures['steps_seconds'][name]:.2f}")
    lines.append(f"beside over waiting  {figures['stall_beside_over_waiting']:.3f}")
    lines.append(f"the first one beside, which makes the memory: {1000 * figures['first_beside_seconds']:.0f} ms")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--ours", action="store_true", help="leave torch's own out")
    asked = flags.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    rounds, width, steps = (2, 100, 2) if asked.quick else (asked.rounds, WIDTH, 6)
    folder = Path(tempfile.mkdtemp(prefix="unisono-bench-"))
    try:
        figures = measure(rounds, width, steps, folder, torchs=not asked.ours)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show("checkpoint", figures, lambda: table(figures), as_json=asked.json)


if __name__ == "__main__":
    main()
