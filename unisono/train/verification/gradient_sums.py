"""A second sum of the gradients: every micro-batch's gradient, folded along the tree.

In a verified step each process keeps a window of the gradients that its backward passes give a few parameters. The
windows are gathered, added in the order of the virtual ranks' tree (plan/reduction_tree.py), divided by the weight of
the step and compared with `p.grad`, bit for bit. So an exchange that adds in another order is detected, whatever the
cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unisono.checkpoint.sharded_state import box_of
from unisono.distributed.process_group import ProcessGroup, is_dtensor, to_local
from unisono.exchange import gradient_accumulation
from unisono.exchange.kernels.elementwise import divide_
from unisono.plan.batch_order import BatchOrder, MicroBatchId
from unisono.plan.reduction_tree import Fold, Node

if TYPE_CHECKING:
    from unisono.train.gradient_pass import GradientPass

MOST_PARAMETERS = 16
WINDOW = 2048
"""Elements of one parameter. Rows of all micro-batches are sent as float64: at most 256 kB each."""

Sum = torch.Tensor | None


class GradientWindow(NamedTuple):
    """Elements [start, stop) of parameter `number`, in the order of its elements."""

    number: int
    start: int
    stop: int


class GradientSums:
    """Windows of the gradients of one step, on one process."""

    def __init__(self, order: BatchOrder, step: int, gradient: GradientPass, turn: int) -> None:
        self.order, self.step, self.gradient = order, step, gradient
        self.windows = {window.number: window for window in windows(gradient.leaves, gradient.params, turn)}
        self._rows: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # by virtual rank and micro-batch
        self._unsure: set[int] = set()  # parameters whose sum does not follow from the rows

    def begin(self, place: MicroBatchId) -> None:
        """Begin a micro-batch of the step's own rounds on this process."""
        self._rows[place.virtual_rank, place.number] = {}

    def note(self, place: MicroBatchId, number: int, grad: torch.Tensor) -> None:
        """Keep the window of a gradient."""
        window = self.windows.get(number)
        if window is None:
            return
        row = self._rows[place.virtual_rank, place.number]
        if number in row:  # recompute with use_reentrant: autograd adds each to the sum, in its own order
            self._unsure.add(number)
        if is_dtensor(grad):
            found = as_cut(grad, self.gradient.leaves[number])
            if found is None:
                self._unsure.add(number)
            grad = grad if found is None else found
        dense = to_local(grad.detach())
        dense = dense if dense.layout is torch.strided else gradient_accumulation.coalesced(dense).to_dense()
        row[number] = dense.reshape(-1)[window.start : window.stop].clone()

    def differing(self, weight: float, group: ProcessGroup) -> list[int]:
        """Return the numbers of the parameters whose gradient is another sum. All processes of `group` call this.

        weight  the divisor of the sum
        group   the processes that computed different micro-batches
        """
        places = [
            (v, n) for v in range(self.order.virtual_ranks) for n in range(len(self.order.micro_bounds(self.step, v)))
        ]
        table = self._gather(places, group)
        if not bool((table[:, 0] == 1.0).all()):  # a process died in this step, and a micro-batch was computed twice
            return []
        found, at = [], 1 + len(self.windows)
        for column, window in enumerate(self.windows.values(), 1):
            length = window.stop - window.start
            columns, used = table[:, at : at + length], (table[:, column] == 1.0).tolist()
            at += length
            if bool((table[:, column] > 1.0).any()):  # unknown on some process
                continue
            total = self._fold(places, columns, used, window)
            if total is not None and not self._agrees(total, weight, window):
                found.append(window.number)
        return found

    def _gather(self, places: Sequence[tuple[int, int]], group: ProcessGroup) -> torch.Tensor:
        """Return rows of every micro-batch, float64 [places, 1 + windows + elements].

        A row holds the number of processes that computed the micro-batch, whether each window got a gradient, and the
        windows.
        """
        width = 1 + len(self.windows) + sum(w.stop - w.start for w in self.windows.values())
        table = torch.zeros(len(places), width, dtype=torch.float64, device=group.device)
        for index, place in enumerate(places):
            row = self._rows.get(place)
            if row is None:
                continue
            table[index, 0], at = 1.0, 1 + len(self.windows)
            for column, window in enumerate(self.windows.values(), 1):
                length = window.stop - window.start
                if window.number in row:
                    table[index, column] = 2.0 if window.number in self._unsure else 1.0
                    table[index, at : at + length] = row[window.number]
                at += length
        return group.sum_(table)  # one writer for each row: exact

    def _fold(
        self, places: Sequence[tuple[int, int]], columns: torch.Tensor, used: Sequence[bool], window: GradientWindow
    ) -> Sum:
        dtype = self.gradient.leaves[window.number].dtype
        leaves: dict[int, Sum] = {}
        for (virtual_rank, _), row, was_used in zip(places, columns, used, strict=True):
            if was_used:
                leaf, grad = leaves.get(virtual_rank), row.to(dtype)
                leaves[virtual_rank] = grad + 0.0 if leaf is None else leaf.add_(grad)
        fold: Fold[Sum] = Fold(self.order.virtual_ranks, _add)
        for virtual_rank in range(self.order.virtual_ranks):
            fold.push(Node(virtual_rank, virtual_rank + 1), leaves.get(virtual_rank))
        ((_, total),) = fold.held
        return total

    def _agrees(self, total: torch.Tensor, weight: float, window: GradientWindow) -> bool:
        """Compare with the part of `p.grad` that is on this process."""
        p = self.gradient.params[window.number]
        divide_([total], weight)
        if p.grad is None:
            return not bool(total.any())
        grad = to_local(p.grad.detach())
        grad = (grad if grad.layout is torch.strided else grad.to_dense()).reshape(-1)
        first = _first_element(p)
        lo, hi = max(window.start, first), min(window.stop, first + len(grad))
        if lo >= hi:
            return True
        theirs = grad[lo - first : hi - first].to(total.device)
        mine = total[lo - window.start : hi - window.start]
        return bool(torch.eq(mine, theirs).all()) or not bool(torch.isfinite(mine).all())


