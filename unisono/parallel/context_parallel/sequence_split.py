"""Sequences in slices: which part of a batch, and of a model's tables of positions, belongs to a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError
from unisono.plan.batch_order import cut_batch


class SequenceCut(NamedTuple):
    """How the sequences of one micro-batch are divided: their length, and how many positions each process has."""

    length: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SequenceDims:
    """What lies along the sequence, for `run.place(..., sequence=...)`. The setting parallel.context divides it.

    batch      {part: dim}, a part by its place in a batch, or its name. None: every tensor of two or more dims whose
               dim 1 is as long as that of the first one
    positions  {name: dim} of the model's buffers and parameters that have a row for each position: a table of angles,
               an embedding of positions. In a forward pass each process sees its own rows of them
    """

    batch: Mapping[int | str, int] | None = None
    positions: Mapping[str, int] = field(default_factory=dict)

    def check(self, model: nn.Module) -> None:
        """Raises LoopError for positions that the model has not; on one process, too."""
        known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, dim in self.positions.items():
            if name not in known:
                near = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
                raise LoopError(
                    f"unisono.SequenceDims was given positions={{{name!r}: {dim}}}.",
                    f"{type(model).__name__} has {len(known)} parameters and buffers, none of this name.",
                    f"positions={{{(near or [*dict(model.named_buffers()), *known])[0]!r}: {dim}}}, say.",
                )
            if not -known[name].dim() <= dim < known[name].dim():
                raise LoopError(
                    f"unisono.SequenceDims was given positions={{{name!r}: {dim}}}.",
                    f"It has shape {tuple(known[name].shape)}.",
                    "name the dim that has a row for each position: 0, mostly.",
                )


def divide(batch: Any, dims: Mapping[int | str, int] | None, group: ProcessGroup) -> tuple[SequenceCut, Any]:
    """How a batch is divided, and this process's slice of it. Slices are in order, and as even as it goes: of 7
    positions 3 and 4; of a single one, some process has none."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    along = _found(batch) if dims is None else _named(batch, dims)
    lengths = {t.shape[dim] for t, dim in along}
    if len(lengths) != 1:
        raise LoopError(
            f"The sequences of a micro-batch were to be divided, with parallel.context = {group.size}.",
            f"Their lengths are {' and '.join(map(str, sorted(lengths)))}."
            if lengths
            else f"In it is no tensor of two or more dims: {type(batch).__name__}.",
            'say which dims of a batch are the sequence: unisono.SequenceDims(batch={"tokens": 1, "targets": 1}).',
        )
    cut = SequenceCut(
        length := lengths.pop(), tuple(b - a for a, b in (cut_batch(length, group.size, r) for r in range(group.size)))
    )
    ours = {id(t): dim for t, dim in along}
    return cut, tree_map_only(
        Tensor, lambda t: slice_of(t, ours[id(t)], cut, group.rank) if id(t) in ours else t, batch
    )


def slice_of(tensor: Tensor, dim: int, cut: SequenceCut, rank: int) -> Tensor:
    """Its rows of this process."""
    return tensor.narrow(dim, sum(cut.lengths[:rank]), cut.lengths[rank])


def _found(batch: Any) -> list[tuple[Tensor, int]]:
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim() > 1]
    return [(t, 1) for t in tensors if t.shape[1] == tensors[0].shape[1]]


def _named(batch: Any, dims: Mapping[int | str, int]) -> list[tuple[Tensor, int]]:
    parts = (
        batch if isinstance(batch, Mapping) else dict(enumerate(batch if isinstance(batch, (list, tuple)) else [batch]))
    )
    wrong = [f"{name!r}: {dim}" for name, dim in dims.items() if not _has(parts.get(name), dim)]
    if wrong:
        shapes = [
            f"{name!r}: {tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__}" for name, t in parts.items()
        ]
        raise LoopError(
            f"A micro-batch was to be divided by unisono.SequenceDims(batch={{{', '.join(wrong)}}}).",
            f"It has {', '.join(shapes)}.",
            "name its parts as they are, each with the dim of the sequence.",
        )
    return [(parts[name], dim) for name, dim in dims.items()]


def _has(tensor: Any, dim: int) -> bool:
    return isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim()


class PositionRows:
    """A model's table of positions. While the module that has these hooks goes forward, the table's rows are our own.

    A table changes when the model is called, and when the part that holds it is: with recomputation that may happen
    once more in the backward pass. Hooks are told which module it is, so a copy of a model changes its own table.
    """

    def __init__(
        self, path: str, key: str, dim: int, rank: int, now: Callable[[], SequenceCut | None], held: list[Any]
    ) -> None:
        self.path, self.key, self.dim, self.rank, self.now = path, key, dim, rank, now
        self.held: list[tuple[dict[str, Any], Any]] = held  # what was there, from the outermost call to the innermost

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionRows:
        return self

    def enter(self, module: nn.Module, _: Any) -> None:
        holder = module.get_submodule(self.path)
        table: dict[str, Any] = holder._buffers if self.key in holder._buffers else holder._parameters
        whole, cut = table[self.key], self.now()
        known = any(other is table for other, _ in self.held)
        self.held.append((table, whole))
        if cut is not None and not known and not hasattr(whole, "full_tensor"):  # a shard is gathered later
            table[self.key] = slice_of(whole, self.dim, cut, self.rank)

    def leave(self, *_: Any) -> None:
        table, whole = self.held.pop()
        table[self.key] = whole


def slice_along(
    model: nn.Module, positions: Mapping[str, int], rank: int, now: Callable[[], SequenceCut | None]
) -> None:
    """From now on the model finds its own rows of its positions, whenever it goes forward and `now()` says how."""
    for name, dim in positions.items():
        path, _, key = name.rpartition(".")
        held: list[Any] = []
        for module, below in {model: path, model.get_submodule(path): ""}.items():
            rows = PositionRows(below, key, dim, rank, now, held)
            module.register_forward_pre_hook(rows.enter)
            module.register_forward_hook(rows.leave, prepend=True, always_call=True)  # before a shard is let go of
