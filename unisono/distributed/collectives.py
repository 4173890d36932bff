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

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import torch

from unisono.distributed.process_group import Message, ProcessGroup, wait_for, wrap_peer_errors
from unisono.distributed.pytree import (
    Form,
    Tree,
    differences,
    first_error,
    form_of,
    from_rows,
    invalid_form,
    leaves,
    map_rows,
    pack,
    rows_by_kind,
    size_of,
    tensors_of,
    unpack,
)
from unisono.distributed.ring_allreduce import ring_all_reduce_
from unisono.errors import LoopError

Op = Literal["sum", "mean", "max", "min"]

FOLDS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Collectives:
    """Collective operations. All processes call the same one, with trees of the same form.

    Attributes:
        rank: the rank of this process.
        size: the number of processes.
        device: the device from which tensors are sent. Results are on the devices of the arguments.
        group: the underlying ProcessGroup, whose operations do not wait.
    """

    def __init__(self, group: ProcessGroup, *, check: Callable[[], None] = lambda: None) -> None:
        """Create the collectives of a group.

        Args:
            group: the processes.
            check: called before every collective. It raises on all processes if one of them is not in a collective.
        """
        self.group, self._check = group, check
        self.rank, self.size, self.device = group.rank, group.size, group.device

    # -- from all processes to all processes

    def all_reduce(self, tree: Tree, op: Op = "sum") -> Tree:
        """Return the sum of all processes' tensors, or another `op`."""
        with self._checked("all_reduce", self._valid_op(op, tree), form_of(tree)):
            return map_rows(
                tree, self.device, lambda row: self._all_gather_row(self._reduce_chunk(row, op))[: len(row)]
            )

    def ring_all_reduce(self, tree: Tree) -> Tree:
        """Return the sum, computed along a ring: each process has two neighbors (see ring_allreduce.py)."""
        with self._checked("ring_all_reduce", self._valid_op("sum", tree), form_of(tree)):
            return map_rows(tree, self.device, lambda row: ring_all_reduce_(self.group, row))

    def all_gather(self, tree: Tree) -> list[Tree]:
        """Return the trees of all processes, in the order of ranks."""
        with self._checked("all_gather", form := form_of(tree)):
            rows = self._all_gather_row(pack(tree, self.device)).view(self.size, -1)
            return [unpack(row, form, tree) for row in rows]

    def shift(self, tree: Tree, by: int = 1) -> Tree:
        """Return the tree of rank (rank - by) mod size, as on a ring."""
        with self._checked("shift", by, form := form_of(tree)):
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
        with self._checked("all_to_all", *self._forms(trees, rows=False)):
            counts = [[leaf.shape[0] for leaf in leaves(tree) if leaf.dim()] for tree in trees]
            sent = torch.tensor(counts, dtype=torch.int64, device=self.device)
            received = self._all_to_all(sent.flatten(), [sent[0].numel()] * self.size).view(sent.shape).tolist()
            forms = [_with_rows(form_of(trees[self.rank]), rows) for rows in received]
            packed, sizes = [pack(tree, self.device) for tree in trees], [size_of(form) for form in forms]
            parts = self._all_to_all(torch.cat(packed), [len(row) for row in packed], sizes).split(sizes)
            like = trees[self.rank]
            return [unpack(part, form, like) for part, form in zip(parts, forms, strict=True)]

    def reduce_scatter(self, trees: Sequence[Tree], op: Op = "sum") -> Tree:
        """Return on each process p the sum, or another `op`, of all processes' trees[p]."""
        with self._checked("reduce_scatter", self._valid_op(op, trees), *self._forms(trees)):
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
        with self._checked("barrier"):
            return

    # -- from or to one process

    def reduce(self, tree: Tree, op: Op = "sum", to: int = 0) -> Tree:
        """Return the result of all_reduce on process `to`, and None elsewhere."""
        with self._checked("reduce", self._valid_op(op, tree), self._valid_rank(to), form_of(tree)):
            reduced = map_rows(
                tree, self.device, lambda row: self._gather_row(to, self._reduce_chunk(row, op)).flatten()[: len(row)]
            )
            return reduced if self.rank == to else None

    def gather(self, tree: Tree, to: int = 0) -> list[Tree] | None:
        """Return the trees of all processes, in the order of ranks, on process `to`, and None elsewhere."""
        with self._checked("gather", self._valid_rank(to), form := form_of(tree)):
            rows = self._gather_row(to, pack(tree, self.device))
            return [unpack(row, form, tree) for row in rows] if self.rank == to else None

    def broadcast(self, tree: Tree = None, source: int = 0) -> Tree:
        """Return the tree of process `source` on all processes. The others pass no tree.

        The form is sent as well. A named tuple arrives as a tuple.
        """
        with self._checked("broadcast", self._valid_rank(source)):
            is_source = self.rank == source
            form = self._broadcast_form("broadcast", form_of(tree) if is_source else None, source)
            row = pack(tree, self.device) if is_source else self._empty(form)
            self.group.broadcast_([row], source)
            return unpack(row, form, tree if is_source else None)

    def scatter(self, trees: Sequence[Tree] | None = None, source: int = 0) -> Tree:
        """Return on each process p the trees[p] of process `source`, of any form. The others pass no trees."""
        with self._checked("scatter", self._valid_rank(source)):
            forms = self._broadcast_form("scatter", self._forms(trees) if self.rank == source else None, source)
            if self.rank != source or trees is None:
                row = self._empty(forms[self.rank])
                wait_for(self.group.send_and_receive([], [Message(row, source)]))
                return unpack(row, forms[self.rank])
            rows = [pack(tree, self.device) for tree in trees]
            wait_for(self.group.send_and_receive([Message(rows[p], p) for p in self._others], []))
            return unpack(rows[source], forms[source], trees[source])

    # -- JSON values

    def broadcast_object(self, value: Any = None, source: int = 0) -> Any:
        """Return the value of process `source` on all processes.

        Values are sent as JSON, never as pickles, so that received data cannot run code. A tuple arrives as a list, and
        the keys of a dict as strings.
        """
        value = value if self.rank == source else None
        return self._objects("broadcast_object", value, self._valid_rank(source))[source]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of ranks."""
        return self._objects("all_gather_object", value)

    def gather_object(self, value: Any, to: int = 0) -> list[Any] | None:
        """Return the values of all processes, in the order of ranks, on process `to`, and None elsewhere."""
        values = self._objects("gather_object", value, self._valid_rank(to))
        return values if self.rank == to else None

    def _objects(self, name: str, value: Any, *arguments: Any) -> list[Any]:
        invalid = []
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:  # raised on all processes below, because the others would wait
            invalid = [invalid_form(f"The value is not a JSON value: {error}.", "str(value), or a tensor")]
        with self._checked(name, *arguments, *invalid):
            return self.group.all_gather_object(value)

    # -- checks before data is sent

    @contextmanager
    def _checked(self, name: str, *arguments: Any) -> Iterator[None]:
        """Check that all processes make the same call. Name the call in the error if a peer is lost in the block."""
        self._check()
        with wrap_peer_errors(name):
            call = json.dumps([name, *arguments])
            if self.size > 1:
                checksum = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7], "big")
                largest, negative_smallest = self.group.max_(
                    torch.tensor([checksum, -checksum], device=self.device)
                ).tolist()
                if largest != -negative_smallest:
                    raise _difference_error(name, self.group.all_gather_object(json.loads(call)))
            _raise_if_invalid(name, list(arguments))
            yield

    def _broadcast_form(self, name: str, form: Any, source: int) -> Any:
        """Return the form of process `source` on all processes. Raise LoopError on all of them if it is invalid."""
        received = self.group.all_gather_object(form)[source]
        _raise_if_invalid(name, received)
        return received

    def _valid_op(self, op: str, tree: Tree) -> Any:
        if op not in FOLDS:
            return invalid_form(f"op is {op}; it must be one of {', '.join(FOLDS)}.", 'op="sum"')
        dtypes = {leaf.dtype for leaf in leaves(tree)} if first_error(form_of(tree)) is None else set()
        if op == "mean" and not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
            return invalid_form("Integers have no mean of the same dtype.", 'tensor.float(), or op="sum"')
        if op in ("sum", "mean") and torch.bool in dtypes:
            return invalid_form(
                "Booleans have no sum.", 'op="max" (any of them), op="min" (all of them), or tensor.int()'
            )
        return op

    def _valid_rank(self, rank: int) -> Any:
        return (
            rank if 0 <= rank < self.size else invalid_form(f"The rank is {rank}; ranks are 0 to {self.size - 1}.", "0")
        )

    def _forms(self, trees: Any, *, rows: bool = True) -> list[Form]:
        """Return the forms of one tree for each process; with `rows`, including the number of rows of each tensor."""
        if not isinstance(trees, (list, tuple)) or len(trees) != self.size:
            count = f" of {len(trees)}" if isinstance(trees, (list, tuple)) else ""
            fact = (
                f"It needs a list of {self.size} trees, one for each process; this is a {type(trees).__name__}{count}."
            )
            return [invalid_form(fact, "[tree for rank in range(size)]")]
        forms = [form_of(tree) for tree in trees]
        return forms if rows or first_error(forms) else [_with_rows(form, None) for form in forms]

    # -- messages

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


def _with_rows(form: Form, rows: Sequence[int] | None) -> Form:
    """Return the form with these numbers of rows, one for each tensor with a dim; None: without the numbers."""
    new = deepcopy(form)
    for i, leaf in enumerate(leaf for leaf in tensors_of(new) if leaf["shape"]):
        leaf["shape"][0] = None if rows is None else rows[i]
    return new


def _raise_if_invalid(name: str, arguments: Any) -> None:
    if (error := first_error(arguments)) is not None:
        raise LoopError(f"{name} was called with an invalid argument.", *error)


def _difference_error(name: str, calls: list[Any]) -> LoopError:
    """Return the error for calls that differ between processes: an invalid argument, or the first difference."""
    first = calls[0]
    other = next(rank for rank, call in enumerate(calls) if call != first)
    if calls[other][0] != first[0]:
        return LoopError(
            "The processes called different collectives.",
            f"Rank 0 called {first[0]}, rank {other} called {calls[other][0]}.",
            "call the same collectives on every process, in the same order.",
        )
    for rank, call in enumerate(calls):
        if (error := first_error(call)) is not None:
            return LoopError(f"{name} was called with an invalid argument.", f"Rank {rank}: {error[0]}", error[1])
    path, one, another = next(differences(first[1:], calls[other][1:]))
    inside = path.partition("]")[2]  # behind the index of the argument
    return LoopError(
        f"{name} was called with different arguments on different processes.",
        f"Rank 0 has {one}, rank {other} {another}{f' (at {inside})' if inside else ''}.",
        "pass the same form on every process: pad shorter tensors, or use all_to_all, whose rows may differ.",
    )
