"""Collectives as messages between pairs of processes. Sums are added in the order of ranks: the same bits on all.

Small tensors go from each process to each. Of large ones each process adds up one chunk, so a process sends and
receives 2 (W - 1) / W times their size, as in a ring.

With more than FEW processes, each communicates with about 2 log2(W) others where that is possible: blocks are gathered,
scattered and broadcast in log2(W) rounds (plan/gather_rounds.py). What has other data for each process, as all_to_all
and the reduction of large tensors, still goes from each to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unisono.plan.gather_rounds import gather_rounds, scatter_rounds

SMALL_BYTES = 1 << 16
"""Up to this size, times the number of processes, tensors are sent whole."""


FEW = 16
"""Up to so many processes, each communicates with each."""

Tensors = Sequence[tuple[int, torch.Tensor]]
"""Tensors, each with the rank to which it is sent or from which it comes."""


class Messages(Protocol):
    """Sends and receives between this process and the others of a group.

    Attributes:
        place: the rank of this process.
        count: the number of processes.
    """

    place: int
    count: int

    def trade(self, sends: Tensors, receives: Tensors) -> None:
        """Send these contiguous tensors, receive into those, and wait for all of them."""


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


def partners(rank: int, size: int) -> list[int]:
    """Return the processes with which a process communicates in small collectives."""
    if size <= FEW:
        return [other for other in range(size) if other != rank]
    return sorted({other for now in gather_rounds(rank, size) for other in (now.to, now.source)})


def combine_of(op: Any) -> Combine:
    """Return the function that combines two tensors in place. Raises RuntimeError for an operation that is unknown."""
    for known, combine in COMBINE:
        if op == known:
            return combine
    raise RuntimeError(f"The back ends tcp and tls do not support the reduction {op}")


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
    if group.count > FEW:
        blocks = mine.new_empty(group.count, mine.numel())
        blocks[group.place].copy_(mine.reshape(-1))
        _gather_blocks(group, blocks, 0)
        for row, block in zip(rows, blocks, strict=True):
            row.copy_(block.view(row.shape))
        return
    others = [rank for rank in range(group.count) if rank != group.place]
    if rows[group.place].data_ptr() != mine.data_ptr():
        rows[group.place].copy_(mine)
    group.trade([(rank, mine) for rank in others], [(rank, rows[rank]) for rank in others])


def all_to_all(group: Messages, out: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> None:
    """Send mine[rank] to each process, and receive from each into out[rank]."""
    others = [rank for rank in range(group.count) if rank != group.place]
    out[group.place].copy_(mine[group.place])
    group.trade([(rank, mine[rank]) for rank in others], [(rank, out[rank]) for rank in others])


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
    if group.count > FEW:  # chunks of unlike length are no blocks
        blocks = total.new_empty(group.count, len(parts[0]))
        blocks[group.place, : len(total)].copy_(total)
        _gather_blocks(group, blocks, 0)
        flat.copy_(blocks.view(-1)[: len(flat)])
        return
    all_gather(group, parts, parts[group.place])


def broadcast(group: Messages, flat: torch.Tensor, root: int) -> None:
    """Copy a flat tensor of the process `root` to all."""
    if group.count > FEW:
        _broadcast_blocks(group, flat, root)
        return
    others = [rank for rank in range(group.count) if rank != root]
    at_root = group.place == root
    if flat.nbytes <= SMALL_BYTES or group.count == 2:
        group.trade([(rank, flat) for rank in others] if at_root else [], [] if at_root else [(root, flat)])
        return
    parts = _chunks(flat, group.count)
    if at_root:
        group.trade([(rank, parts[rank]) for rank in others], [])
    else:
        group.trade([], [(root, parts[group.place])])
    all_gather(group, parts, parts[group.place])


def gather(group: Messages, rows: Sequence[torch.Tensor], mine: torch.Tensor, root: int) -> None:
    """Receive the tensor of each process into rows[rank] at the process `root`."""
    if group.count > FEW:
        blocks = mine.new_empty(group.count, mine.numel())
        blocks[_from_root(group, root)].copy_(mine.reshape(-1))
        for now in reversed(scatter_rounds(_from_root(group, root), group.count)):
            part = [(_at(group, now.peer, root), blocks[now.blocks.start : now.blocks.stop])]
            group.trade(*(([], part) if now.sends else (part, [])))
        for rank, row in enumerate(rows):
            row.copy_(blocks[_number(group, rank, root)].view(row.shape))
        return
    if group.place != root:
        group.trade([(root, mine)], [])
        return
    rows[root].copy_(mine)
    group.trade([], [(rank, row) for rank, row in enumerate(rows) if rank != root])


def scatter(group: Messages, out: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> None:
    """Send parts[rank] of the process `root` to each process."""
    if group.count > FEW:
        blocks = out.new_empty(group.count, out.numel())
        for rank, part in enumerate(parts):
            blocks[_number(group, rank, root)].copy_(part.reshape(-1))
        _scatter_blocks(group, blocks, root)
        out.copy_(blocks[_from_root(group, root)].view(out.shape))
        return
    if group.place != root:
        group.trade([], [(root, out)])
        return
    out.copy_(parts[root])
    group.trade([(rank, part) for rank, part in enumerate(parts) if rank != root], [])


def reduce(group: Messages, flat: torch.Tensor, op: Any, root: int) -> None:
    """Reduce a flat tensor of all processes in place at the process `root`."""
    rows = [torch.empty_like(flat) for _ in range(group.count)] if group.place == root else []
    gather(group, rows, flat, root)
    if rows:
        flat.copy_(_combined(rows, op))


# -- many processes: blocks, one of each, numbered from the root so that the rounds suit every root


def _number(group: Messages, rank: int, root: int) -> int:
    """Return the number of a process's block. With a power of two, the partners are the same for all roots."""
    return (rank - root) % group.count if group.count & (group.count - 1) else rank ^ root


