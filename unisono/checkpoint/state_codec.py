"""A state dict taken apart: tensors under names of their own, everything else as JSON. Nothing is ever unpickled.

    {"state": {0: {"step": tensor, "m": tensor}}, "betas": (0.9, 0.999)}
    ->  {"state": {"~": "map", "of": [[0, {"step": {"~": "tensor", ...}, ...}]]}, "betas": {"~": "tuple", ...}}
        and {"optimizer.state.0.step": tensor, "optimizer.state.0.m": tensor}

JSON writes floats with all their digits, so numbers come back with the same bits.

Of a tensor that lies over several processes each packs the part that lies here; the JSON tells of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unisono.distributed.process_group import is_dtensor, to_local
from unisono.errors import CheckpointError

_MARK = "~"

Begins = Callable[[Any], Sequence[int] | None]
"""Of a tensor that lies over several processes: where in the whole this process's part begins, one number a dimension;
None: another process has the same part, and speaks for it."""


@dataclass(frozen=True)
class RemoteTensor:
    """Stands for a tensor that another process has, and has packed under this name."""

    name: str
    dtype: str
    shape: list[int]

    def told(self) -> dict[str, Any]:
        """The same as JSON."""
        return {_MARK: "tensor", "name": self.name, "dtype": self.dtype, "shape": self.shape}


class TensorTable(dict[str, torch.Tensor]):
    """Tensors by name. One that is there already, under another name (tied weights), is not put in twice.

    starts  of those that are parts: where they begin in the whole
    """

    def __init__(self, *, speaks: bool = True, begins: Begins | None = None) -> None:
        """
        speaks  False: what lies here as a whole gets a name, and another process is to keep it
        begins  what lies over several processes is expected, and this tells about it
        """
        super().__init__()
        self.starts: dict[str, tuple[int, ...]] = {}
        self._speaks, self._begins = speaks, begins
        self._taken: set[str] = set()
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def put(self, tensor: torch.Tensor, name: str) -> str:
        """Put a tensor in, and return the name that it has here."""
        start: Sequence[int] | None = () if self._speaks else None
        if apart := self._begins is not None and is_dtensor(tensor):
            assert self._begins is not None
            start, tensor = self._begins(tensor), to_local(tensor.detach())
        memory = tensor.untyped_storage().data_ptr()
        layout = (memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if memory and layout in self._names:
            return self._names[layout]
        while name in self._taken:  # "c" of "a.b" and "b.c" of "a", or the keys 0 and "0", are not the same
            name += "'"
        self._taken.add(name)
        self._names[layout] = name
        if start is None or (apart and not tensor.numel()):
            return name
        if apart:
            self.starts[name] = tuple(start)
        # a file holds whole tensors, row after row (safetensors refuses others: channels_last, say); one that shares
        # its memory with another in part is copied out
        dense = tensor.detach().contiguous()
        self[name] = dense.clone() if memory in self._storages and dense.data_ptr() == tensor.data_ptr() else dense
        self._storages.add(memory)
        return name


def pack(value: Any, name: str, tensors: TensorTable) -> Any:
    """`value` as JSON; its tensors are put into `tensors` under names that begin with `name`.

    What inherits from dict, list, tuple or set (a Counter, a namedtuple) comes back as that.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        name = tensors.put(value, name)
        return {
            _MARK: "tensor",
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [*value.shape],
        }
    if isinstance(value, RemoteTensor):
        return value.told()
    if isinstance(value, np.generic):  # before float: numpy's float64 is one
        return pack(value.item(), name, tensors)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _MARK for key in value):
            return {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}
        return {
            _MARK: "map",
            "of": [[pack(k, name, tensors), pack(v, f"{name}.{k}", tensors)] for k, v in value.items()],
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return items if kind is list else {_MARK: kind.__name__, "of": items}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}"
        + (f" with layout {value.layout}" if isinstance(value, torch.Tensor) else "")
        + ", and was to be saved.",
        "A checkpoint holds dense tensors, numbers, text, and lists, tuples, sets and dicts of them: what can be read "
        "without running code.",
        "leave it out of that object's state_dict(), or let state_dict() return it as one of these.",
    )


def described(plain: Any, into: dict[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """The dtype and shape of every tensor that `plain` refers to, by name."""
    into = {} if into is None else into
    if isinstance(plain, dict):
        if plain.get(_MARK) == "tensor":
            into[plain["name"]] = plain
        for item in plain.values():
            described(item, into)
    elif isinstance(plain, list):
        for item in plain:
            described(item, into)
    return into


def unpack(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """What was packed, with what `tensors` has under the names of its tensors."""
    if isinstance(plain, list):
        return [unpack(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(_MARK)
    if kind is None:
        return {key: unpack(item, tensors) for key, item in plain.items()}
    if kind == "tensor":
        return tensors[plain["name"]]
    if kind == "map":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in plain["of"]}
    return _sequences[kind](unpack(item, tensors) for item in plain["of"])


_sequences = {"tuple": tuple, "set": set, "frozenset": frozenset}
