"""Test the operations of a back end that torch does not bring, when a run begins: Unisono relies on their bits.

Each operation sends a few bytes whose result every process knows. A back end that lacks an operation, that rounds, or
that mixes up ranks is an error on all processes before the first step, instead of other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from unisono.distributed.backends.backend_choice import Transport
from unisono.distributed.process_group import Message, ProcessGroup, wait_for
from unisono.distributed.rendezvous.connect import count_arrivals
from unisono.environment import World
from unisono.errors import WorldError

REASON = "backend-reason"
"""The key of the first error that a process has found."""


def require_operations(world: World, store: dist.Store, device: torch.device, transport: Transport) -> None:
    """Test the back end of torch's default group. Collective.

    Args:
        world: this process's place in the run.
        store: the store through which the processes found each other.
        device: the device on which this process computes.
        transport: the way of messages.

    Raises:
        WorldError: an operation is missing, or its result has wrong bits. The error is the same on all processes.
    """
    group = ProcessGroup(world.rank, world.size, device, staged=transport.staged, backend=transport.backend)
    reason = next(_errors(group), "")
    if reason:
        store.compare_set(REASON, "", reason)
    if count_arrivals(store, group.size, "backend-works", not reason) == group.size:
        return
    raise WorldError(
        f"The back end {group.backend} cannot be used.",
        store.get(REASON).decode(),
        "correct the back end, or: --set backend=auto",
    )


def _errors(group: ProcessGroup) -> Iterator[str]:
    tests: dict[str, Callable[[ProcessGroup], bool]] = {
        "all_reduce (sum)": _sum,
        "all_reduce (max)": _max,
        "all_gather_into_tensor": _gather,
        "all_to_all_single": _trade,
        "broadcast": _broadcast,
        "isend, irecv": _ring,
    }
    for name, test in tests.items():
        try:
            if not test(group):
                yield f"{name} gives wrong bits on rank {group.rank} of {group.size}."
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
            text = str(error).strip() or "no message"
            yield f"{name} fails on rank {group.rank} of {group.size}: {type(error).__name__}: {text.splitlines()[0]}"


def _rows(group: ProcessGroup) -> torch.Tensor:
    """Return a row of numbers for each rank, float64 [size, 2]: with all 53 binary digits, and very small."""
    ranks = torch.arange(group.size, dtype=torch.float64)
    return torch.stack([(ranks + 1) / 3, (ranks + 1) * 5e-324], dim=1)


def _sum(group: ProcessGroup) -> bool:
    rows = _rows(group)
    mine = torch.zeros_like(rows)
    mine[group.rank] = rows[group.rank]
    got = group.sum_(mine.to(group.device)).cpu()
    counts = group.sum_(torch.full((3,), 2**40 + group.rank, dtype=torch.int64, device=group.device)).tolist()
    return torch.equal(got, rows) and counts == [group.size * 2**40 + sum(range(group.size))] * 3


def _max(group: ProcessGroup) -> bool:
    numbers = torch.tensor([2**55 + group.rank, -group.rank], device=group.device)
    return group.max_(numbers).tolist() == [2**55 + group.size - 1, 0]


def _gather(group: ProcessGroup) -> bool:
    rows = _rows(group).view(torch.uint8)
    out = torch.empty(rows.numel(), dtype=torch.uint8, device=group.device)
    wait_for([group.all_gather(out, rows[group.rank].to(group.device))])
    return torch.equal(out.cpu(), rows.flatten())


def _trade(group: ProcessGroup) -> bool:
    """Send p + 1 bytes to each process p."""
    rank, ranks = group.rank, range(group.size)
    mine = torch.tensor([rank * 16 % 251 for p in ranks for _ in range(p + 1)], dtype=torch.uint8, device=group.device)
    got = group.all_to_all(mine, [p + 1 for p in ranks], [rank + 1] * group.size)
    return got.tolist() == [p * 16 % 251 for p in ranks for _ in range(rank + 1)]


def _broadcast(group: ProcessGroup) -> bool:
    row = _rows(group)[group.rank].to(group.device)
    group.broadcast_([row], group.size - 1)
    return torch.equal(row.cpu(), _rows(group)[-1])


def _ring(group: ProcessGroup) -> bool:
    rows, left = _rows(group).to(group.device), (group.rank - 1) % group.size
    got = torch.empty_like(rows[0])
    sends = [Message(rows[group.rank].clone(), (group.rank + 1) % group.size)]
    wait_for(group.send_and_receive(sends, [Message(got, left)]))
    return torch.equal(got, rows[left])
