"""Predictions whose rows differ in length between micro-batches: logits of tokens, generated tokens.

Every process keeps the outputs of its micro-batches, all agree on the largest shape, and each pads its rows to it. Then
the rows are gathered in the order of the data, as by `run.predict`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from unisono.checkpoint.sharded_state import gather_tensor
from unisono.data.eval_loader import EvalBatch
from unisono.data.loader import Collate
from unisono.train.evaluation.collective_pass import collective_pass
from unisono.train.evaluation.model_call import Forward
from unisono.train.evaluation.model_outputs import ModelOutputs
from unisono.train.evaluation.predict import predict
from unisono.train.run import Run


class PaddedOutputs:
    """Outputs of a pass over data, padded to one shape.

    Args:
        outputs: The outputs of this process.
        padding: The value of padding.

    Attributes:
        group: All processes.
        speaks: Whether the outputs of this process count.
    """

    def __init__(self, outputs: ModelOutputs, padding: int) -> None:
        self._outputs, self._padding = outputs, padding
        self.group, self.speaks = outputs.group, outputs.speaks

    def __iter__(self) -> Iterator[tuple[EvalBatch, Any]]:
        """Yield (micro-batch, output) with outputs of one shape, after the pass over all data."""
        kept = [
            (micro_batch._replace(batch=None), *tree_flatten(tree_map_only(torch.Tensor, _to_cpu, output)))
            for micro_batch, output in self._outputs
        ]
        mine = [[list(leaf.shape[1:]) for leaf in leaves] for _, leaves, _ in kept]
        shapes = [shape for found in self.group.all_gather_object(mine) for shape in found]
        largest = [[max(sizes) for sizes in zip(*of_leaf, strict=True)] for of_leaf in zip(*shapes, strict=True)]
        for micro_batch, leaves, spec in kept:
            padded = [pad_to(leaf, shape, self._padding) for leaf, shape in zip(leaves, largest, strict=True)]
            yield micro_batch, tree_unflatten(padded, spec)


def predict_padded(
    run: Run[Any], model: torch.nn.Module, data: Any, *, forward: Forward, collate_fn: Collate | None, padding: int
) -> Any:
    """Return the outputs for all samples as `run.predict` does. Rows of other lengths are padded at their ends.

    Args:
        run: The run.
        model: The model.
        data: The data set.
        forward: forward(model, batch) -> a tensor [rows, ...], or tuples, lists and dicts of them.
        collate_fn: A list of samples -> a batch.
        padding: The value of padding.
    """
    context, verb = run.context, "run.predict"
    context.progress.refuse_within_round(verb)
    for attempt in context.collective.attempts(verb, again=not isinstance(data, Iterator)):
        with attempt, collective_pass(context, verb, model, data, forward, collate_fn) as outputs:
            padded: Any = PaddedOutputs(outputs, padding)  # it has what predict reads
            result = predict(padded)
    return result


def pad_to(rows: torch.Tensor, shape: list[int], padding: int) -> torch.Tensor:
    """Return rows [n, *shape], padded at the end of each dim."""
    widths = [size - now for size, now in zip(shape, rows.shape[1:], strict=True)]
    if not any(widths):
        return rows
    return torch.nn.functional.pad(rows, [part for width in reversed(widths) for part in (0, width)], value=padding)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = gather_tensor(tensor)
    return whole.detach().to("cpu", copy=True)
