"""Trainings that stand still, each in another way, and what a lookout says of them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks import training
from unisono.config import LoaderSettings, Settings, WatchdogSettings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.launcher import failure_record
from unisono.launcher.hang_watcher import HangWatcher
from unisono.monitor.status_thread import StatusThread
from unisono.testing import HangAt, LostPackets, build_run, run_ranks
from unisono.testing.faults import Fault, sleep

LIMIT_SECONDS = 1.0
STEP = 2

Body = Callable[[Any, Any], None]


class Sleepy(torch.utils.data.Dataset):
    """Fetches nothing more from the fortieth sample on, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.fetched = rank, 0

    def __len__(self) -> int:
        return 101

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fetched += 1
        if self.rank == 1 and self.fetched > 20:
            sleep()
        return torch.ones(12), torch.tensor(1)


def sleeps(run: Any, step: Any) -> None:
    if run.rank == 1:
        time.sleep(1e6)


def in_another_collective(run: Any, step: Any) -> None:
    if run.rank == 1:
        dist.recv(torch.zeros(7), src=0, tag=99)


def uneven_loop(run: Any, step: Any) -> None:
    for _ in range(3 + run.rank):
        dist.barrier()


def locked_twice(run: Any, step: Any) -> None:
    lock = threading.Lock()
    for _ in range(1 + run.rank):
        lock.acquire()


def waits_for_a_file(run: Any, step: Any) -> None:
    while run.rank == 1 and not (run.dir / "never").exists():
        time.sleep(0.1)


def all_elsewhere(run: Any, step: Any) -> None:
    """Each waits for another one's message."""
    dist.recv(torch.zeros(7), src=(run.rank + 1) % run.size)


def train(world: World, folder: str, name: str, size: int) -> None:
    """Ends with the process, one way or the other."""
    failure_record.write_to(Path(folder) / f"rank-{world.rank}.json")
    threading.Thread(target=_leave_with_the_run, args=(Path(folder),), daemon=True).start()
    train_here(world, folder, name, size)


def train_alone(world: World, folder: str, name: str) -> None:
    """Nobody has started us who would look; what is said goes to a file."""
    os.dup2(os.open(Path(folder, f"said-{world.rank}"), os.O_WRONLY | os.O_CREAT), 2)
    train_here(world, folder, name, world.size)


def meet(world: World, folder: Path, size: int) -> None:
    """All have been started before the limit of anybody begins: on a busy machine that takes longer than the limit, and
    whoever comes last would be the one who never came."""
    (folder / f"here-{world.rank}").touch()
    while len(list(folder.glob("here-*"))) < size:
        time.sleep(0.01)


def train_here(world: World, folder: str, name: str, size: int) -> None:
    body, fault = {**HANGS, **SLOW}[name]
    meet(world, Path(folder), size)
    nobody = socket.create_server(("127.0.0.1", 0))
    if name == "a dead store":  # its host is rank 0, where somebody hears and does not answer
        store = f"hosted://127.0.0.1:{nobody.getsockname()[1]}/17.0-0"
        world = replace(world, rank=world.rank + 1, size=size + 1, store=store)
    config = replace(
        Settings(steps=6, batch=16, virtual_ranks=size),
        watchdog=WatchdogSettings(timeout=LIMIT_SECONDS),
        loader=LoaderSettings(workers=int(body == "worker")),
    )
    data = Sleepy(world.rank) if body == "worker" else training.Points(101)
    with StatusThread(config.watchdog, world), join(world) as group:
        if name == "before the first step" and world.rank == 1:
            sleep()
        run = build_run(config, world, group, Path(folder) / "run")
        model = run.place(training.MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        with fault if fault is not None and world.rank == 1 else contextlib.nullcontext():
            for step in run.steps(data):
                for x, y in step:
                    if step.number == STEP and callable(body):
                        body(run, step)
                    step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(x))
                step.update(optimizer)


def _leave_with_the_run(folder: Path) -> None:
    while not list(folder.glob("rank-*.json")):
        time.sleep(0.05)
    os._exit(1)


def together(mine: bool) -> float:
    """How many say yes."""
    said = torch.tensor([float(mine)])
    dist.all_reduce(said)
    return said.item()


def by_hand(run: Any, step: Any) -> None:
    """An evaluation of one's own, with collectives of its own, for longer than the limit."""
    until = time.monotonic() + 4 * LIMIT_SECONDS
    while together(time.monotonic() < until) == run.size:
        time.sleep(LIMIT_SECONDS / 4)


SLOW: dict[str, tuple[Body | str | None, Fault | None]] = {
    "own collectives": (by_hand, None),
    "a rank computes": (None, HangAt(STEP, "update", kind="spin", seconds=4 * LIMIT_SECONDS)),
}
"""What takes longer than the limit, and is not stuck."""

HANGS: dict[str, tuple[Body | str | None, Fault | None]] = {
    "a rank sleeps": (sleeps, None),
    "a rank is in another collective": (in_another_collective, None),
    "a loader's worker blocks": ("worker", None),
    "an uneven loop": (uneven_loop, None),
    "a dead store": (None, None),
    "a lock is taken twice": (locked_twice, None),
    "a file never comes": (waits_for_a_file, None),
    "all are elsewhere": (all_elsewhere, None),
    "the system stops it": (None, HangAt(STEP, "backward", kind="stop")),
    "compiled code holds the interpreter": (None, HangAt(STEP, "forward", kind="hold")),
    "packets are lost": (None, LostPackets(STEP, "backward")),
    "the checkpoint": (None, HangAt(5, "checkpoint")),
    "before the first step": (None, None),
}


def play(folder: Path, name: str, size: int = 3) -> tuple[str, int]:
    """What is recorded of a hang, and for which rank."""
    with HangWatcher(folder, verbose=False), contextlib.suppress(AssertionError, TimeoutError):
        run_ranks(train, size, str(folder), name, size, seconds=40)
    (path,) = folder.glob("rank-*.json")
    found = failure_record.read(path)
    assert found is not None
    assert found.kind == "StuckError"
    return found.message, int(path.stem.removeprefix("rank-"))
