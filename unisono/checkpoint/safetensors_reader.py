"""Tensors of a checkpoint that are read when they are needed, and only as much of them as is needed.

A tensor is stored in one file, or in parts in several. A process reads a whole tensor or any box of it. Rows that four
processes have stored, read by two:

    stored        rank 0 | rank 1 | rank 2 | rank 3
    read          rank 0 ---------| rank 1 ---------|

Files are read with the safetensors library, which validates their headers and runs no code of theirs.
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

WINDOW = 16 * 2**20
"""Bytes that are read before files are closed and opened again."""


class SafetensorsFiles:
    """The safetensors files of a checkpoint. Each is opened when it is first read.

    They are mapped into memory, and closed after WINDOW bytes: pages that were read would stay in the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._read = 0

    def read(self, file_name: str, name: str, box: Sequence[slice], dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """Return a box of a tensor that has this dtype and shape in the file."""
        if self._read > WINDOW:
            self._open, self._read = {}, 0
        self._read += prod(part.stop - part.start for part in box) * dtype.itemsize
        if file_name not in self._open:
            self._open[file_name] = safe_open(self.folder / file_name, "pt")
        file = self._open[file_name]
        if dtype not in NAMES:  # stored as bytes
            return file.get_tensor(name).view(dtype).view(*shape)[tuple(box)]
        if list(file.get_slice(name).get_shape()) != list(shape):
            raise CheckpointError(
                f"Cannot read {name} from {self.folder / file_name}: its shape is wrong.",
                f"It has the shape {file.get_slice(name).get_shape()} there instead of {list(shape)}.",
                "name another checkpoint, or remove this one.",
            )
        return file.get_slice(name)[tuple(box)] if box else file.get_tensor(name)


class StoredPart(NamedTuple):
    """A part of a tensor: the file, the index of its first element in the whole, and its shape."""

    file_name: str
    start: Sequence[int]
    shape: Sequence[int]


@dataclass
class LazyTensor:
    """A tensor of a checkpoint that has not been read."""

    files: SafetensorsFiles
    name: str
    dtype: torch.dtype
    shape: torch.Size
    parts: list[StoredPart]

    def whole(self) -> torch.Tensor:
        """Read the whole tensor into memory of the CPU."""
        return self.box([0] * len(self.shape), self.shape)

    def box(self, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read the box of this shape that begins at this index."""
        out = torch.empty(*shape, dtype=self.dtype) if shape else torch.empty((), dtype=self.dtype)
        if not out.numel():
            return out
        for part in self.parts:
            low = [max(a, b) for a, b in zip(start, part.start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, shape, part.start, part.shape, strict=True)]
            if all(lo < hi for lo, hi in zip(low, high, strict=True)):
                source = [slice(lo - b, hi - b) for lo, hi, b in zip(low, high, part.start, strict=True)]
                target = tuple(slice(lo - a, hi - a) for lo, hi, a in zip(low, high, start, strict=True))
                out[target] = self.files.read(part.file_name, self.name, source, self.dtype, part.shape)
        return out


def lazy_tensors(folder: Path, specs: Mapping[str, TensorSpec]) -> dict[str, LazyTensor]:
    """Return the tensors of a complete checkpoint by name.

    Args:
        folder: The checkpoint.
        specs: Dtype and shape of every tensor, from state.json.

    Raises:
        CheckpointError: The files hold fewer or more elements of a tensor than it has.
    """
    files = SafetensorsFiles(folder)
    found = {
        name: LazyTensor(files, name, spec.torch_dtype, torch.Size(spec.shape), []) for name, spec in specs.items()
    }
    for path in sorted(folder.glob("rank-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        file_name = path.with_suffix(SUFFIX).name
        for name in report["whole"]:
            if name in found:
                shape = found[name].shape
                found[name].parts.append(StoredPart(file_name, [0] * len(shape), shape))
        for name, (start, shape) in report["parts"].items():
            if name in found:
                found[name].parts.append(StoredPart(file_name, start, shape))
    for tensor in found.values():
        count = sum(prod(part.shape) for part in tensor.parts)
        if count != tensor.shape.numel():
            raise CheckpointError(
                f"Cannot read {tensor.name} from {folder}: it is incomplete.",
                f"The files hold {count} of its elements, and it has {tensor.shape.numel()}.",
                "name another checkpoint, or remove this one.",
            )
    return found
