"""Tensors of a checkpoint that are read when they are needed, and only as much of them as is needed.

A tensor is stored in one file, or in parts in several. A process reads a whole tensor or any box of it. Rows that four
processes have stored, read by two:

    stored        rank 0 | rank 1 | rank 2 | rank 3
    read          rank 0 ---------| rank 1 ---------|

Files are read with the safetensors library, which validates their headers and runs no code of theirs.

Weights of other programs are in one file, or in several with an index, as `save_pretrained` of Hugging Face's
transformers writes them:

    model.safetensors.index.json        {"weight_map": {"layers.0.weight": "model-00001-of-00002.safetensors", ...}}
    model-00001-of-00002.safetensors    the tensors themselves
    model-00002-of-00002.safetensors
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from unisono.checkpoint.contents import DTYPES, MOST_JSON, StoredPart, StoredTensor, read_parts
from unisono.checkpoint.regular_file import open_regular, read_regular
from unisono.checkpoint.safetensors_writer import NAMES
from unisono.errors import CheckpointError
from unisono.json_forms import is_text, object_of, parse_value
from unisono.tensors.spec import dtype_name

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names in a folder with weights of other programs."""

WINDOW = 16 * 2**20
"""Bytes that are read before files are closed and opened again."""

TORCH_DTYPES = {kind: getattr(torch, name) for name, (kind, _) in DTYPES.items() if kind}
"""Dtypes by their names in the format."""


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

    def content(self, file_name: str) -> tuple[dict[str, LazyTensor], dict[str, str]]:
        """Return the tensors of a file by name, which are not read, and the texts in its header.

        Raises:
            CheckpointError: It is no safetensors file, or has a dtype that torch lacks.
        """
        file = self._opened(self.folder / file_name)
        found = {}
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            stored = file.get_slice(name)
            kind, shape = stored.get_dtype(), torch.Size(stored.get_shape())
            if kind not in TORCH_DTYPES:
                raise CheckpointError(
                    f"Cannot read {name!a} from {self.folder / file_name}: torch has no such dtype.",
                    f"It is {kind}.",
                    "name another file.",
                )
            part = StoredPart(file_name, [0] * len(shape), shape)
            found[name] = LazyTensor(self, name, TORCH_DTYPES[kind], shape, [part])
        return found, dict(file.metadata() or {})

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

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.shape.numel() * self.dtype.itemsize

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


def has_tensor_files(folder: Path) -> bool:
    """Return whether a folder has weights of other programs, in one of the two forms."""
    return any((folder / name).is_file() for name in (ONE_FILE, INDEX))


def tensors_in(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a safetensors file, or of a folder, by name. Only headers are read.

    Names of tied weights that a file does not hold, but its metadata names, have the tensor that it holds for them.

    Raises:
        CheckpointError: A file is missing or damaged, or the index does not fit the files.
    """
    folder = path if path.is_dir() else path.parent
    try:
        mapped = _read_index(folder / INDEX) if path.is_dir() and (folder / INDEX).is_file() else {}
    except (OSError, ValueError) as error:
        facts = f"{folder / INDEX}: {error}."
        raise CheckpointError(f"Cannot load the weights in {path}.", facts, "name another folder.") from error
    names = sorted(set(mapped.values())) or [ONE_FILE if path.is_dir() else path.name]
    files, found, tied = SafetensorsFiles(folder), dict[str, LazyTensor](), dict[str, str]()
    for name in names:
        try:
            tensors, texts = files.content(_in_blobs(folder, name))
        except CheckpointError as error:
            first, *_ = error.problems
            facts = f"{first.error} {first.facts}"
            raise CheckpointError(f"Cannot load the weights in {path}.", facts, "copy it again.") from error
        found |= tensors
        tied |= texts
    lost = sorted(name for name in mapped if name not in found)
    if lost:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise CheckpointError(
            f"Cannot load the weights in {path}.",
            f"The index places {lost[0]!a} in {mapped[lost[0]]}, which does not hold it{more}.",
            "copy the folder again, with all of its files.",
        )
    return found | {name: found[first] for name, first in tied.items() if first in found and name not in found}


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises ValueError if the index has another form, or names other folders."""
    index: Any = parse_value(read_regular(Path(_in_blobs(path.parent, path.name, whole=True)), MOST_JSON))
    mapped = index.get("weight_map") if isinstance(index, dict) else None
    if not mapped or not object_of(is_text)(mapped):
        raise ValueError("it has no weight_map from names of tensors to names of files")
    outside = [file for file in mapped.values() if Path(file).name != file]
    if outside:
        raise ValueError(f"it names {outside[0]!a}, which is no file of this folder")
    return dict(mapped)


def _in_blobs(folder: Path, name: str, *, whole: bool = False) -> str:
    """Return the file that a name in a folder leads to, from the folder, or with `whole` its whole path.

    The cache of huggingface_hub has links from snapshots/REVISION/NAME to blobs/HASH. Other links are not followed.
    """
    target = (folder / name).resolve()
    known = target.parent == folder.resolve().parent.parent / "blobs"
    return str(target) if known else str(folder / name) if whole else name
