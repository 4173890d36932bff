"""Collectives for scripts and custom exchanges, on tensors and on nested structures (trees) of them.

    total = run.collectives.all_reduce({"loss": loss, "hits": hits})
    rows = run.collectives.all_gather(features)  # [features of rank 0, features of rank 1, ...]

ProcessGroup (process_group.py) sends one contiguous tensor of a dtype that the back end supports, in place, and does
not wait. The functions here take trees (pytree.py) of any dtype, return new ones, and wait for the result.

The arguments of all processes are compared before any data is sent, by one small all-reduce of a checksum of the
function's name, the forms of the trees and the other arguments. (The check is not skipped for arguments that were seen
before, because another process may not have seen them.) A difference raises LoopError on all processes, where a back
end would hang or mix up bytes.

Sums are added in the order of ranks, each chunk by one process: the same bits on every process, every time. The order
of addition depends on the number of processes. Sums that do not depend on it are those of `step.add` and the exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for, wrap_peer_errors
from unisono.distributed.pytree import (
    Form,
    Tree,
    form_of,
    from_rows,
    invalid_form,
    leaves,
    map_rows,
    pack,
    rows_by_kind,
    size_of,
    unpack,
)
from unisono.distributed.ring_allreduce import ring_all_reduce_
from unisono.distributed.verbs.call_check import FOLDS, CallCheck, raise_if_invalid, with_rows
from unisono.distributed.verbs.sub_groups import SubGroup
from unisono.distributed.verbs.tree_messages import receive_tree, send_tree

Op = Literal["sum", "mean", "max", "min"]


class Collectives:
    """Collective operations. All processes call the same one, with trees of the same form.

    Attributes:
        rank: the rank of this process.
        size: the number of processes.
        device: the device from which tensors are sent. Results are on the devices of the arguments.
        group: the underlying ProcessGroup, whose operations do not wait.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        check: Callable[[], None] = lambda: None,
        permit: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the collectives of a group.

        Args:
            group: the processes.
            check: called before every collective. It raises on all processes if one of them is not in a collective.
            permit: called before a message between two processes, and before a collective of a sub-group. It raises if
                this process cannot send now.
        """
        self.group, self._calls, self._permit = group, CallCheck(group, check), permit
        self.rank, self.size, self.device = group.rank, group.size, group.device

    # -- from all processes to all processes

    def all_reduce(self, tree: Tree, op: Op = "sum") -> Tree:
        """Return the sum of all processes' tensors, or another `op`."""
        with self._calls.checked("all_reduce", self._calls.valid_op(op, tree), form_of(tree)):
            return map_rows(
                tree, self.device, lambda row: self._all_gather_row(self._reduce_chunk(row, op))[: len(row)]
            )

    def ring_all_reduce(self, tree: Tree) -> Tree:
        """Return the sum, computed along a ring: each process has two neighbors (see ring_allreduce.py)."""
        with self._calls.checked("ring_all_reduce", self._calls.valid_op("sum", tree), form_of(tree)):
            return map_rows(tree, self.device, lambda row: ring_all_reduce_(self.group, row))

    def all_gather(self, tree: Tree) -> list[Tree]:
        """Return the trees of all processes, in the order of ranks."""
        with self._calls.checked("all_gather", form := form_of(tree)):
            rows = self._all_gather_row(pack(tree, self.device)).view(self.size, -1)
            return [unpack(row, form, tree) for row in rows]

    def shift(self, tree: Tree, by: int = 1) -> Tree:
        """Return the tree of rank (rank - by) mod size, as on a ring."""
        with self._calls.checked("shift", by, form := form_of(tree)):
            mine = pack(tree, self.device)
            received, target, source = mine, (self.rank + by) % self.size, (self.rank - by) % self.size
            if target != self.rank:
                received = torch.empty_like(mine)
                wait_for(self.group.send_and_receive([Message(mine, target)], [Message(received, source)]))
            return unpack(received, form, tree)

    def all_to_all(self, trees: Sequence[Tree]) -> list[Tree]:
        """Send trees[p] to each process p, and return the received trees in the order of ranks.

        The number of rows (dim 0) of a tensor may differ between trees and between processes.
        """
        with self._calls.checked("all_to_all", *self._calls.forms(trees, rows=False)):
            counts = [[leaf.shape[0] for leaf in leaves(tree) if leaf.dim()] for tree in trees]
            sent = torch.tensor(counts, dtype=torch.int64, device=self.device)
            received = self._all_to_all(sent.flatten(), [sent[0].numel()] * self.size).view(sent.shape).tolist()
            forms = [with_rows(form_of(trees[self.rank]), rows) for rows in received]
            packed, sizes = [pack(tree, self.device) for tree in trees], [size_of(form) for form in forms]
            parts = self._all_to_all(torch.cat(packed), [len(row) for row in packed], sizes).split(sizes)
            like = trees[self.rank]
            return [unpack(part, form, like) for part, form in zip(parts, forms, strict=True)]

    def reduce_scatter(self, trees: Sequence[Tree], op: Op = "sum") -> Tree:
        """Return on each process p the sum, or another `op`, of all processes' trees[p]."""
        with self._calls.checked("reduce_scatter", self._calls.valid_op(op, trees), *self._calls.forms(trees)):
            mine, parts = trees[self.rank], [rows_by_kind(tree, self.device) for tree in trees]
            reduced = {}
            for dtype in dict.fromkeys(dtype for rows in parts for dtype in rows):
                empty = torch.empty(0, dtype=dtype, device=self.device)
                rows = [part.get(dtype, empty) for part in parts]
                length = len(rows[self.rank])
                received = self._all_to_all(torch.cat(rows), [len(row) for row in rows], [length] * self.size)
                reduced[dtype] = _reduce_rows(received.view(self.size, length), op)
            return from_rows(mine, reduced)

    def barrier(self) -> None:
        """Wait until every process has called this."""
        with self._calls.checked("barrier"):
            return

    # -- from or to one process

    def reduce(self, tree: Tree, op: Op = "sum", to: int = 0) -> Tree:
        """Return the result of all_reduce on process `to`, and None elsewhere."""
        with self._calls.checked("reduce", self._calls.valid_op(op, tree), self._calls.valid_rank(to), form_of(tree)):
            reduced = map_rows(
                tree, self.device, lambda row: self._gather_row(to, self._reduce_chunk(row, op)).flatten()[: len(row)]
            )
            return reduced if self.rank == to else None

    def gather(self, tree: Tree, to: int = 0) -> list[Tree] | None:
        """Return the trees of all processes, in the order of ranks, on process `to`, and None elsewhere."""
        with self._calls.checked("gather", self._calls.valid_rank(to), form := form_of(tree)):
            rows = self._gather_row(to, pack(tree, self.device))
            return [unpack(row, form, tree) for row in rows] if self.rank == to else None

    def broadcast(self, tree: Tree = None, source: int = 0) -> Tree:
        """Return the tree of process `source` on all processes. The others pass no tree.

        The form is sent as well. A named tuple arrives as a tuple.
        """
        with self._calls.checked("broadcast", self._calls.valid_rank(source)):
            is_source = self.rank == source
            form = self._broadcast_form("broadcast", form_of(tree) if is_source else None, source)
            row = pack(tree, self.device) if is_source else self._empty(form)
            self.group.broadcast_([row], source)
            return unpack(row, form, tree if is_source else None)

    def scatter(self, trees: Sequence[Tree] | None = None, source: int = 0) -> Tree:
        """Return on each process p the trees[p] of process `source`, of any form. The others pass no trees."""
        with self._calls.checked("scatter", self._calls.valid_rank(source)):
            forms = self._broadcast_form("scatter", self._calls.forms(trees) if self.rank == source else None, source)
            if self.rank != source or trees is None:
                row = self._empty(forms[self.rank])
                wait_for(self.group.send_and_receive([], [Message(row, source)]))
                return unpack(row, forms[self.rank])
            rows = [pack(tree, self.device) for tree in trees]
            wait_for(self.group.send_and_receive([Message(rows[p], p) for p in self._others], []))
            return unpack(rows[source], forms[source], trees[source])

    # -- between two processes

    def send(self, tree: Tree, to: int) -> None:
        """Send a tree of any form to process `to`, which calls `receive`. Return when it is sent.

        Only these two processes call a verb. Messages to one process arrive in order.
        """
        self._permit()
        raise_if_invalid("send", [self._calls.valid_peer(to), form_of(tree)])
        with wrap_peer_errors("send"):
            send_tree(self.group, tree, to)

    def receive(self, source: int) -> Tree:
        """Return the next tree that process `source` sends to this one. A named tuple arrives as a tuple."""
        self._permit()
        raise_if_invalid("receive", [self._calls.valid_peer(source)])
        with wrap_peer_errors("receive"):
            return receive_tree(self.group, source)

    # -- some of the processes

    def sub_group(self, ranks: Sequence[int]) -> Collectives | None:
        """Return the collectives of some processes, or None on the others. All processes call this, with equal ranks.

        Only the members call its verbs. They are numbered from 0 in the order of their ranks. A sub-group ends with a
        death, after which the remaining processes make a new one.
        """
        with self._calls.checked("sub_group", self._calls.valid_ranks(ranks)), wrap_peer_errors("sub_group"):
            made = SubGroup(self.group, tuple(sorted(ranks)))
        if made.group is None:
            return None

        def permit() -> None:
            self._permit()
            made.require_members()

        return Collectives(made.group, check=permit, permit=permit)

    # -- JSON values

    def broadcast_object(self, value: Any = None, source: int = 0) -> Any:
        """Return the value of process `source` on all processes.

        Values are sent as JSON, never as pickles, so that received data cannot run code. A tuple arrives as a list, and
        the keys of a dict as strings.
        """
        value = value if self.rank == source else None
        return self._objects("broadcast_object", value, self._calls.valid_rank(source))[source]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of ranks."""
        return self._objects("all_gather_object", value)

    def gather_object(self, value: Any, to: int = 0) -> list[Any] | None:
        """Return the values of all processes, in the order of ranks, on process `to`, and None elsewhere."""
        values = self._objects("gather_object", value, self._calls.valid_rank(to))
        return values if self.rank == to else None

    def _objects(self, name: str, value: Any, *arguments: Any) -> list[Any]:
        invalid = []
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:  # raised on all processes below, because the others would wait
            invalid = [invalid_form(f"The value is not a JSON value: {error}.", "str(value), or a tensor")]
        with self._calls.checked(name, *arguments, *invalid):
            return self.group.all_gather_object(value)

    # -- messages

    def _broadcast_form(self, name: str, form: Any, source: int) -> Any:
        """Return the form of process `source` on all processes. Raise LoopError on all of them if it is invalid."""
        received = self.group.all_gather_object(form)[source]
        raise_if_invalid(name, received)
        return received

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _empty(self, form: Form) -> torch.Tensor:
        return torch.empty(size_of(form), dtype=torch.uint8, device=self.device)

    def _all_gather_row(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the rows [n] of all processes, concatenated."""
        if self.size == 1 or not len(mine):
            return mine.clone()
        out = mine.new_empty(self.size * len(mine))
        self.group.all_gather(out.view(torch.uint8), mine.view(torch.uint8)).wait()
        return out

    def _gather_row(self, to: int, mine: torch.Tensor) -> torch.Tensor:
        """Return the rows of all processes [size, n] on process `to`. Elsewhere the content is meaningless."""
        out = mine.repeat(self.size, 1)
        sends = [] if self.rank == to else [Message(mine, to)]
        receives = [Message(out[rank], rank) for rank in self._others] if self.rank == to else []
        wait_for(self.group.send_and_receive(sends, receives))
        return out

    def _all_to_all(
        self, mine: torch.Tensor, send_sizes: list[int], receive_sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Send send_sizes[p] elements to each process p. Return the received elements, by default as many from each."""
        if self.size == 1:
            return mine
        width = mine.element_size()
        sends, receives = ([width * n for n in sizes] for sizes in (send_sizes, receive_sizes or send_sizes))
        return self.group.all_to_all(mine.view(torch.uint8), sends, receives).view(mine.dtype)

    def _reduce_chunk(self, row: torch.Tensor, op: str) -> torch.Tensor:
        """Return this process's chunk of all processes' rows, reduced."""
        chunk = -(-len(row) // self.size)
        padded = torch.cat([row, row.new_zeros(self.size * chunk - len(row))])
        return _reduce_rows(self._all_to_all(padded, [chunk] * self.size).view(self.size, chunk), op)


def _reduce_rows(rows: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce rows [size, n] to one row, in their order."""
    total, *others = rows
    for other in others:
        total = FOLDS[op](total, other)
    return total / len(rows) if op == "mean" else total
