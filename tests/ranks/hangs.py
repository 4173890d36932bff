"""Training runs that hang in different ways, and the report of the hang watcher."""

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
    """A data set that hangs on rank 1 after twenty samples."""

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
    """Wait for a message of another rank, on every rank."""
    dist.recv(torch.zeros(7), src=(run.rank + 1) % run.size)


def train(world: World, folder: str, name: str, size: int) -> None:
    """Train, and end the process when a failure is recorded."""
    failure_record.write_to(Path(folder) / f"rank-{world.rank}.json")
    threading.Thread(target=_leave_with_the_run, args=(Path(folder),), daemon=True).start()
    train_here(world, folder, name, size)


def train_alone(world: World, folder: str, name: str) -> None:
    """Train without our launcher; standard error goes to a file."""
    os.dup2(os.open(Path(folder, f"said-{world.rank}"), os.O_WRONLY | os.O_CREAT), 2)
    train_here(world, folder, name, world.size)


def meet(world: World, folder: Path, size: int) -> None:
    """Wait until all processes have started.

    On a busy machine starting takes longer than the time limit, and the last process would be reported as missing.
    """
    (folder / f"here-{world.rank}").touch()
    while len(list(folder.glob("here-*"))) < size:
        time.sleep(0.01)


def train_here(world: World, folder: str, name: str, size: int) -> None:
    body, fault = {**HANGS, **SLOW}[name]
    meet(world, Path(folder), size)
    silent = socket.create_server(("127.0.0.1", 0))
    if name == "a dead store":  # rank 0 hosts it, and its port accepts connections without answering
        store = f"hosted://127.0.0.1:{silent.getsockname()[1]}/17.0-0"
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
    """Return the number of ranks that pass True."""
    count = torch.tensor([float(mine)])
    dist.all_reduce(count)
    return count.item()


def by_hand(run: Any, step: Any) -> None:
    """Run collectives of the script's own for longer than the time limit."""
    until = time.monotonic() + 4 * LIMIT_SECONDS
    while together(time.monotonic() < until) == run.size:
        time.sleep(LIMIT_SECONDS / 4)


SLOW: dict[str, tuple[Body | str | None, Fault | None]] = {
    "own collectives": (by_hand, None),
    "a rank computes": (None, HangAt(STEP, "update", kind="spin", seconds=4 * LIMIT_SECONDS)),
}
"""Runs that take longer than the time limit and do not hang."""

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
    """Return the recorded message of a hang, and the rank for which it is recorded."""
    with HangWatcher(folder, verbose=False), contextlib.suppress(AssertionError, TimeoutError):
        run_ranks(train, size, str(folder), name, size, seconds=40)
    (path,) = folder.glob("rank-*.json")
    found = failure_record.read(path)
    assert found is not None
    assert found.kind == "StuckError"
    return found.message, int(path.stem.removeprefix("rank-"))
