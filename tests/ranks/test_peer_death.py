"""A dead peer is detected at once and named in the error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import wrap_peer_errors
from unisono.distributed.rendezvous.connect import CONNECT_TIMEOUT
from unisono.environment import World
from unisono.errors import PeerLostError, WorldError
from unisono.testing import run_ranks


def one_leaves(world: World) -> tuple[str, float]:
    """End the second process before the first one needs it. (Its group cannot be left in order after that.)"""
    group = join(world).__enter__()
    group.barrier()
    if world.rank == 1:
        return "left", 0.0
    before = time.monotonic()
    with pytest.raises(PeerLostError) as caught, wrap_peer_errors("Step 3's exchange"):
        group.sum_(torch.ones(3))
    return str(caught.value), time.monotonic() - before


def test_a_lost_peer_raises_peer_lost_error() -> None:
    (message, seconds), _ = run_ranks(one_leaves, 2)
    assert "Step 3's exchange failed: a process of the run is gone or silent" in message
    assert "gone or silent" in message
    assert seconds < 10


GATHERS = """
import os, sys
import torch, torch.distributed as dist
from unisono.environment import World
from unisono.distributed.init import join_process_group

rank = int(sys.argv[1])
core = (min, max)[rank](os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})  # gloo's thread has the news of the collective's end, and not yet the core again
with join_process_group(World(rank=rank, size=2, store="file://" + sys.argv[2])):
    sys.setswitchinterval(100)
    mine, all_ = torch.ones(3), [torch.ones(3), torch.ones(3)]
    dist.all_gather(all_, mine)
    del mine, all_
    raise SystemExit(3)
"""


def begin(script: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *words], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system chooses cores by itself")
def test_a_failure_just_after_a_collective_does_not_abort(tmp_path: Path) -> None:
    """A thread of gloo's was about to release tensors, which needs the interpreter: half of the processes aborted."""
    for number in range(2):
        ranks = [begin(GATHERS, str(rank), f"{tmp_path}/store-{number}") for rank in range(2)]
        output = [each.communicate(timeout=60)[1] for each in ranks]
        assert [each.returncode for each in ranks] == [3, 3], output


FAILS = """
import sys, time
import torch, torch.distributed as dist
from unisono.environment import World
from unisono.distributed import init

init.EXIT_SECONDS = 1.0
rank = int(sys.argv[1])
with init.join_process_group(World(rank=rank, size=2, store="file://" + sys.argv[2])) as group:
    if rank == 0:
        time.sleep(100)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    raise ValueError("a mistake")
"""


def test_a_failure_during_a_collective_ends_the_process(tmp_path: Path) -> None:
    """torch would wait until the other processes end, or for half an hour."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, str(rank), f"{tmp_path}/store"], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        _, output = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == 1
        assert output.rstrip().endswith("ValueError: a mistake"), output
        assert ranks[0].poll() is None
    finally:
        ranks[0].kill()
        ranks[0].communicate()


def other_errors(world: World) -> str:
    with pytest.raises(RuntimeError, match="size of tensor") as caught, wrap_peer_errors("Something"):
        torch.ones(2) + torch.ones(3)
    return type(caught.value).__name__


def test_other_errors_are_not_converted() -> None:
    assert run_ranks(other_errors, 1) == ["RuntimeError"]


def values(world: World) -> Any:
    with join(world) as group:
        gathered = group.all_gather_object({"rank": world.rank, "text": "ü" * world.rank})
        shared = group.broadcast_object("from " + str(world.rank) if world.rank == 0 else None)
        weights = torch.full((2, 3), float(world.rank)).t()
        group.broadcast_([weights])
        return gathered, shared, weights.tolist(), group.max_(torch.tensor([world.rank])).item()


@pytest.mark.parametrize("size", [1, 3])
def test_messages_arrive(size: int) -> None:
    for gathered, shared, weights, largest in run_ranks(values, size):
        assert gathered == [{"rank": r, "text": "ü" * r} for r in range(size)]
        assert shared == "from 0"
        assert weights == [[0.0, 0.0]] * 3
        assert largest == size - 1


def connects_late(world: World, failures: list[int]) -> tuple[int, float]:
    """Connect, while gloo fails on rank failures[n] in attempt n, although the others have connected."""
    connect, attempts = dist.init_process_group, 0

    def fail_sometimes(*args: Any, **kwargs: Any) -> None:
        nonlocal attempts
        attempts += 1
        connect(*args, **kwargs)
        if failures[attempts - 1 : attempts] == [world.rank]:
            raise RuntimeError("Gloo connectFullMesh failed: timed out")

    dist.init_process_group = fail_sometimes
    with join(world) as group:
        return attempts, group.sum_(torch.ones(1)).item()


def test_all_processes_reconnect_if_one_could_not_connect() -> None:
    assert run_ranks(connects_late, 3, [1, 0]) == [(3, 3.0)] * 3


def connects_never(world: World) -> str:
    with pytest.raises(WorldError) as caught:
        connects_late(world, [1] * 5)
    return str(caught.value)


def test_a_process_that_never_connects_raises_world_error() -> None:
    message = run_ranks(connects_never, 2)
    assert "All are started, but 5 attempts failed: Gloo connectFullMesh failed" in message[1]
    assert "5 attempts failed: another process could not connect" in message[0]


def failed_before(world: World) -> float:
    """Fail an attempt to connect in this process, which torch has counted."""
    distributed_c10d._world.group_count = world.rank
    before = time.monotonic()
    with join(world) as group:
        assert group.sum_(torch.ones(1)).item() == 2.0
    return time.monotonic() - before


def test_a_process_whose_first_attempt_failed_connects() -> None:
    assert max(run_ranks(failed_before, 2)) < CONNECT_TIMEOUT.total_seconds()
