"""Count the frames of Unisono on the stack where a step calls torch.

    python -m benchmarks.call_depth                  two processes, exchange=tree, one step
    python -m benchmarks.call_depth --chain          the functions of the deepest stack of each call, too

docs/design/gradient.md has the table. Contextlib's frames and those of torch are not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import unisono
from unisono.config import Settings
from unisono.distributed.init import join_process_group
from unisono.environment import World
from unisono.testing import build_run, close_run, run_ranks

LIBRARY = str(Path(unisono.__file__).parent)
CALLS = {
    ("_tensor.py", "backward"): "loss.backward()",
    ("distributed_c10d.py", "isend"): "a message of the exchange",
    ("distributed_c10d.py", "all_reduce"): "the all-reduce of losses and flags, and the commit",
    ("adam.py", "step"): "optimizer.step()",
}
"""(file of torch, function) -> its name in the table."""


def train(world: World, settings: Settings, folder: Path) -> dict[str, list[str]]:
    """Train for one step; return the deepest stack of our frames for each of `CALLS`."""
    deepest: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = CALLS.get((Path(frame.f_code.co_filename).name, frame.f_code.co_name)) if event == "call" else None
        if name is not None:
            stack = ours(frame)
            deepest[name] = max(deepest.get(name, []), stack, key=len)

    with join_process_group(world) as group:
        run = build_run(settings, world, group, folder)
        model = run.place(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(torch.utils.data.TensorDataset(torch.randn(64, 8))):
            sys.setprofile(note)
            for (x,) in step:
                step.backward(model(x).square().sum(), weight=len(x))
            step.update(optimizer)
            sys.setprofile(None)
        close_run(run)
    return deepest


def ours(frame: FrameType | None) -> list[str]:
    """Return the frames of the library on a stack, from the inside out."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(LIBRARY):
            file = Path(frame.f_code.co_filename).relative_to(LIBRARY)
            if file.parts[0] != "testing":
                found.append(f"{file}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--chain", action="store_true", help="print the functions of the deepest stack, too")
    arguments = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, _ = run_ranks(train, 2, Settings(steps=1), Path(folder))
    for name in CALLS.values():
        stack = found.get(name, [])
        print(f"| {name} | {len(stack)} |")
        if arguments.chain:
            print("".join(f"    {line}\n" for line in reversed(stack)), end="")


if __name__ == "__main__":
    main()