def windows(leaves: Sequence[torch.Tensor], params: Sequence[torch.Tensor], turn: int) -> list[GradientWindow]:
    """Return the windows of a verified step. `turn` counts verified steps: each one has other parameters and windows.

    leaves  the tensors that backward gives a gradient; the same as `params`, unless shards are gathered for a step
    """
    able = [i for i, (leaf, p) in enumerate(zip(leaves, params, strict=True)) if leaf.requires_grad and _size(p)]
    first = turn * MOST_PARAMETERS % len(able) if len(able) > MOST_PARAMETERS else 0
    found = []
    for number in (able[first:] + able[:first])[:MOST_PARAMETERS]:
        size = _size(leaves[number])
        start = turn * WINDOW % size if size > WINDOW else 0
        found.append(GradientWindow(number, start, min(start + WINDOW, size)))
    return found


def _size(p: torch.Tensor) -> int:
    """Return the number of elements of a micro-batch's gradient on a process that computes it.

    Return 0 for an integer parameter, and for one that is sharded along several axes.
    """
    if not p.is_floating_point():
        return 0
    axes = p.device_mesh.mesh_dim_names if is_dtensor(p) else ()  # type: ignore[attr-defined]
    if axes == ("shard",):  # backward computes the whole gradient, and each process keeps its rows
        return p.numel()
    return 0 if len(axes) > 1 else int(to_local(p).numel())


def _first_element(p: torch.nn.Parameter) -> int:
    """Return the first element, in the whole parameter, of this process's rows under `parallel.shard`."""
    if not is_dtensor(p) or p.device_mesh.mesh_dim_names != ("shard",):  # type: ignore[attr-defined]
        return 0
    box = box_of(p)
    assert box is not None
    rows = p.shape[1:].numel()
    return box[1][0] * rows


def as_cut(grad: Any, p: Any) -> Any:
    """Return a DTensor's gradient, sharded as the parameter is; None if that needs communication."""
    if not is_dtensor(p) or grad.placements == p.placements:
        return grad
    return grad.redistribute(placements=p.placements) if all(at.is_replicate() for at in grad.placements) else None


def is_partial(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor with a partial placement: a sum over processes that is not computed yet."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def _add(left: Sum, right: Sum) -> Sum:
    """Add as the exchange does: a virtual rank without a gradient adds nothing."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
