"""Prediction: one row of output for every sample, in the data's order, on every process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps

from unisono.checkpoint.sharded_state import gather_tensor
from unisono.data.eval_loader import EvalBatch
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError
from unisono.tensors.spec import TensorSpec, as_bytes, dtype_name
from unisono.torch_compat.tree_specs import load_treespec
from unisono.train.evaluation.model_outputs import ModelOutputs


def predict(outputs: ModelOutputs) -> Any:
    """Return one row for each sample, in the data's order (see Run.predict)."""
    spec: TreeSpec | None = None
    numbers: list[tuple[int, int]] = []  # (number, rows) of each micro-batch of this process
    pieces: list[list[Tensor]] = []
    for micro_batch, output in outputs:
        leaves, found = tree_flatten(output)
        spec = _same_structure(spec, found)
        rows = [_rows(gather_tensor(leaf), micro_batch) for leaf in leaves]
        if outputs.speaks:
            pieces.append(rows)
            numbers.append((micro_batch.number, micro_batch.samples))
    columns = [list(column) for column in zip(*pieces, strict=True)]
    kinds = [sorted({(dtype_name(piece.dtype), tuple(piece.shape[1:])) for piece in column}) for column in columns]
    mine = {"numbers": numbers, "kinds": kinds, "spec": None if spec is None else _as_json(spec)}
    everybody = outputs.group.all_gather_object(mine)
    described = next(other for other in everybody if other["spec"] is not None)
    for other in everybody:
        _same_structure(described["spec"], described["spec"] if other["spec"] is None else other["spec"])
    places = [[(number, rows) for number, rows in other["numbers"]] for other in everybody]
    result = []
    for leaf in range(len(described["kinds"])):
        kinds_of = {(d, tuple(shape)) for other in everybody for f in other["kinds"][leaf : leaf + 1] for d, shape in f}
        dtype, shape = _only(kinds_of)
        like = TensorSpec(dtype, (0, *shape)).empty()
        result.append(_gather(torch.cat([like, *columns[leaf]] if columns else [like]), places, outputs.group))
    return tree_unflatten(result, load_treespec(json.dumps(described["spec"])))


def _rows(leaf: Any, micro_batch: EvalBatch) -> Tensor:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != micro_batch.samples:
        got = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{type(leaf).__name__}"
        raise LoopError(
            f"run.predict cannot find the rows of {micro_batch.samples} samples in the output.",
            f"The model returned {got}.",
            "return tensors with one row for each sample: forward=lambda model, batch: model(batch[0]).logits, say.",
        )
    return leaf.detach().to("cpu", copy=True)  # copy, because the model may write to this memory again


def _only(kinds: set[tuple[str, tuple[int, ...]]]) -> tuple[str, tuple[int, ...]]:
    if len(kinds) > 1:
        words = [f"{dtype} {shape}" for dtype, shape in sorted(kinds)[:4]]
        raise LoopError(
            "run.predict cannot put the rows of all micro-batches together.",
            f"They differ in kind or shape: {' and '.join(words)}.",
            "make them alike: forward=lambda model, batch: model(batch[0]).argmax(-1), or pad to one length.",
        )
    return kinds.pop()


def _same_structure(before: Any, now: Any) -> Any:
    if before is not None and before != now:
        raise LoopError(
            "run.predict cannot put the rows of all micro-batches together.",
            f"The model returns outputs of unlike structure: {str(before)[:150]} and {str(now)[:150]}.",
            "return the same tuple or dict of tensors for every batch.",
        )
    return now


def _as_json(spec: TreeSpec) -> Any:
    """Return the structure as a JSON value."""
    try:
        return json.loads(treespec_dumps(spec))
    except NotImplementedError as error:
        raise LoopError(
            "run.predict cannot send the structure of the model's output to the other processes.",
            f"It is of a class that torch cannot name: {str(error).splitlines()[0]}",
            "return tensors, or tuples, lists and dicts of them: forward=lambda model, batch: tuple(model(batch[0])).",
        ) from None


def _gather(mine: Tensor, places: Sequence[Sequence[tuple[int, int]]], group: ProcessGroup) -> Tensor:
    """Return all rows, sorted by the numbers of their micro-batches; places[r]: the (number, rows) of process r."""
    counts = [sum(rows for _, rows in place) for place in places]
    shape, dtype = mine.shape[1:], mine.dtype
    row_bytes = shape.numel() * mine.element_size()
    if group.size == 1 or row_bytes == 0:
        return mine if group.size == 1 else mine.new_empty(sum(counts), *shape)
    sent = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8, device=group.device)
    sent[: counts[group.rank] * row_bytes] = as_bytes(mine).to(group.device)
    everybody = torch.empty(group.size * len(sent), dtype=torch.uint8, device=group.device)
    group.all_gather(everybody, sent).wait()
    parts = []
    for line, count, place in zip(everybody.cpu().view(group.size, -1), counts, places, strict=True):
        rows = line[: count * row_bytes].view(dtype).view(count, *shape)
        cut = rows.split([n for _, n in place])
        parts += [(number, piece) for (number, _), piece in zip(place, cut, strict=True)]
    return torch.cat([piece for _, piece in sorted(parts, key=lambda part: part[0])])
