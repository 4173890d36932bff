"""Evaluation: every sample once, on any number of processes, with the bits of one.

The data is cut into micro-batches whose shape depends on the settings alone (data/walk.py). Each process computes some
of them and writes their sums into its rows of a table; everybody adds the rows up in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unisono.data.loader import Collate
from unisono.data.seeding import give_state, take_state
from unisono.data.walk import Walk
from unisono.errors import LoopError
from unisono.score.tree import chain
from unisono.settings import Settings
from unisono.train.buffers import slots_of
from unisono.world.collectives import Group

Measure = Callable[..., Any]
Forward = Callable[[torch.nn.Module, Any], Any]


def evaluate(
    model: torch.nn.Module,
    data: Any,
    measure: Measure,
    *,
    settings: Settings,
    group: Group,
    forward: Forward | None = None,
    collate: Collate | None = None,
    hurry: Callable[[], bool] = lambda: False,
    beside: Sequence[torch.nn.Module] = (),
) -> dict[str, float] | None:
    """See Run.evaluate. None, on every process, when some process was in a hurry to leave."""
    walk = Walk(data, "The data set of run.evaluate", settings, group, collate)
    rows: dict[str, list[tuple[int, float, float]]] = {}
    with at_rest([model, *beside], group.device):
        for number, _, batch in walk:
            if hurry():
                break
            output = (forward or call)(model, batch)
            for name, (total, weight) in _named(measure, measure(output, *parts(batch))).items():
                rows.setdefault(name, []).append((number, float(total), float(weight)))
    if in_a_hurry(group, hurry):
        return None
    return _fold(rows, walk.finish(), group)


@contextmanager
def at_rest(models: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """The models in eval mode, without gradients; afterwards their modes and buffers and the generators are as before,
    or what the loop does next would depend on who evaluated what."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    generators, accelerator = take_state(), None if device.type == "cpu" else torch.get_device_module(device)
    of_device = accelerator.get_rng_state() if accelerator else None
    slots = [slot for model in models for slot in slots_of(model)]
    for slot in slots:
        slot.remember()
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:  # not model.train(): a part may be in eval mode for good
            part.training = training
        for slot in slots:
            slot.put_back()
        give_state(generators)
        if accelerator:
            accelerator.set_rng_state(of_device)


def in_a_hurry(group: Group, hurry: Callable[[], bool]) -> bool:
    """Is any process in a hurry to leave? Every process must ask."""
    return bool(group.max_(torch.tensor([hurry()], dtype=torch.uint8, device=group.device)).item())


def call(model: torch.nn.Module, batch: Any) -> Any:
    """How a batch goes into a model unless the user says otherwise: its first part, or a mapping by name."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, (list, tuple)) else model(batch)


def parts(batch: Any) -> tuple[Any, ...]:
    """A batch as arguments: a list or tuple gives its parts, anything else is one."""
    return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


def _named(measure: Measure, result: Any) -> Mapping[str, tuple[Any, Any]]:
    name = getattr(measure, "__name__", "value")
    named = result if isinstance(result, Mapping) else {name: result}
    for key, pair in named.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise LoopError(
                f"run.evaluate asked {name} for its sum over a batch.",
                f"It returned {type(pair).__name__}" + (f" for {key!r}." if named is result else "."),
                "return (sum, weight), for instance (correct.sum(), correct.numel()), or a dict of such pairs.",
            )
    return named


def _fold(rows: dict[str, list[tuple[int, float, float]]], count: int, group: Group) -> dict[str, float]:
    names = sorted({name for everybody in group.gather(sorted(rows)) for name in everybody})
    table = torch.zeros(len(names), 2, count, dtype=torch.float64)
    for i, name in enumerate(names):
        for row, total, weight in rows.get(name, []):
            table[i, 0, row], table[i, 1, row] = total, weight
    table = group.sum_(table.to(group.device)).cpu()
    result = {}
    for name, (totals, weights) in zip(names, table.tolist(), strict=True):
        weight = chain(weights)
        if not weight > 0:
            raise LoopError(
                f"run.evaluate was to divide {name} by its total weight.",
                f"The total weight of {count} micro-batches is {weight:g}.",
                "return (sum, weight) with a weight above 0 for some batch.",
            )
        result[name] = chain(totals) / weight
    return result
