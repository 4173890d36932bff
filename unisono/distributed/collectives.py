"""The collectives for scripts, and for exchanges of their own: on tensors, and on trees of them.

    total = run.collectives.all_reduce({"loss": loss, "hits": hits})
    rows = run.collectives.all_gather(features)  # [that of rank 0, that of rank 1, ...]

Group (process_group.py) begins to move one contiguous tensor, in place, of a kind that the back end knows. This is what
it gives to people: trees (pytree.py) of any kind of number go in, new ones come out, and a verb returns when they are
there.

What processes hand in is compared before it travels, by one small all-reduce: a checksum of the verb, the forms and
what else was said. (To leave that out for what has been seen before would leave it out where only one process has seen
it.) Who differs is told on all processes, where a library would hang, or mix up bytes.

Sums are made in the order of ranks, each process a chunk: the same bits on every process, and every time. But who adds
what depends on how many processes there are; sums that do not are `step.add`'s and the exchange's.
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
    """What all processes do together: each calls the same verb, with trees of the same form.

    rank, size  this process, and how many there are
    device      where messages find their tensors; what comes back lies where that lay which was handed in
    group       what this is built on: verbs that begin something, and do not wait
    """

    def __init__(self, group: ProcessGroup, *, ask: Callable[[], None] = lambda: None) -> None:
        """`ask`: are the others about to call a verb too? Called first; raises on all of them if not."""
        self.group, self._ask = group, ask
        self.rank, self.size, self.device = group.rank, group.size, group.device

    # -- everybody has something, and everybody gets something

    def all_reduce(self, tree: Tree, op: Op = "sum") -> Tree:
        """The sum of everybody's tensors, or `op`."""
        with self._together("all_reduce", self._op(op, tree), form_of(tree)):
            return map_rows(tree, self.device, lambda row: self._everybodys(self._fold(row, op))[: len(row)])

    def ring_all_reduce(self, tree: Tree) -> Tree:
        """The sum, carried around a ring: each process talks to two others only (ring_allreduce.py draws it)."""
        with self._together("ring_all_reduce", self._op("sum", tree), form_of(tree)):
            return map_rows(tree, self.device, lambda row: ring_all_reduce_(self.group, row))

    def all_gather(self, tree: Tree) -> list[Tree]:
        """Everybody's tree, in the order of ranks."""
        with self._together("all_gather", form := form_of(tree)):
            rows = self._everybodys(pack(tree, self.device)).view(self.size, -1)
            return [unpack(row, form, tree) for row in rows]

    def shift(self, tree: Tree, by: int = 1) -> Tree:
        """The tree of the process that is `by` places before this one, as on a ring: that of (rank - by) mod size."""
        with self._together("shift", by, form := form_of(tree)):
            mine = pack(tree, self.device)
            arrived, to, source = mine, (self.rank + by) % self.size, (self.rank - by) % self.size
            if to != self.rank:
                arrived = torch.empty_like(mine)
                wait_for(self.group.send_and_receive([Message(mine, to)], [Message(arrived, source)]))
            return unpack(arrived, form, tree)

    def all_to_all(self, trees: Sequence[Tree]) -> list[Tree]:
        """Process p gets trees[p]; returned is what came from each, in the order of ranks. How many rows (dim 0) a
        tensor has may differ from tree to tree and from process to process."""
        with self._together("all_to_all", *self._each(trees, rows=False)):
            counts = [[leaf.shape[0] for leaf in leaves(tree) if leaf.dim()] for tree in trees]
            told = torch.tensor(counts, dtype=torch.int64, device=self.device)
            theirs = self._trade(told.flatten(), [told[0].numel()] * self.size).view(told.shape).tolist()
            forms = [_with_rows(form_of(trees[self.rank]), rows) for rows in theirs]
            packed, sizes = [pack(tree, self.device) for tree in trees], [size_of(form) for form in forms]
            parts = self._trade(torch.cat(packed), [len(row) for row in packed], sizes).split(sizes)
            like = trees[self.rank]
            return [unpack(part, form, like) for part, form in zip(parts, forms, strict=True)]

    def reduce_scatter(self, trees: Sequence[Tree], op: Op = "sum") -> Tree:
        """Process p gets the sum, or `op`, of everybody's trees[p]."""
        with self._together("reduce_scatter", self._op(op, trees), *self._each(trees)):
            mine, parts = trees[self.rank], [rows_by_kind(tree, self.device) for tree in trees]
            found = {}
            for kind in dict.fromkeys(kind for rows in parts for kind in rows):
                nothing = torch.empty(0, dtype=kind, device=self.device)
                rows = [part.get(kind, nothing) for part in parts]
                length = len(rows[self.rank])
                came = self._trade(torch.cat(rows), [len(row) for row in rows], [length] * self.size)
                found[kind] = _folded(came.view(self.size, length), op)
            return from_rows(mine, found)

    def barrier(self) -> None:
        """Wait until everybody is here."""
        with self._together("barrier"):
            return

    # -- one has something, or one gets something

    def reduce(self, tree: Tree, op: Op = "sum", to: int = 0) -> Tree:
        """What all_reduce gives, on process `to`; None elsewhere."""
        with self._together("reduce", self._op(op, tree), self._rank(to), form_of(tree)):
            found = map_rows(tree, self.device, lambda row: self._at(to, self._fold(row, op)).flatten()[: len(row)])
            return found if self.rank == to else None

    def gather(self, tree: Tree, to: int = 0) -> list[Tree] | None:
        """Everybody's tree, in the order of ranks, on process `to`; None elsewhere."""
        with self._together("gather", self._rank(to), form := form_of(tree)):
            rows = self._at(to, pack(tree, self.device))
            return [unpack(row, form, tree) for row in rows] if self.rank == to else None

    def broadcast(self, tree: Tree = None, source: int = 0) -> Tree:
        """The tree of process `source`, on all of them. The others need hand in nothing: forms travel too (and a named
        tuple arrives as a tuple)."""
        with self._together("broadcast", self._rank(source)):
            form = self._told("broadcast", form_of(tree) if self.rank == source else None, source)
            here = self.rank == source
            row = pack(tree, self.device) if here else self._empty(form)
            self.group.broadcast_([row], source)
            return unpack(row, form, tree if here else None)

    def scatter(self, trees: Sequence[Tree] | None = None, source: int = 0) -> Tree:
        """Process p gets trees[p] of process `source`, of whatever form; the others hand in nothing."""
        with self._together("scatter", self._rank(source)):
            forms = self._told("scatter", self._each(trees) if self.rank == source else None, source)
            if self.rank != source or trees is None:
                row = self._empty(forms[self.rank])
                wait_for(self.group.send_and_receive([], [Message(row, source)]))
                return unpack(row, forms[self.rank])
            rows = [pack(tree, self.device) for tree in trees]
            wait_for(self.group.send_and_receive([Message(rows[p], p) for p in self._others], []))
            return unpack(rows[source], forms[source], trees[source])

    # -- what JSON carries

    def broadcast_object(self, value: Any = None, source: int = 0) -> Any:
        """The value of process `source`, on all of them. Values travel as JSON, never as pickles: nothing that arrives
        can run. (A tuple arrives as a list, the keys of a dict as strings.)"""
        value = value if self.rank == source else None
        return self._objects("broadcast_object", value, self._rank(source))[source]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of ranks."""
        return self._objects("all_gather_object", value)

    def gather_object(self, value: Any, to: int = 0) -> list[Any] | None:
        """Everybody's value, in the order of ranks, on process `to`; None elsewhere."""
        found = self._objects("gather_object", value, self._rank(to))
        return found if self.rank == to else None

    def _objects(self, verb: str, value: Any, *said: Any) -> list[Any]:
        unfit = []
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:  # told on all processes: the others would wait
            unfit = [
                invalid_form(f"It takes what JSON carries, and of this it says: {error}.", "str(value), or a tensor")
            ]
        with self._together(verb, *said, *unfit):
            return self.group.all_gather_object(value)

    # -- before anything travels

    @contextmanager
    def _together(self, verb: str, *said: Any) -> Iterator[None]:
        """See that all processes are about to do the same; and if one is lost on the way, say what was being done."""
        self._ask()
        with wrap_peer_errors(verb):
            told = json.dumps([verb, *said])
            if self.size > 1:
                number = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")
                most, least = self.group.max_(torch.tensor([number, -number], device=self.device)).tolist()
                if most != -least:
                    raise _unlike(verb, self.group.all_gather_object(json.loads(told)))
            _refuse_wrong(verb, list(said))
            yield

    def _told(self, verb: str, said: Any, source: int) -> Any:
        """What process `source` says, on all of them; raises LoopError on all of them if it is wrong."""
        found = self.group.all_gather_object(said)[source]
        _refuse_wrong(verb, found)
        return found

    def _op(self, op: str, tree: Tree) -> Any:
        if op not in FOLDS:
            return invalid_form(f"It knows {', '.join(FOLDS)}; this is {op}.", 'op="sum"')
        kinds = {leaf.dtype for leaf in leaves(tree)} if first_error(form_of(tree)) is None else set()
        if op == "mean" and not all(kind.is_floating_point or kind.is_complex for kind in kinds):
            return invalid_form("The mean of whole numbers is none.", 'tensor.float(), or op="sum"')
        if op in ("sum", "mean") and torch.bool in kinds:
            return invalid_form(
                "Yes and no have no sum.", 'op="max" (any of them), op="min" (all of them), or tensor.int()'
            )
        return op

    def _rank(self, rank: int) -> Any:
        return rank if 0 <= rank < self.size else invalid_form(f"Ranks are 0 to {self.size - 1}; this is {rank}.", "0")

    def _each(self, trees: Any, *, rows: bool = True) -> list[Form]:
        """The forms of a tree for each process; `rows`: with how many rows their tensors have."""
        if not isinstance(trees, (list, tuple)) or len(trees) != self.size:
            count = f" of {len(trees)}" if isinstance(trees, (list, tuple)) else ""
            true = (
                f"It takes a list of {self.size} trees, one for each process; this is a {type(trees).__name__}{count}."
            )
            return [invalid_form(true, "[tree for rank in range(size)]")]
        forms = [form_of(tree) for tree in trees]
        return forms if rows or first_error(forms) else [_with_rows(form, None) for form in forms]

    # -- what travels

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _empty(self, form: Form) -> torch.Tensor:
        return torch.empty(size_of(form), dtype=torch.uint8, device=self.device)

    def _everybodys(self, mine: torch.Tensor) -> torch.Tensor:
        """Everybody's row [n], one after the other."""
        if self.size == 1 or not len(mine):
            return mine.clone()
        out = mine.new_empty(self.size * len(mine))
        self.group.all_gather(out.view(torch.uint8), mine.view(torch.uint8)).wait()
        return out

    def _at(self, to: int, mine: torch.Tensor) -> torch.Tensor:
        """Everybody's row [size, n] on process `to`; elsewhere what is in it means nothing."""
        out = mine.repeat(self.size, 1)
        here = self.rank == to
        sends = [] if here else [Message(mine, to)]
        wait_for(self.group.send_and_receive(sends, [Message(out[r], r) for r in self._others] if here else []))
        return out

    def _trade(self, mine: torch.Tensor, sizes: list[int], theirs: list[int] | None = None) -> torch.Tensor:
        """Of a row process p gets sizes[p] elements; returned is what came, as many from each or `theirs`[p]."""
        if self.size == 1:
            return mine
        width, theirs = mine.element_size(), sizes if theirs is None else theirs
        came = self.group.all_to_all(mine.view(torch.uint8), [width * n for n in sizes], [width * n for n in theirs])
        return came.view(mine.dtype)

    def _fold(self, row: torch.Tensor, op: str) -> torch.Tensor:
        """This process's chunk of everybody's rows, folded."""
        chunk = -(-len(row) // self.size)
        padded = torch.cat([row, row.new_zeros(self.size * chunk - len(row))])
        return _folded(self._trade(padded, [chunk] * self.size).view(self.size, chunk), op)


def _folded(rows: torch.Tensor, op: str) -> torch.Tensor:
    """The rows [size, n] as one, in their order."""
    total, *others = rows
    for other in others:
        total = FOLDS[op](total, other)
    return total / len(rows) if op == "mean" else total


def _with_rows(form: Form, rows: Sequence[int] | None) -> Form:
    """The form with so many rows of its tensors, one number for each that has a dim; None: with none said."""
    new = deepcopy(form)
    for i, leaf in enumerate(leaf for leaf in tensors_of(new) if leaf["shape"]):
        leaf["shape"][0] = None if rows is None else rows[i]
    return new


def _refuse_wrong(verb: str, said: Any) -> None:
    if (found := first_error(said)) is not None:
        raise LoopError(f"{verb} was called with what it does not take.", *found)


def _unlike(verb: str, told: list[Any]) -> LoopError:
    """Not all processes said the same: what is wrong, or differs first."""
    asked, first = f"{verb} was called on {len(told)} processes.", told[0]
    other = next(rank for rank, said in enumerate(told) if said != first)
    if told[other][0] != first[0]:
        do = "call the same collectives on every process, in the same order."
        return LoopError(asked, f"Rank 0 is at {first[0]}, rank {other} at {told[other][0]}.", do)
    for rank, said in enumerate(told):
        if (found := first_error(said)) is not None:
            return LoopError(asked, f"Rank {rank}: {found[0]}", found[1])
    name, one, another = next(differences(first[1:], told[other][1:]))
    inside = name.partition("]")[2]  # behind the number of what was handed in
    true = f"Rank 0 has {one}, rank {other} {another}{f' (at {inside})' if inside else ''}."
    do = "hand in the same on every process: pad what is shorter; or all_to_all, whose rows may differ."
    return LoopError(asked, true, do)
