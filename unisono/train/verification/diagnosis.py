"""Find the cause of a difference: compute the virtual rank again in several ways, and compare the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from unisono.config.wording import plural
from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.plan.batch_order import MicroBatchId
from unisono.tensors.digest import content_digest
from unisono.train.gradient_pass import GradientPass
from unisono.train.guarantees.deterministic_kernels import ATTENTION
from unisono.train.modules.models import Models
from unisono.train.verification import causes
from unisono.train.verification.attribute_text import first_change, names_of
from unisono.train.verification.causes import Cause
from unisono.train.verification.checked_step import CheckedStep
from unisono.train.verification.pass_record import Facts
from unisono.train.verification.spare_batches import SpareBatches

Compute = Callable[[Callable[[MicroBatchId], Any]], Generator[Any, None, Facts]]
"""Yield spare rounds of the virtual rank with the batches that a function returns, and return the facts about them."""

Row = dict[str, Any]
"""The findings of one process, as a JSON object."""


class Diagnosis(NamedTuple):
    """where  the first tensor that differs, and the results that agree."""

    cause: Cause
    where: str


class Attempt(NamedTuple):
    """Three results of a process: the first, a repetition, and one with its batch at other addresses."""

    once: Facts
    again: Facts
    moved: Facts
    operators: Sequence[str]


def diagnose(
    compute: Compute | None,
    batches: SpareBatches,
    world: ProcessGroup,
    models: Models,
    gradient: GradientPass,
    checked: CheckedStep,
    kind: str,
) -> Generator[Any, None, Diagnosis]:
    """Yield spare rounds of the virtual rank, and return the findings of all processes together.

    Args:
        compute: computes the virtual rank once more; None: this process does not compute it.
        batches: fetches its micro-batches in several ways.
        world: the processes that verify together.
        models: the models of the run.
        gradient: the gradient of the step's first pass.
        checked: this process's record of the step.
        kind: the first kind of difference: "loss" or "gradient".
    """
    tried: Attempt | None = None
    compared = [*checked.attributes]
    if compute is not None:
        tried = yield from _try(compute, batches)
    names = [models.names.get(id(p), "a parameter") for p in gradient.params]
    mine: Row = {
        "numbers": [record.gradients for record in (checked.before, checked.inside) if record is not None],
        "tried": tried,
        "names": content_digest(names),
        "attributes": compared,
        "attempts": checked.attributes[len(compared) :],
        "outputs": names_of(models.buffers.attributes.outputs, models.modules),
    }
    with wrap_peer_errors("The verification of the promise"):
        rows = world.all_gather_object(mine)
    return Diagnosis(_cause(rows, models.modules, kind), _where(rows, names, kind))


def _try(compute: Compute, batches: SpareBatches) -> Generator[Any, None, Attempt]:
    found = list[str]()
    once = yield from compute(batches.fetch)
    with naming_operators(found):
        again = yield from compute(batches.fetch)
    moved = yield from compute(batches.fetch_moved)
    return Attempt(once, again, moved, sorted(set(found)))


def _cause(rows: Sequence[Row], models: Sequence[torch.nn.Module], kind: str) -> Cause:
    tried = [Attempt(*row["tried"]) for row in rows if row["tried"] is not None]
    scripted, compiled = causes.scripted_in(models), causes.compiled_in(models)
    if any(row["names"] != rows[0]["names"] for row in rows):
        return causes.ORDER
    unstable = any(each.once != each.again for each in tried)
    settles = all(each.again == each.moved for each in tried)
    if scripted and (settles or not unstable):
        return causes.scripted(scripted)
    if unstable and (known := sorted({name for each in tried for name in each.operators})):
        return causes.operators(known)
    if not unstable and any(each.once != each.moved for each in tried):
        return causes.ALIGNMENT
    if changed := _changed_attribute(rows):
        return causes.attribute(changed)
    if unstable:
        return causes.UNKEYED
    if compiled:
        return causes.compiled(compiled)
    if kind == "gradient":
        return causes.BACKWARD
    return causes.PROCESS if any(each.once != tried[0].once for each in tried) else causes.STATE


def _changed_attribute(rows: Sequence[Row]) -> str:
    """Return an attribute with which two computations began in different states; "" if there is none.

    The first two computations are compared with each other, and the attempts of a process among themselves: those begin
    after the step, when an attribute may have the value that every process keeps. An output, which a forward pass
    writes before it reads it, is no cause.
    """
    without = {name for row in rows for name in row["outputs"]}
    began_together = [[of for row in rows for of in row["attributes"]], *(row["attempts"] for row in rows)]
    for began in began_together:
        for of in began:
            if text := first_change(began[0], of, without):
                return text
    return ""


def _where(rows: Sequence[Row], names: Sequence[str], kind: str) -> str:
    """Name the first parameter whose gradient differs, and the results that agree."""
    numbers = [of for row in rows for of in row["numbers"]]
    differ: set[int] = set()
    for of in numbers:
        for micro_batch, mine in of.items():
            theirs = next(other[micro_batch] for other in numbers if micro_batch in other)
            differ |= {i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b}
    if not differ:
        return "The samples agree."
    agrees = "The samples and the loss agree." if kind == "gradient" else "The samples agree."
    return f"First in {names[min(differ)]} ({len(differ)} of {plural(len(names), 'gradient')} differ). {agrees}"


@contextmanager
def naming_operators(found: list[str]) -> Iterator[None]:
    """Collect the operators for which torch has no deterministic kernel, within this block."""
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=warns)
            setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)  # noqa: B010
    texts = [str(each.message) for each in said if "deterministic" in str(each.message)]
    if strict and not warns:  # torch warns of this one only in this block
        texts = [text for text in texts if ATTENTION not in text]
    found += ["memory-efficient attention" if ATTENTION in text else text.split(" ")[0] for text in texts]
