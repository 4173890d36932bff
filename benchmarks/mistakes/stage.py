"""Define cases and their processes. As a program, run a case in a process of another library.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.mistakes.stage schedule Accelerate FOLDER 0

It prints the line `figure {...}` for the caller, among the library's own output. It needs only torch.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from unisono import Run

ACCELERATE, TRAINER, FABRIC, DDP = "Accelerate", "Lightning Trainer", "Lightning Fabric", "DDP by hand"
"""The other columns of the table."""

MODULES = {
    "schedule": "schedule",
    "tokens": "tokens",
    "tail": "tail",
    "evaluation": "evaluation",
    "stream": "evaluation",
    "integers": "integers",
    "resume": "resume",
    "shuffle": "shuffle",
    "clipping": "clipping",
    "dropout": "dropout",
    "dropout-resumed": "dropout",
    "batch-norm": "batchnorm",
    "unused": "unused",
}
"""The cases in the order of the table, with their modules."""


@dataclass(frozen=True)
class Place:
    """A process that runs a case."""

    rank: int
    size: int
    folder: Path
    """A folder shared by all processes and launches of a case."""
    launch: int = 0
    """0, or 1 for the second launch of a case with a resume."""


Player = Callable[[Place], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A silent mistake and its measurement."""

    wrong: str  # the mistake, for the table
    right: str  # description of the right figure
    is_right: Callable[[Any], bool]
    describe: Callable[[Any], str]  # a figure as text
    peers: Mapping[str, Player]
    ours: Callable[[Run[Any], Place], Any]
    settings: Mapping[str, Any]  # of our run
    sizes: tuple[int, ...] = (2,)  # numbers of processes
    launches: int = 1
    note: str = ""  # how to get the right figure elsewhere


def case(name: str) -> Case:
    """Return a case by its name."""
    found: Case = import_module(f"benchmarks.mistakes.{MODULES[name]}").CASES[name]
    return found


def gather(value: Any) -> list[Any]:
    """Gather a value from all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main(name: str, player: str, folder: str, launch: str) -> None:
    """Run a case in a process of another library, and print the figure on rank 0."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    environment = import_module("os").environ
    place = Place(int(environment["RANK"]), int(environment["WORLD_SIZE"]), Path(folder), int(launch))
    figure = case(name).peers[player](place)
    if place.rank == 0:
        print(f"\nfigure {json.dumps(figure)}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
