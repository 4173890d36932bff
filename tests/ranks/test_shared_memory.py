"""Shared memory: the processes that find each other, the values that they read, and the release of memory."""

from __future__ import annotations

import errno
import gc
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import wrap_peer_errors
from unisono.distributed.shared_memory import LABEL, SharedMemory, SharedName, find_neighbors, map_shared_memory
from unisono.environment import World
from unisono.errors import PeerLostError, WorldError
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.testing import run_ranks


def held() -> int:
    """Return the number of shared memories that this process has open or mapped."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").count(f"memfd:{LABEL}")
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return mapped + sum(LABEL in link for link in links)


def write_to_each_other(world: World) -> Any:
    with join(world) as group:
        mine = SharedMemory(size=group.size)
        everybody = [SharedName(*name) for name in group.all_gather_object(mine.name)]
        theirs = {rank: map_shared_memory(pid, everybody[rank], group.size) for rank, pid in group.neighbors.items()}
        for memory in theirs.values():
            memory[group.rank] = 10 + group.rank
        group.barrier()
        found, most = mine.bytes.tolist(), held()
        group.barrier()
        del mine, theirs, memory
        gc.collect()
        return found, most, held(), os.getpid(), dict(group.neighbors)


def test_one_process_reads_what_another_writes_and_nothing_is_left() -> None:
    ranks = run_ranks(write_to_each_other, 3)
    pids = [pid for *_, pid, _ in ranks]
    for rank, (found, most, left, _, neighbors) in enumerate(ranks):
        assert found == [0 if r == rank else 10 + r for r in range(3)]
        assert neighbors == {r: pids[r] for r in range(3) if r != rank}
        assert (most, left) == (5, 0)  # three mapped, and our own open twice: for its neighbors, and for torch


def some_may_not(world: World) -> Any:
    """Remove memfd_create on rank 1; the others share memory among themselves, and the sum is the same."""
    if world.rank == 1:
        os.memfd_create = refuse  # type: ignore[assignment]
    with join(world) as group:
        p = nn.Parameter(torch.zeros(100))
        exchange = TreeExchange([p], 3, group)
        exchange.begin(((0, 1), (1, 2), (2, 3)), {group.rank: 1}, lambda: torch.ones(1, dtype=torch.float64))
        exchange.enter(group.rank, last=True)
        (p * 0.1**group.rank).sum().backward()
        exchange.leave()
        exchange.launch()
        exchange.finish(3.0)
        exchange.commit()
        assert p.grad is not None
        found = sorted(group.neighbors), p.grad.unique().tolist()
        group.barrier()
        gc.disable()
        before = held()
        exchange.close()
        return *found, (before, held())


def refuse(*_: Any) -> int:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_processes_without_shared_memory_send_messages_and_a_closed_exchange_frees_all() -> None:
    ranks = run_ranks(some_may_not, 3)
    assert [neighbors for neighbors, *_ in ranks] == [[2], [], [0]]
    tenth = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float32)
    assert [sums for _, sums, _ in ranks] == [[((tenth[0] + (tenth[1] + tenth[2])) / 3.0).item()]] * 3
    # ours, mapped and open twice, and the neighbor's: all released when the exchange is closed, without a collector
    assert [held for *_, held in ranks] == [(4, 0), (0, 0), (4, 0)]


def one_leaves(world: World) -> str:
    """End the second process before the first one opens its memory. (Its group cannot be left in order after that.)"""
    group = join(world).__enter__()
    mine = SharedMemory(8)
    _, name = (SharedName(*name) for name in group.all_gather_object(mine.name))
    if world.rank == 1:
        return "left"
    path = Path(f"/proc/{group.neighbors[1]}/fd/{name.descriptor}")
    while os.path.lexists(path):
        time.sleep(0.01)
    with pytest.raises(PeerLostError) as caught, wrap_peer_errors("Step 3's exchange"):
        map_shared_memory(group.neighbors[1], name, 8)
    return str(caught.value)


def test_a_lost_neighbor_raises_peer_lost_error() -> None:
    told, _ = run_ranks(one_leaves, 2)
    assert "Step 3's exchange failed: a process of the run is gone or silent" in told
    assert "memory closed by peer" in told


def no_more_descriptors(world: World) -> str:
    with join(world) as group:
        mine = SharedMemory(8)
        name = SharedName(*group.all_gather_object(mine.name)[1 - world.rank])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(WorldError) as caught:
            map_shared_memory(group.neighbors[1 - world.rank], name, 8)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        group.barrier()
        return str(caught.value)


def test_a_limit_of_this_process_is_not_reported_as_a_lost_peer() -> None:
    for told in run_ranks(no_more_descriptors, 2):
        assert "Too many open files" in told
        assert "ulimit -a" in told


def test_a_fork_does_not_write_to_shared_memory() -> None:
    memory = SharedMemory(3 * 4096)
    memory.bytes.fill_(1)
    child = os.fork()
    if child == 0:
        memory.bytes.add_(1)
        os._exit(int(memory.bytes.sum()) % 251)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2 * 3 * 4096 % 251
    assert memory.bytes.unique().tolist() == [1]
    memory.bytes[0] = 5  # and neighbors still read this
    assert map_shared_memory(os.getpid(), memory.name, 1).item() == 5


def test_torch_can_send_a_shared_tensor_to_another_process() -> None:
    memory = SharedMemory(16)
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(memory.bytes[4:8])
    assert queue.get().tolist() == [0] * 4


def strangers(world: World) -> Any:
    """Give this process ids and descriptors of another container, which lead to other files, or to other memory."""
    with join(world) as group, tempfile.TemporaryFile() as file:
        descriptors = [file.fileno(), os.memfd_create("another"), os.memfd_create(LABEL), 10**6]
        told = iter([(os.getpid(), descriptors[group.rank], "a secret")])
        gather = type(group).all_gather_object
        changed = type(group)(group.rank, group.size, group.device)
        object.__setattr__(changed, "all_gather_object", lambda value: gather(group, next(told, value)))
        return dict(find_neighbors(changed).pids)


def test_only_a_process_with_the_secret_is_a_neighbor() -> None:
    assert run_ranks(strangers, 4) == [{}] * 4


def test_a_limit_of_the_system_raises_world_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(WorldError, match="Cannot share 5 bytes of memory") as caught:
        SharedMemory(5)
    assert "Operation not permitted" in str(caught.value)
    assert "ulimit -a" in str(caught.value)
