"""Tensors of a checkpoint that are read when they are needed, and no more of them than is needed.

A tensor may lie in one sheet, or in parts in several; whoever loads it may want all of it, or a part that is cut in
another way. A row of what was divided among four processes, as two others want it:

    sheets        rank 0 | rank 1 | rank 2 | rank 3
    wanted        process 0 ------| process 1 ------|

Sheets are read with the safetensors library, which checks their headers and runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from unisono.checkpoint.safetensors_writer import NAMES, SUFFIX
from unisono.errors import CheckpointError
from unisono.tensors.spec import TensorSpec


class SafetensorsFiles:
    """The sheets of a checkpoint, each opened when it is first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}

    def read(self, sheet: str, name: str, box: Sequence[slice], dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """A box of a tensor of this shape."""
        if sheet not in self._open:
            self._open[sheet] = safe_open(self.folder / sheet, "pt")
        file = self._open[sheet]
        if dtype not in NAMES:  # bytes
            return file.get_tensor(name).view(dtype).view(*shape)[tuple(box)]
        if list(file.get_slice(name).get_shape()) != list(shape):
            raise CheckpointError(
                f"{name} was to be read from {self.folder / sheet}.",
                f"It has the shape {file.get_slice(name).get_shape()} there instead of {list(shape)}.",
                "name another checkpoint, or remove this one.",
            )
        return file.get_slice(name)[tuple(box)] if box else file.get_tensor(name)


class TensorPart(NamedTuple):
    """A part of a tensor: in which sheet, where it begins in the whole, its shape."""

    sheet: str
    start: Sequence[int]
    shape: Sequence[int]


@dataclass
class LazyTensor:
    """A tensor of a checkpoint."""

    sheets: SafetensorsFiles
    name: str
    dtype: torch.dtype
    shape: torch.Size
    parts: list[TensorPart]

    def whole(self) -> torch.Tensor:
        """All of it, in the CPU's memory."""
        return self.box([0] * len(self.shape), self.shape)

    def box(self, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """So much of it from there on."""
        out = torch.empty(*shape, dtype=self.dtype) if shape else torch.empty((), dtype=self.dtype)
        if not out.numel():
            return out
        for part in self.parts:
            low = [max(a, b) for a, b in zip(start, part.start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, shape, part.start, part.shape, strict=True)]
            if all(lo < hi for lo, hi in zip(low, high, strict=True)):
                theirs = [slice(lo - b, hi - b) for lo, hi, b in zip(low, high, part.start, strict=True)]
                ours = tuple(slice(lo - a, hi - a) for lo, hi, a in zip(low, high, start, strict=True))
                out[ours] = self.sheets.read(part.sheet, self.name, theirs, self.dtype, part.shape)
        return out


def stored(folder: Path, specs: Mapping[str, TensorSpec]) -> dict[str, LazyTensor]:
    """The tensors of a whole checkpoint, by name; `specs`: of each, as state.json has them.

    Raises CheckpointError, which names the folder, where there is less or more of one than it should have.
    """
    sheets = SafetensorsFiles(folder)
    found: dict[str, LazyTensor] = {}
    for name, spec in specs.items():
        found[name] = LazyTensor(sheets, name, spec.torch_dtype, torch.Size(spec.shape), [])
    for word in sorted(folder.glob("rank-*.json")):
        said = json.loads(word.read_text(encoding="utf-8"))
        for name in said["whole"]:
            if name in found:
                shape = found[name].shape
                found[name].parts.append(TensorPart(word.with_suffix(SUFFIX).name, [0] * len(shape), shape))
        for name, (start, shape) in said["parts"].items():
            if name in found:
                found[name].parts.append(TensorPart(word.with_suffix(SUFFIX).name, start, shape))
    for tensor in found.values():
        count = sum(prod(part.shape) for part in tensor.parts)
        if count != tensor.shape.numel():
            raise CheckpointError(
                f"{tensor.name} was to be read from {folder}.",
                f"Its sheets hold {count} numbers of it, and it has {tensor.shape.numel()}.",
                "name another checkpoint, or remove this one.",
            )
    return found
