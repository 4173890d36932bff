"""Check that all processes make the same call, with valid arguments, before any data is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.distributed.pytree import Form, Tree, differences, first_error, form_of, invalid_form, leaves, tensors_of
from unisono.errors import LoopError

FOLDS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class CallCheck:
    """The checks of a group's calls.

    Args:
        group: the processes.
        before: called before every collective. It raises on all processes if one of them is not in a collective.
    """

    def __init__(self, group: ProcessGroup, before: Callable[[], None]) -> None:
        self._group, self._before = group, before

    @contextmanager
    def checked(self, name: str, *arguments: Any) -> Iterator[None]:
        """Check that all processes make the same call. Name the call in the error if a peer is lost in the block."""
        self._before()
        with wrap_peer_errors(name):
            call = json.dumps([name, *arguments])
            if self._group.size > 1:
                checksum = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7], "big")
                largest, negative_smallest = self._group.max_(
                    torch.tensor([checksum, -checksum], device=self._group.device)
                ).tolist()
                if largest != -negative_smallest:
                    raise _difference_error(name, self._group.all_gather_object(json.loads(call)))
            raise_if_invalid(name, list(arguments))
            yield

    def valid_op(self, op: str, tree: Tree) -> Any:
        """Return op; an invalid form if it is unknown, or not defined for the dtypes of the tree."""
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

    def valid_rank(self, rank: int) -> Any:
        """Return rank; an invalid form if there is no such process."""
        return (
            rank
            if 0 <= rank < self._group.size
            else invalid_form(f"The rank is {rank}; ranks are 0 to {self._group.size - 1}.", "0")
        )

    def valid_peer(self, rank: int) -> Any:
        """Return rank; an invalid form if it is not another process."""
        if rank == self._group.rank:
            return invalid_form(f"Rank {rank} is this process itself.", "the rank of another process")
        return self.valid_rank(rank)

    def valid_ranks(self, ranks: Sequence[int]) -> Any:
        """Return the ranks of a sub-group; an invalid form if they are not different ranks of this group."""
        if self._group.members:
            fact = "Sub-groups are made by all processes of the run, and this group has some of them."
            return invalid_form(fact, "run.collectives.sub_group(ranks), with ranks of the run")
        found = [rank for rank in ranks if not 0 <= rank < self._group.size]
        if found or not ranks or len(set(ranks)) < len(ranks):
            fact = f"The ranks are {list(ranks)}; it takes different ones of 0 to {self._group.size - 1}."
            return invalid_form(fact, "[0, 1]")
        return list(ranks)

    def forms(self, trees: Any, *, rows: bool = True) -> list[Form]:
        """Return the forms of one tree for each process; with `rows`, including the number of rows of each tensor."""
        if not isinstance(trees, (list, tuple)) or len(trees) != self._group.size:
            count = f" of {len(trees)}" if isinstance(trees, (list, tuple)) else ""
            kind = f"{type(trees).__name__}{count}"
            fact = f"It needs a list of {self._group.size} trees, one for each process; this is a {kind}."
            return [invalid_form(fact, "[tree for rank in range(size)]")]
        forms = [form_of(tree) for tree in trees]
        return forms if rows or first_error(forms) else [with_rows(form, None) for form in forms]


def with_rows(form: Form, rows: Sequence[int] | None) -> Form:
    """Return the form with these numbers of rows, one for each tensor with a dim; None: without the numbers."""
    new = deepcopy(form)
    for i, leaf in enumerate(leaf for leaf in tensors_of(new) if leaf["shape"]):
        leaf["shape"][0] = None if rows is None else rows[i]
    return new


def raise_if_invalid(name: str, arguments: Any) -> None:
    """Raise LoopError for the first invalid value in the arguments of a call."""
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
    inside = path.partition("]")[2]  # after the index of the argument
    return LoopError(
        f"{name} was called with different arguments on different processes.",
        f"Rank 0 has {one}, rank {other} {another}{f' (at {inside})' if inside else ''}.",
        "pass the same form on every process: pad shorter tensors, or use all_to_all, whose rows may differ.",
    )