def _at(group: Messages, number: int, root: int) -> int:
    """Return the process whose block has this number."""
    return (number + root) % group.count if group.count & (group.count - 1) else number ^ root


def _from_root(group: Messages, root: int) -> int:
    return _number(group, group.place, root)


def _gather_blocks(group: Messages, blocks: torch.Tensor, root: int) -> None:
    """Gather all rows of `blocks`, of which this process has its own."""
    for now in gather_rounds(_from_root(group, root), group.count):
        sends = [(_at(group, now.to, root), blocks[each.start : each.stop]) for each in now.sent.ranges()]
        source = _at(group, now.source, root)
        group.trade(sends, [(source, blocks[each.start : each.stop]) for each in now.received.ranges()])


def _scatter_blocks(group: Messages, blocks: torch.Tensor, root: int) -> None:
    """Send each process its row of `blocks`, all of which the root has. Rows of others may be overwritten."""
    for now in scatter_rounds(_from_root(group, root), group.count):
        part = [(_at(group, now.peer, root), blocks[now.blocks.start : now.blocks.stop])]
        group.trade(*((part, []) if now.sends else ([], part)))


def _broadcast_blocks(group: Messages, flat: torch.Tensor, root: int) -> None:
    """Copy a flat tensor of the root to all: a small one as a whole, a large one scattered and gathered."""
    if flat.nbytes <= SMALL_BYTES:
        for now in scatter_rounds(_from_root(group, root), group.count):
            part = [(_at(group, now.peer, root), flat)]
            group.trade(*((part, []) if now.sends else ([], part)))
        return
    size = -(-len(flat) // group.count)
    blocks = flat.new_empty(group.count, size)
    if group.place == root:
        blocks.view(-1)[: len(flat)].copy_(flat)
    _scatter_blocks(group, blocks, root)
    _gather_blocks(group, blocks, root)
    if group.place != root:
        flat.copy_(blocks.view(-1)[: len(flat)])
