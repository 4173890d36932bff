"""Split sequences into slices: the part of a batch, and of a model's tables of positions, that a process has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError
from unisono.plan.batch_order import cut_batch
from unisono.torch_compat.modules import buffer_slots, parameter_slots


class SequenceCut(NamedTuple):
    """How the sequences of one micro-batch are split: their length, and the number of positions of each process."""

    length: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SequenceDims:
    """The dims that run along the sequence: `run.place(..., sequence=...)`. The setting parallel.context splits them.

    Attributes:
        batch: {part: dim}, a part of a batch by its index or its name. None: every tensor of two or more dims whose dim
            1 is as long as that of the first one.
        positions: {name: dim} of the model's buffers and parameters that have a row for each position: a table of
            rotary angles, an embedding of positions. In a forward pass each process sees its own rows of them.
    """

    batch: Mapping[int | str, int] | None = None
    positions: Mapping[str, int] = field(default_factory=dict)

    def check(self, model: nn.Module) -> None:
        """Raise LoopError for positions that the model does not have; on one process, too."""
        known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, dim in self.positions.items():
            if name not in known:
                near = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
                raise LoopError(
                    f"{type(model).__name__} has no parameter or buffer {name!r}.",
                    f"It has {len(known)} of them. unisono.SequenceDims got positions={{{name!r}: {dim}}}.",
                    f"positions={{{(near or [*dict(model.named_buffers()), *known])[0]!r}: {dim}}}, for instance.",
                )
            if not -known[name].dim() <= dim < known[name].dim():
                raise LoopError(
                    f"{name} has no dim {dim}.",
                    f"Its shape is {tuple(known[name].shape)}. unisono.SequenceDims got positions={{{name!r}: {dim}}}.",
                    "name the dim that has a row for each position: mostly 0.",
                )


def divide(batch: Any, dims: Mapping[int | str, int] | None, group: ProcessGroup) -> tuple[SequenceCut, Any]:
    """Split a batch, and return how it is split and this process's slice.

    Slices are in the order of ranks, and as even as possible: 7 positions are 3 and 4. A process may have none.
    """
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    along = _sequence_tensors(batch) if dims is None else _named_tensors(batch, dims)
    lengths = {t.shape[dim] for t, dim in along}
    if len(lengths) != 1:
        raise LoopError(
            f"Cannot split the sequences of a micro-batch over parallel.context = {group.size} processes.",
            f"Their lengths are {' and '.join(map(str, sorted(lengths)))}."
            if lengths
            else f"It has no tensor of two or more dims: {type(batch).__name__}.",
            'name the dims of a batch that run along the sequence: unisono.SequenceDims(batch={"tokens": 1, '
            '"targets": 1}).',
        )
    cut = SequenceCut(
        length := lengths.pop(), tuple(b - a for a, b in (cut_batch(length, group.size, r) for r in range(group.size)))
    )
    dim_of = {id(t): dim for t, dim in along}
    return cut, tree_map_only(
        Tensor, lambda t: slice_of(t, dim_of[id(t)], cut, group.rank) if id(t) in dim_of else t, batch
    )


def slice_of(tensor: Tensor, dim: int, cut: SequenceCut, rank: int) -> Tensor:
    """Return the positions of a rank."""
    return tensor.narrow(dim, sum(cut.lengths[:rank]), cut.lengths[rank])


def _sequence_tensors(batch: Any) -> list[tuple[Tensor, int]]:
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim() > 1]
    return [(t, 1) for t in tensors if t.shape[1] == tensors[0].shape[1]]


def _named_tensors(batch: Any, dims: Mapping[int | str, int]) -> list[tuple[Tensor, int]]:
    parts = (
        batch if isinstance(batch, Mapping) else dict(enumerate(batch if isinstance(batch, (list, tuple)) else [batch]))
    )
    wrong = [f"{name!r}: {dim}" for name, dim in dims.items() if not _has_dim(parts.get(name), dim)]
    if wrong:
        shapes = [
            f"{name!r}: {tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__}" for name, t in parts.items()
        ]
        raise LoopError(
            f"A micro-batch does not have what unisono.SequenceDims(batch={{{', '.join(wrong)}}}) names.",
            f"It has {', '.join(shapes)}.",
            "name the parts that it has, each with the dim of the sequence.",
        )
    return [(parts[name], dim) for name, dim in dims.items()]


def _has_dim(tensor: Any, dim: int) -> bool:
    return isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim()


class PositionRows:
    """Hooks that replace a model's table of positions by this process's rows during a forward.

    The table is replaced when the model is called, and when the module that holds it is called: with recomputation that
    may happen again in backward. A hook gets the module that it runs for, so a copy of a model replaces its own table.

    Args:
        path: The module that holds the table, below the hooked one.
        key: The name of the table in it.
        dim: The dim of positions.
        rank: The rank of this process on the axis `context`.
        current_cut: Returns how the micro-batch is split; None: it is not.
        replaced: The tables that are replaced now, from the outermost call to the innermost.
    """

    def __init__(
        self,
        path: str,
        key: str,
        dim: int,
        rank: int,
        current_cut: Callable[[], SequenceCut | None],
        replaced: list[Any],
    ) -> None:
        self.path, self.key, self.dim, self.rank, self.current_cut = path, key, dim, rank, current_cut
        self.replaced: list[tuple[dict[str, Any], Any]] = replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionRows:
        return self

    def enter(self, module: nn.Module, _: Any) -> None:
        holder = module.get_submodule(self.path)
        slots: dict[str, Any] = buffer_slots(holder) if self.key in buffer_slots(holder) else parameter_slots(holder)
        table, cut = slots[self.key], self.current_cut()
        is_replaced = any(other is slots for other, _ in self.replaced)
        self.replaced.append((slots, table))
        if cut is not None and not is_replaced and not hasattr(table, "full_tensor"):  # a shard is gathered later
            slots[self.key] = slice_of(table, self.dim, cut, self.rank)

    def leave(self, *_: Any) -> None:
        slots, table = self.replaced.pop()
        slots[self.key] = table


def slice_along(
    model: nn.Module, positions: Mapping[str, int], rank: int, current_cut: Callable[[], SequenceCut | None]
) -> None:
    """Let the model see its own rows of its tables of positions, whenever `current_cut()` returns a cut."""
    for name, dim in positions.items():
        path, _, key = name.rpartition(".")
        replaced: list[Any] = []
        for module, below in {model: path, model.get_submodule(path): ""}.items():
            rows = PositionRows(below, key, dim, rank, current_cut, replaced)
            module.register_forward_pre_hook(rows.enter)
            module.register_forward_hook(rows.leave, prepend=True, always_call=True)  # before FSDP2 frees a shard
