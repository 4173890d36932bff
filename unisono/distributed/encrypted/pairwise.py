"""Collectives as messages between pairs of processes. Sums are added in the order of ranks: the same bits on all.

Small tensors go from each process to each. Of large ones each process adds up one chunk, so a process sends and
receives 2 (W - 1) / W times their size, as in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

SMALL_BYTES = 1 << 16
"""Up to this size, times the number of processes, tensors are sent whole."""


class Messages(Protocol):
    """Sends and receives between this process and the others of a group.

    Attributes:
        place: the rank of this process.
        count: the number of processes.
    """

    place: int
    count: int

    def trade(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send these contiguous tensors, receive into those, and wait for all of them. Keys are ranks."""


Combine = Callable[[torch.Tensor, torch.Tensor], Any]

COMBINE: Sequence[tuple[Any, Combine]] = (
    (dist.ReduceOp.SUM, lambda total, other: total.add_(other)),
    (dist.ReduceOp.AVG, lambda total, other: total.add_(other)),
    (dist.ReduceOp.PRODUCT, lambda total, other: total.mul_(other)),
    (dist.ReduceOp.MIN, lambda total, other: torch.minimum(total, other, out=total)),
    (dist.ReduceOp.MAX, lambda total, other: torch.maximum(total, other, out=total)),
    (dist.ReduceOp.BAND, lambda total, other: total.bitwise_and_(other)),
    (dist.ReduceOp.BOR, lambda total, other: total.bitwise_or_(other)),
    (dist.ReduceOp.BXOR, lambda total, other: total.bitwise_xor_(other)),
)


def combine_of(op: Any) -> Combine:
    """Return the function that combines two tensors in place. Raises RuntimeError for an operation that is unknown."""
    for known, combine in COMBINE:
        if op == known:
            return combine
    raise RuntimeError(f"The back end tls does not support the reduction {op}")


def _combined(rows: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Return the reduction of these tensors in their order, in memory of its own."""
    combine, total = combine_of(op), rows[0].clone()
    for row in rows[1:]:
        combine(total, row)
    if op == dist.ReduceOp.AVG:
        total.div_(len(rows))
    return total


def _chunks(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return `count` parts of a flat tensor; the last ones may be empty."""
    size = -(-len(flat) // count)
    return [flat[min(n * size, len(flat)) : min((n + 1) * size, len(flat))] for n in range(count)]


def all_gather(group: Messages, rows: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
    """Receive the tensor of each process into rows[rank]."""
    others = [rank for rank in range(group.count) if rank != group.place]
    if rows[group.place].data_ptr() != mine.data_ptr():
        rows[group.place].copy_(mine)
    group.trade(dict.fromkeys(others, mine), {rank: rows[rank] for rank in others})


def all_to_all(group: Messages, out: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> None:
    """Send mine[rank] to each process, and receive from each into out[rank]."""
    others = [rank for rank in range(group.count) if rank != group.place]
    out[group.place].copy_(mine[group.place])
    group.trade({rank: mine[rank] for rank in others}, {rank: out[rank] for rank in others})


def reduce_scatter(group: Messages, out: torch.Tensor, parts: Sequence[torch.Tensor], op: Any) -> None:
    """Reduce parts[rank] of all processes into `out` of the process `rank`."""
    rows = [torch.empty_like(out) for _ in range(group.count)]
    all_to_all(group, rows, parts)
    out.copy_(_combined(rows, op))


def all_reduce(group: Messages, flat: torch.Tensor, op: Any) -> None:
    """Reduce a flat tensor over all processes in place."""
    if flat.nbytes * group.count <= SMALL_BYTES * 8:
        rows = [torch.empty_like(flat) for _ in range(group.count)]
        all_gather(group, rows, flat)
        flat.copy_(_combined(rows, op))
        return
    parts = _chunks(flat, group.count)
    total = torch.empty_like(parts[group.place])
    reduce_scatter(group, total, parts, op)
    parts[group.place].copy_(total)
    all_gather(group, parts, parts[group.place])


def broadcast(group: Messages, flat: torch.Tensor, root: int) -> None:
    """Copy a flat tensor of the process `root` to all."""
    others = [rank for rank in range(group.count) if rank != root]
    if flat.nbytes <= SMALL_BYTES or group.count == 2:
        at_root = group.place == root
        group.trade(dict.fromkeys(others, flat) if at_root else {}, {} if at_root else {root: flat})
        return
    parts = _chunks(flat, group.count)
    if group.place == root:
        group.trade({rank: parts[rank] for rank in others}, {})
    else:
        group.trade({}, {root: parts[group.place]})
    all_gather(group, parts, parts[group.place])


def gather(group: Messages, rows: Sequence[torch.Tensor], mine: torch.Tensor, root: int) -> None:
    """Receive the tensor of each process into rows[rank] at the process `root`."""
    if group.place != root:
        group.trade({root: mine}, {})
        return
    rows[root].copy_(mine)
    group.trade({}, {rank: row for rank, row in enumerate(rows) if rank != root})


def scatter(group: Messages, out: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> None:
    """Send parts[rank] of the process `root` to each process."""
    if group.place != root:
        group.trade({}, {root: out})
        return
    out.copy_(parts[root])
    group.trade({rank: part for rank, part in enumerate(parts) if rank != root}, {})


def reduce(group: Messages, flat: torch.Tensor, op: Any, root: int) -> None:
    """Reduce a flat tensor of all processes in place at the process `root`."""
    rows = [torch.empty_like(flat) for _ in range(group.count)] if group.place == root else []
    gather(group, rows, flat, root)
    if rows:
        flat.copy_(_combined(rows, op))
