"""The parts of an output: files that are complete or do not exist, so that a prediction continues where it ended.

    OUT.parts/request.json        what is predicted: the weights, the data, the script
    OUT.parts/00000003.jsonl      the rows of the fourth part, or .safetensors

JSON lines have one value a sample: {"output": ...}, or the dict that the forward function returns.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from unisono.errors import DataError

REQUEST = "request.json"


@dataclass(frozen=True)
class PartFiles:
    """The parts of one output.

    Attributes:
        folder: The folder of the parts.
        suffix: The format, one of unisono.prediction.SUFFIXES.
    """

    folder: Path
    suffix: str

    @classmethod
    def of(cls, out: Path) -> PartFiles:
        """Return the parts of the file `out`."""
        return cls(out.with_name(out.name + ".parts"), out.suffix)

    def begin(self, request: Mapping[str, Any]) -> bool:
        """Create the folder. Return False if it has parts of another request, which are not touched."""
        known = self.folder / REQUEST
        if known.is_file() and self.count():
            return bool(json.loads(known.read_text(encoding="utf-8")) == dict(request))
        self.folder.mkdir(exist_ok=True)
        _write(known, lambda draft: draft.write_text(json.dumps(request, indent=1), encoding="utf-8"))
        return True

    def path(self, number: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"{number:08d}{self.suffix}"

    def write(self, number: int, output: Any, describe: Callable[[Any], Any] | None) -> None:
        """Write a part: tensors [samples, ...], or tuples, lists and dicts of them.

        Raises:
            DataError: `describe` returned something that JSON cannot hold.
        """
        if self.suffix == ".safetensors":
            tensors = named_leaves(output)
            _write(self.path(number), lambda draft: save_file(tensors, draft))
            return
        text = "".join(f"{line}\n" for line in _lines(output, describe))
        _write(self.path(number), lambda draft: draft.write_text(text, encoding="utf-8"))

    def count(self) -> int:
        """Return the number of parts from the first one on that are complete."""
        number = 0
        while self.path(number).is_file():
            number += 1
        return number

    def join(self, out: Path, metadata: Mapping[str, str]) -> None:
        """Write all parts to one file, and remove their folder."""
        parts = [self.path(number) for number in range(self.count())]
        if self.suffix == ".safetensors":
            columns = [load_file(part) for part in parts]
            tensors = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
            _write(out, lambda draft: save_file(tensors, draft, dict(metadata)))
        else:
            _write(out, lambda draft: _concatenate(parts, draft))
        shutil.rmtree(self.folder)


def named_leaves(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an output by names: "output", or the keys of dicts and positions of lists with dots."""
    leaves, _ = tree_flatten_with_path(output)
    found = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf for path, leaf in leaves
    }
    return {name or "output": leaf.contiguous() for name, leaf in found.items()}


def _lines(output: Any, describe: Callable[[Any], Any] | None) -> list[str]:
    lines = []
    for sample in range(len(tree_leaves(output)[0])):
        row = tree_map(lambda leaf, sample=sample: leaf[sample], output)
        value = describe(row) if describe is not None else tree_map(lambda leaf: leaf.tolist(), row)
        try:
            lines.append(json.dumps(value if isinstance(value, dict) else {"output": value}, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                "A prediction cannot be written as JSON.",
                f"{error}. The value was {str(value)[:200]}.",
                "return numbers, text, lists and dicts from describe, or write a .safetensors file.",
            ) from error
    return lines


def _concatenate(parts: Sequence[Path], out: Path) -> None:
    with out.open("wb") as whole:
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, whole)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, flush it to the disk, and give it its name."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        write(draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
