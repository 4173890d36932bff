"""The back end with TLS: every operation between processes that count as hosts, and within one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.config.schema import SecureSettings
from unisono.distributed.backends.backend_choice import Transport
from unisono.distributed.backends.operations_test import require_operations
from unisono.distributed.connections import door, pairwise
from unisono.distributed.connections.message_loop import LOOP
from unisono.distributed.init import join_process_group
from unisono.distributed.process_group import Message, ProcessGroup, wait_for
from unisono.environment import World
from unisono.handshake import certificates
from unisono.testing import run_ranks
from unisono.torch_compat.process_groups import default_store

TLS = SecureSettings(transport="tls")


def as_hosts() -> None:
    """Let each process count as a host of its own."""
    door.PeerAddress.is_here = lambda self: False  # type: ignore[method-assign]


def in_group(
    world: World, body: Callable[[ProcessGroup], Any], apart: bool, backend: str = "tls", few: int = 16
) -> Any:
    if apart:
        as_hosts()
    pairwise.FEW = few
    with join_process_group(world, backend=backend, secure=TLS if backend == "tls" else SecureSettings()) as group:
        assert group.backend == backend
        result = body(group)
        assert open_sockets() == ({"SSLSocket"} if apart and backend == "tls" else {"socket"})
        return result


def open_sockets() -> set[str]:
    """Return the types of all sockets. The thread of messages takes over a connection after the group is made."""
    return {type(stream.socket).__name__ for stream in tuple(LOOP._streams) if stream.socket is not None}


def collectives(group: ProcessGroup) -> None:
    rank, size = group.rank, group.size
    for length in (0, 1, 5, 40_000):  # the last one is added up in chunks
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            rows = [(torch.arange(length) % 97 + 10 * r).to(dtype) for r in range(size)]
            total = reduce(torch.add, rows)  # in the order of ranks: bfloat16 rounds
            for op, of in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, rows[-1]), (dist.ReduceOp.MIN, rows[0])):
                mine = rows[rank].clone()
                dist.all_reduce(mine, op=op)
                assert torch.equal(mine, of), (length, dtype, op)
            mine = rows[rank].clone()
            dist.broadcast(mine, src=size - 1)
            assert torch.equal(mine, rows[-1])
            out = [torch.empty_like(mine) for _ in rows]
            dist.all_gather(out, rows[rank])
            assert all(torch.equal(a, b) for a, b in zip(out, rows, strict=True))
            whole = torch.empty(size * length, dtype=dtype)
            dist.all_gather_into_tensor(whole, rows[rank])
            assert torch.equal(whole, torch.cat(rows))
            part = torch.empty(length, dtype=dtype)
            dist.reduce_scatter_tensor(part, torch.cat(rows) + rank)
            assert torch.equal(part, reduce(torch.add, [rows[rank] + r for r in range(size)]))
            dist.reduce_scatter(part, [row + rank for row in rows])
            assert torch.equal(part, reduce(torch.add, [rows[rank] + r for r in range(size)]))
            got = [torch.empty_like(row) for row in rows]
            dist.all_to_all(got, [rows[rank] + r for r in range(size)])
            assert all(torch.equal(got[r], rows[r] + rank) for r in range(size))
            dist.gather(rows[rank], got if rank == 1 else None, dst=1)
            assert rank != 1 or all(torch.equal(a, b) for a, b in zip(got, rows, strict=True))
            dist.scatter(part, rows if rank == 1 else None, src=1)
            assert torch.equal(part, rows[rank])
            mine = rows[rank].clone()
            dist.reduce(mine, dst=0)
            assert rank or torch.equal(mine, total)
    dist.barrier()


def started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def messages(group: ProcessGroup) -> None:
    """Send messages of all sizes, with tags, of which later ones are expected first."""
    rank, size = group.rank, group.size
    right, left = (rank + 1) % size, (rank - 1) % size
    sizes = (1, 100, 20_000, 3_000_000)
    content = lambda r, n: torch.arange(n, dtype=torch.float32) * (r + 1)  # noqa: E731
    works = [started(dist.isend(content(rank, n), right, tag=tag)) for tag, n in enumerate(sizes)]
    for tag, n in reversed(list(enumerate(sizes))):
        got = torch.empty(n)
        wait_for([started(dist.irecv(got, left, tag=tag))])
        assert torch.equal(got, content(left, n))
    for work in works:
        work.wait()
    into = [torch.empty(n) for n in sizes]
    sends = [Message(content(rank, n), right) for n in sizes]
    wait_for(group.send_and_receive(sends, [Message(each, left) for each in into]))
    assert all(torch.equal(got, content(left, n)) for got, n in zip(into, sizes, strict=True))
    dist.barrier()


def relied_on(group: ProcessGroup) -> None:
    world = World(rank=group.rank, size=group.size)
    require_operations(world, default_store(), torch.device("cpu"), Transport(group.backend, staged=False))


@pytest.mark.parametrize("apart", [True, False], ids=["hosts", "one host"])
@pytest.mark.parametrize("body", [collectives, messages, relied_on])
def test_operations_are_right(body: Callable[[ProcessGroup], Any], apart: bool) -> None:
    run_ranks(partial(in_group, body=body, apart=apart), 3)


@pytest.mark.ci
@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("backend", ["tcp", "tls"])
def test_operations_of_many_processes_are_right(size: int, backend: str) -> None:
    """Processes connect when they communicate, and small collectives have log2(W) rounds."""
    run_ranks(partial(in_group, body=collectives, apart=True, backend=backend, few=2), size)
    run_ranks(partial(in_group, body=messages, apart=size == 5, backend=backend, few=2), size)


def connections(group: ProcessGroup) -> tuple[int, int, int]:
    """Return the number of connections after small collectives, and after a message between two others."""
    dist.barrier()
    value = torch.zeros(3)
    for root in range(group.size):
        dist.broadcast(value, src=root)
        dist.reduce(value, dst=root)
    gathered = group.all_gather_object({"rank": group.rank})
    assert gathered == [{"rank": rank} for rank in range(group.size)]
    before = len(LOOP._streams)
    dist.barrier()  # or the message of another process could come before this count
    other = {0: 7, 7: 0}.get(group.rank)
    if other is not None:
        sent, got = torch.full((5,), float(group.rank)), torch.empty(5)
        wait_for(group.send_and_receive([Message(sent, other)], [Message(got, other)]))
        assert got.tolist() == [float(other)] * 5
    after = len(LOOP._streams)
    dist.barrier()
    return before, after, group.size


@pytest.mark.parametrize("backend", ["tcp", "tls"])
def test_processes_connect_when_they_first_communicate(backend: str) -> None:
    counts = run_ranks(partial(in_group, body=connections, apart=True, backend=backend, few=2), 8)
    assert counts == [(3, 3 + (rank in (0, 7)), 8) for rank in range(8)]


def unconnected(group: ProcessGroup, dies: int) -> None:
    """Wait for a process that dies before the two are connected. The exit status is the seconds of the wait."""
    group.barrier()
    if group.rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank != 7 - dies:
        time.sleep(20.0)
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_for(group.send_and_receive([], [Message(torch.empty(5), dies)]))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_for(group.send_and_receive([Message(torch.empty(5_000_000), dies)], []))
    os._exit(1 + int(time.monotonic() - began))


def status_in_child(world: World, body: Callable[[ProcessGroup], Any], apart: bool) -> int:
    """Return the exit status of a forked process that is the rank."""
    child = os.fork()
    if not child:
        in_group(world, body, apart, "tcp", few=2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("dies", "apart"),
    [
        pytest.param(0, True, id="the first of hosts"),
        pytest.param(7, False, id="the last of one host"),
        pytest.param(7, True, id="the last of hosts", marks=pytest.mark.slow),
        pytest.param(0, False, id="the first of one host", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_dies_unconnected_fails_what_waits_for_it(dies: int, apart: bool) -> None:
    statuses = run_ranks(partial(status_in_child, body=partial(unconnected, dies=dies), apart=apart), 8)
    assert statuses[dies] == -signal.SIGKILL
    assert 1 <= statuses[7 - dies] <= 12  # seconds: a dead process refuses, so there is no need to wait for its host
    assert sum(status == 0 for status in statuses) == 6


def wrapped(group: ProcessGroup) -> Any:
    """Train with torch's own wrappers, which call the group from C++."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = []
    wrappers: list[Callable[[Any], Any]] = [lambda model: model, DistributedDataParallel, fully_shard]
    for wrap in wrappers:
        torch.manual_seed(0)
        model = wrap(torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            mine = data if wrap.__name__ == "<lambda>" else data.chunk(group.size)[group.rank]
            model(mine).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        found.append(torch.cat([p.detach().flatten() for p in whole]))
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.allclose(found[0], found[2], atol=1e-6)
    return True


def test_torch_s_own_wrappers_train() -> None:
    assert run_ranks(partial(in_group, body=wrapped, apart=True), 2) == [True, True]


def lost(group: ProcessGroup) -> None:
    """Wait for a process that has closed its connections."""
    if group.rank == 1:
        dist.distributed_c10d._get_default_group().shutdown()
        time.sleep(1.0)
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer") as error:
        dist.all_reduce(torch.ones(3))
    assert time.monotonic() - began < 5
    raise RuntimeError(f"As expected: {error.value}")  # or leaving the group would wait for the other process


def test_a_lost_process_fails_what_waits_for_it() -> None:
    with pytest.raises(Exception, match=r"As expected: .*rank 1 on host"):
        run_ranks(partial(in_group, body=lost, apart=True), 2)


def later(group: ProcessGroup) -> bool:
    """Make another group when the first certificate has expired."""
    time.sleep(3.0)
    handle = dist.new_group(backend="tls")
    one = torch.ones(1)
    dist.all_reduce(one, group=handle)
    return bool(one.item() == group.size)


def with_short_certificates(world: World) -> bool:
    certificates.VALID_AFTER = timedelta(seconds=2.5)
    return bool(in_group(world, later, apart=True))


def test_each_group_has_new_certificates() -> None:
    assert run_ranks(with_short_certificates, 2) == [True, True]
