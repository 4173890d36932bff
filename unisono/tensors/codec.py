"""Values that contain tensors, as JSON and a table of tensors. Decoding runs no code, so nothing can be unpickled.

    {"state": {0: {"step": tensor, "m": tensor}}, "betas": (0.9, 0.999)}
    ->  {"state": {"~": "map", "of": [[0, {"step": {"~": "tensor", ...}, ...}]]}, "betas": {"~": "tuple", ...}}
        and {"optimizer.state.0.step": tensor, "optimizer.state.0.m": tensor}

Checkpoints are stored in this form, and messages between processes are sent in it. JSON writes floats with all their
digits, so numbers keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.errors import CheckpointError
from unisono.tensors.spec import TensorSpec

_MARK = "~"
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


class ShardPart(NamedTuple):
    """The part of a sharded tensor that this process holds.

    start  index of its first element in the whole tensor; None: another process has the same part, and stores it
    """

    tensor: torch.Tensor
    start: Sequence[int] | None


@dataclass(frozen=True)
class RemoteTensor:
    """A tensor that another process has put into its own table under this name."""

    name: str
    spec: TensorSpec


class TensorTable(dict[str, torch.Tensor]):
    """Tensors by name. Tied tensors, which share memory, shape and strides, are stored once, under the first name.

    Attributes:
        starts: Index of the first element within the whole tensor, for those that are parts of sharded tensors.
    """

    def __init__(
        self, *, keeps_whole: bool = True, part_of: Callable[[torch.Tensor], ShardPart | None] = lambda tensor: None
    ) -> None:
        """Create an empty table.

        Args:
            keeps_whole: False: tensors that are not sharded get a name here, and another process stores them.
            part_of: Returns this process's part of a sharded tensor, or None for a tensor that is not sharded.
        """
        super().__init__()
        self.starts: dict[str, tuple[int, ...]] = {}
        self._keeps_whole, self._part_of = keeps_whole, part_of
        self._taken: set[str] = set()
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def put(self, tensor: torch.Tensor, name: str) -> str:
        """Store a tensor, and return its name in this table."""
        part = self._part_of(tensor)
        tensor = tensor if part is None else part.tensor
        memory = tensor.untyped_storage().data_ptr()
        layout = (memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if memory and layout in self._names:
            return self._names[layout]
        while name in self._taken:  # "c" of "a.b" and "b.c" of "a", or the keys 0 and "0", give the same name
            name += "'"
        self._taken.add(name)
        self._names[layout] = name
        if part is None and not self._keeps_whole:
            return name
        if part is not None:
            if part.start is None or not tensor.numel():
                return name
            self.starts[name] = tuple(part.start)
        # Safetensors stores dense row-major tensors only (not channels_last). Partly shared memory is copied.
        dense = tensor.detach().contiguous()
        self[name] = dense.clone() if memory in self._storages and dense.data_ptr() == tensor.data_ptr() else dense
        self._storages.add(memory)
        return name


def encode(value: Any, name: str, tensors: TensorTable) -> Any:
    """Return `value` as JSON, and put its tensors into `tensors` under names that begin with `name`.

    A subclass of dict, list, tuple or set (Counter, a named tuple) is decoded as the builtin class.

    Raises:
        CheckpointError: The value contains something else than dense tensors, numbers, strings and containers.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return _reference(tensors.put(value, name), TensorSpec.of(value))
    if isinstance(value, RemoteTensor):
        return _reference(value.name, value.spec)
    if isinstance(value, np.generic):  # before float, because numpy's float64 is a subclass of it
        return encode(value.item(), name, tensors)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _MARK for key in value):
            return {key: encode(item, f"{name}.{key}", tensors) for key, item in value.items()}
        return {
            _MARK: "map",
            "of": [[encode(k, name, tensors), encode(v, f"{name}.{k}", tensors)] for k, v in value.items()],
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return items if kind is list else {_MARK: kind.__name__, "of": items}
    layout = f" with layout {value.layout}" if isinstance(value, torch.Tensor) else ""
    raise CheckpointError(
        f"Cannot save {name} of type {type(value).__name__}{layout}.",
        "A checkpoint holds dense tensors, numbers, text, and lists, tuples, sets and dicts of them: what can be read "
        "without running code.",
        "leave it out of that object's state_dict(), or let state_dict() return it as one of these.",
    )


def specs_of(plain: Any) -> dict[str, TensorSpec]:
    """Return the spec of every tensor that encoded JSON refers to, by name, in the order in which they were encoded."""
    found: dict[str, TensorSpec] = {}
    _collect_specs(plain, found)
    return found


def remote_tensors(plain: Any) -> dict[str, RemoteTensor]:
    """Return a stand-in for every tensor that encoded JSON refers to, by name."""
    return {name: RemoteTensor(name, spec) for name, spec in specs_of(plain).items()}


def decode(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the encoded value. `tensors` holds what is to take the place of each tensor, by its name."""
    if isinstance(plain, list):
        return [decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(_MARK)
    if kind is None:
        return {key: decode(item, tensors) for key, item in plain.items()}
    if kind == "tensor":
        return tensors[plain["name"]]
    if kind == "map":
        return {decode(key, tensors): decode(item, tensors) for key, item in plain["of"]}
    return _SEQUENCES[kind](decode(item, tensors) for item in plain["of"])


def _reference(name: str, spec: TensorSpec) -> dict[str, Any]:
    return {_MARK: "tensor", "name": name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _collect_specs(plain: Any, found: dict[str, TensorSpec]) -> None:
    if isinstance(plain, dict):
        if plain.get(_MARK) == "tensor":
            found[plain["name"]] = TensorSpec(plain["dtype"], tuple(plain["shape"]))
            return
        for item in plain.values():
            _collect_specs(item, found)
    elif isinstance(plain, list):
        for item in plain:
            _collect_specs(item, found)
