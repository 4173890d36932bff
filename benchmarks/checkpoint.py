"""Measure how long a checkpoint stops training, with synchronous and asynchronous saves.

    python -m benchmarks.checkpoint            about two minutes; --ours skips torch's own
    python -m benchmarks.checkpoint --quick    a smoke test

One process trains a model with 240 MB of weights and AdamW state. Kinds of saves alternate: `sync`
(checkpoint.async_save=false), `async` (true), torch.save, and the asynchronous save of torch.distributed.checkpoint.
Torch's two write the same state without hashes, and torch.save does not wait for the disk. The stall is the time until
the loop can continue. Each save is followed by the same steps, whose time shows how much a background writer slows them
down. The next save starts after the writer has ended.
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
"""Width of 8 layers with 20 million parameters: 80 MB, and twice that in AdamW's state."""


def build(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


class Bench:
    """A run with each kind of save."""

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
        state = [t for values in self.optimizer.state.values() for t in values.values()]
        return sum(t.nbytes for t in [*self.model.parameters(), *state])

    def step(self) -> None:
        self.model(self.x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_sync(self) -> None:
        save_checkpoint(self.run.context)

    def save_async(self) -> None:
        save_checkpoint(self.run.context, in_background=True)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def torch_save(self) -> None:
        torch.save(self.state(), self.folder / "torch.pt")

    def torch_async(self) -> None:
        flat = dict(self.model.state_dict())
        for i, values in enumerate(self.optimizer.state.values()):
            flat |= {f"{i}.{name}": t for name, t in values.items()}
        self.future = dcp.async_save(flat, checkpoint_id=str(self.folder / "dcp"))

    def wait(self) -> None:
        """Wait until all background writers have ended."""
        self.run.context.state.settle()
        if self.future is not None:
            self.future.result()
            self.future = None

    def measure(self, save: Callable[[], None]) -> tuple[float, float]:
        """Save once, and return the seconds of the stall and of the steps after it."""
        self.run.context.progress.steps_done += 1
        start = time.perf_counter()
        save()
        saved = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        computed = time.perf_counter()
        self.wait()
        return saved - start, computed - saved


def measure(rounds: int, width: int, steps: int, folder: Path, *, with_torch: bool) -> dict[str, Any]:
    """Measure stall and steps of each kind of save, `rounds` times; `with_torch` includes torch's own."""
    torch.set_num_threads(1)
    world = World(rank=0, size=1, local_rank=0, local_size=1, store=f"file://{folder}/store", launcher="test")
    settings = Settings(steps=10_000, virtual_ranks=1, checkpoint=CheckpointSettings(keep=1))
    with join_process_group(world) as group:
        run = build_run(settings, world, group, folder)
        bench = Bench(run, width, steps, folder)
        saves = {"sync": bench.save_sync, "async": bench.save_async}
        if with_torch:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            saves |= {"torch.save": bench.torch_save, "torch's async_save": bench.torch_async}
        first = bench.measure(bench.save_async)[0]  # allocates the buffers
        for save in saves.values():
            bench.measure(save)
        no_save = [bench.measure(lambda: None)[1] for _ in range(rounds)]
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
        for number in range(rounds):
            for name in list(saves)[number % len(saves) :] + list(saves)[: number % len(saves)]:
                seconds[name].append(bench.measure(saves[name]))
        size = bench.bytes
        close_run(run)
        if with_torch:
            dist.destroy_process_group()
    stalls = {name: [stall for stall, _ in pairs] for name, pairs in seconds.items()}
    return {
        "bytes": size,
        "first_async_seconds": first,
        "steps_alone_seconds": spread(no_save),
        "stall_seconds": {name: spread(values) for name, values in stalls.items()},
        "steps_seconds": {name: spread([after for _, after in pairs]) for name, pairs in seconds.items()},
        "stall_async_over_sync": ratio(stalls["async"], stalls["sync"]),
    }


def table(figures: dict[str, Any]) -> str:
    lines = [f"{figures['bytes'] / 1e6:.0f} MB      stall, ms                 the steps after it, s"]
    alone: Spread = figures["steps_alone_seconds"]
    lines.append(f"{'no save':20} {'':27} {alone:.2f}")
    for name, stall in figures["stall_seconds"].items():
        in_ms = f"{Spread(*(1000 * value for value in stall)):.0f}"
        lines.append(f"{name:20} {in_ms:27} {figures['steps_seconds'][name]:.2f}")
    lines.append(f"async over sync      {figures['stall_async_over_sync']:.3f}")
    lines.append(f"first async save, which allocates buffers: {1000 * figures['first_async_seconds']:.0f} ms")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--ours", action="store_true", help="skip torch's own saves")
    args = flags.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    rounds, width, steps = (2, 100, 2) if args.quick else (args.rounds, WIDTH, 6)
    folder = Path(tempfile.mkdtemp(prefix="unisono-bench-"))
    try:
        figures = measure(rounds, width, steps, folder, with_torch=not args.ours)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show("checkpoint", figures, lambda: table(figures), as_json=args.json)


if __name__ == "__main__":
    main()
