"""Evaluation: every sample counts once, and the bits do not depend on the number of processes.

The data is cut into micro-batches whose shape depends on the settings alone (data/eval_loader.py). Each process
computes some of them and writes their sums into its rows of a table. All processes add up the rows in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError
from unisono.parallel.context_parallel.ulysses import ContextParallel
from unisono.plan.reduction_tree import chain
from unisono.train.evaluation.model_call import parts
from unisono.train.evaluation.model_outputs import ModelOutputs

Measure = Callable[..., Any]


def evaluate(outputs: ModelOutputs, measure: Measure, context: ContextParallel) -> dict[str, float]:
    """Return the means of a measure (see Run.evaluate). If sequences are divided, all slices are added up."""
    outputs.part = context.part
    rows: dict[str, list[tuple[int, float, float]]] = {}
    for micro_batch, output in outputs:
        for name, (total, weight) in _named(measure, measure(output, *parts(micro_batch.batch))).items():
            found = rows.setdefault(name, [])
            if outputs.speaks:
                found.append((micro_batch.number, float(total), float(weight)))
    return _fold(rows, outputs.count, outputs.group, context.group)


def _named(measure: Measure, result: Any) -> Mapping[str, tuple[Any, Any]]:
    name = getattr(measure, "__name__", "value")
    named = result if isinstance(result, Mapping) else {name: result}
    for key, pair in named.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise LoopError(
                f"run.evaluate cannot use the result of {name}.",
                f"It returned {type(pair).__name__}" + (f" for {key!r}." if named is result else "."),
                "return (sum, weight), for instance (correct.sum(), correct.numel()), or a dict of such pairs.",
            )
    return named


def _fold(
    rows: dict[str, list[tuple[int, float, float]]], count: int, group: ProcessGroup, slices: ProcessGroup
) -> dict[str, float]:
    names = sorted({name for on_rank in group.all_gather_object(sorted(rows)) for name in on_rank})
    names = sorted({name for on_rank in slices.all_gather_object(names) for name in on_rank})
    table = torch.zeros(len(names), 2, count, dtype=torch.float64)
    for i, name in enumerate(names):
        for row, total, weight in rows.get(name, []):
            table[i, 0, row], table[i, 1, row] = total, weight
    table = group.sum_(table.to(group.device))
    table = slices.deterministic_all_reduce(table.flatten()).view(table.shape).cpu()
    result = {}
    for name, (totals, weights) in zip(names, table.tolist(), strict=True):
        weight = chain(weights)
        if not weight > 0:
            raise LoopError(
                f"run.evaluate cannot divide {name} by its total weight.",
                f"The total weight of {count} micro-batches is {weight:g}.",
                "return (sum, weight) with a weight above 0 for some batch.",
            )
        result[name] = chain(totals) / weight
    return result
