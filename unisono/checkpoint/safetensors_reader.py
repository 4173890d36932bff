"""Tensors of a checkpoint that are read when they are needed, and only as much of them as is needed.

A tensor is stored in one file, or in parts in several. A process reads a whole tensor or any box of it. Rows that four
processes have stored, read by two:

    stored        rank 0 | rank 1 | rank 2 | rank 3
    read          rank 0 ---------| rank 1 ---------|

Files are read with the safetensors library, which validates their headers and runs no code of theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from unisono.checkpoint.contents import DTYPES, StoredPart, StoredTensor, read_parts
from unisono.checkpoint.regular_file import open_regular
from unisono.checkpoint.safetensors_writer import NAMES
from unisono.errors import CheckpointError
from unisono.tensors.spec import dtype_name

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
            self._open[file_name] = self._opened(self.folder / file_name)
        file = self._open[file_name]
        stored = file.get_slice(name)
        kind, size = DTYPES[dtype_name(dtype)]
        wanted = (kind, list(shape)) if kind else ("U8", [prod(shape) * size])
        if (found := (stored.get_dtype(), list(stored.get_shape()))) != wanted:  # changed since it was checked
            raise CheckpointError(
                f"Cannot read {name!a} from {self.folder / file_name}: its dtype or shape is wrong.",
                f"It is {found[0]} {found[1]} there instead of {wanted[0]} {wanted[1]}.",
                "name another checkpoint, or remove this one.",
            )
        if dtype not in NAMES:  # stored as bytes
            return file.get_tensor(name).view(dtype).view(*shape)[tuple(box)]
        return stored[tuple(box)] if box else file.get_tensor(name)

    def _opened(self, path: Path) -> Any:
        """Map a file. The mapping outlives the file that is opened here."""
        try:
            with open_regular(path) as file:
                return safe_open(f"/proc/self/fd/{file.fileno()}", "pt")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"Cannot read {path}.",
                f"{type(error).__name__}: {error}",
                "name another checkpoint, or remove this one.",
            ) from error


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


def lazy_tensors(folder: Path, names: Collection[str], specs: Mapping[str, StoredTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of a complete checkpoint by name.

    Args:
        folder: The checkpoint.
        names: Names of its files.
        specs: Dtype and shape of every tensor, from state.json.

    Raises:
        OSError: A report about a file cannot be read.
        ValueError: The files do not hold each element of each tensor exactly once.
    """
    files, parts = SafetensorsFiles(folder), read_parts(folder, names, specs)
    return {
        name: LazyTensor(files, name, getattr(torch, spec.dtype), torch.Size(spec.shape), parts[name])
        for name, spec in specs.items()
    }
