"""Compute the outputs of a teacher once for each sample, and read them from files in every epoch after that.

    cache.json              the teacher's weights, the number of samples, a SHA-256 of every file
    rows-00000000.safetensors, rows-00004096.safetensors, ...      the outputs of a group of samples each

A group is written when all its samples are computed. So a run that is interrupted continues with the next group, on any
number of processes, with the same bits. Hosts that share no disk keep a copy each.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps
from torch.utils.data import Dataset, Subset

from unisono.checkpoint.saved_weights import SavedWeights
from unisono.data.loader import Collate
from unisono.errors import DataError
from unisono.json_forms import parse_value
from unisono.security.file_modes import make_folder, make_like_folder, write_text
from unisono.torch_compat.tree_specs import load_treespec
from unisono.train.evaluation.model_call import Forward
from unisono.train.run import Run

INDEX = "cache.json"

FORMAT = 1
"""Version of the files."""

GROUP_SAMPLES = 4096
"""Samples of a group, rounded up to whole micro-batches."""


class CachedOutputs(Dataset[Any]):
    """The outputs of a teacher: a data set with one row for each sample, in the order of the data.

    Track it (`run.track(..., targets=cache)`): a resume then refuses the outputs of another teacher.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder, self._index = folder, index
        self._first = [int(name[len("rows-") :].split(".")[0]) for name in index["files"]]
        self._spec = load_treespec(index["structure"])
        self._groups: dict[int, dict[str, torch.Tensor]] = {}

    def __len__(self) -> int:
        return int(self._index["samples"])

    def __getitem__(self, sample: int) -> Any:
        if not -len(self) <= sample < len(self):
            raise IndexError(sample)
        sample %= len(self)
        group = bisect_right(self._first, sample) - 1
        if group not in self._groups:  # its file is mapped into memory
            self._groups[group] = load_file(self.folder / list(self._index["files"])[group])
        columns = self._groups[group]
        row = [columns[str(leaf)][sample - self._first[group]] for leaf in range(len(columns))]
        return tree_unflatten(row, self._spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}}  # a worker maps the files again

    def state_dict(self) -> dict[str, Any]:
        """Return the SHA-256 of the index, for checkpoints."""
        return {"sha256": hashlib.sha256(json.dumps(self._index, sort_keys=True).encode()).hexdigest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the SHA-256 with that of a checkpoint. Raises DataError if it differs."""
        if state != self.state_dict():
            raise DataError(
                f"The teacher's outputs in {self.folder} are not those that the run was begun with.",
                "The result depends on them.",
                "restore the folder from a copy, or start a new run in another --run-dir.",
            )


class WithOutputs(Dataset[Any]):
    """A data set with the teacher's output as one more part of each sample: (inputs, target) -> (inputs, target, row).

    Args:
        data: a map-style data set whose samples are tuples.
        outputs: the teacher's outputs for the same samples.
    """

    def __init__(self, data: Any, outputs: CachedOutputs) -> None:
        if len(data) != len(outputs):
            raise DataError(
                "The data set and the teacher's outputs have other lengths.",
                f"They have {len(data)} and {len(outputs)} samples.",
                "pass the data set that cache_outputs was called with.",
            )
        self.data, self.outputs = data, outputs

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, sample: int) -> tuple[Any, ...]:
        found = self.data[sample]
        parts = found if isinstance(found, tuple | list) else (found,)
        return (*parts, self.outputs[sample])


def cache_outputs(
    run: Run[Any],
    teacher: torch.nn.Module,
    data: Any,
    source: SavedWeights,
    *,
    folder: Path | None = None,
    forward: Forward | None = None,
    collate_fn: Collate | None = None,
) -> CachedOutputs:
    """Compute the teacher's output for every sample, as far as it is not in the folder. All processes call this.

    The data set must return the same sample for a number each time: with random augmentation, do not cache.

    Args:
        run: the run. Call this before `run.steps`.
        teacher: a placed model in eval mode.
        data: a map-style data set.
        source: the teacher's weights. A folder with the outputs of others is refused.
        folder: where the files are; by default `teacher` in the run directory.
        forward: forward(model, batch) -> outputs with one row for each sample, as for `run.predict`.
        collate_fn: as for `run.predict`.

    Raises:
        DataError: the folder holds other outputs, or a file in it is damaged.
    """
    settings = run.settings
    micro_batch = settings.micro_batch or -(-settings.batch // settings.virtual_ranks)
    step = -(-GROUP_SAMPLES // micro_batch) * micro_batch
    groups = [range(first, min(first + step, len(data))) for first in range(0, len(data), step)]
    names = {f"rows-{group.start:08d}.safetensors": group for group in groups}
    files = _Files(run.dir / "teacher" if folder is None else folder, source.sha256, len(data), names)
    leads = run.context.world.local_rank == 0
    if leads:
        files.read()
    if not run.context.world.joins:  # otherwise the others have written all groups
        missing = run.collectives.all_gather_object(sorted(files.missing) if leads else [])
        for name in sorted({name for each in missing for name in each}):
            rows = run.predict(teacher, Subset(data, names[name]), forward=forward, collate_fn=collate_fn)
            if leads:
                files.write(name, rows)
        run.collectives.barrier()
    if not leads or run.context.world.joins:
        files.read(check=False)
    if files.missing:
        raise DataError(
            f"{len(files.missing)} of {len(names)} files of the teacher's outputs are not in {files.folder}.",
            f"Process {run.rank} does not find them: the process that writes them has died, or it uses another disk.",
            "start the run again: it continues with the files that are missing.",
        )
    return CachedOutputs(files.folder, files.complete_index())


class _Files:
    """The files of a cache on this host.

    Args:
        folder: The folder.
        teacher: The SHA-256 of the teacher's weights.
        samples: The number of samples.
        names: The names of all files, with the samples in each.
    """

    def __init__(self, folder: Path, teacher: str, samples: int, names: Mapping[str, Sequence[int]]) -> None:
        self.folder, self._names = folder, names
        self._index: dict[str, Any] = {"format": FORMAT, "teacher": teacher, "samples": samples, "structure": None}
        self._hashes: dict[str, str] = {}

    @property
    def missing(self) -> set[str]:
        """The names of files that are not there."""
        return self._names.keys() - self._hashes.keys()

    def read(self, *, check: bool = True) -> None:
        """Read which files there are. With `check`, compare each with its SHA-256."""
        try:
            found = parse_value((self.folder / INDEX).read_bytes())
            facts = {name: found[name] for name in self._index}
            hashes = {str(name): str(value) for name, value in dict(found["files"]).items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise self._damaged(INDEX, f"{type(error).__name__}: {error}") from None
        fits = all(facts[name] == value for name, value in self._index.items() if name != "structure")
        if not fits or not hashes.keys() <= self._names.keys():
            raise DataError(
                f"{self.folder} holds the outputs of another teacher, or for other data.",
                f"It has {facts['samples']} samples of the weights {str(facts['teacher'])[:12]}, and this run has "
                f"{self._index['samples']} of {self._index['teacher'][:12]}.",
                "name another folder, or remove this one.",
            )
        for name in hashes if check else ():
            if (now := _sha256(self.folder / name)) != hashes[name]:
                raise self._damaged(name, f"Its SHA-256 is {now[:12]}, and not {hashes[name][:12]}.")
        self._index["structure"], self._hashes = facts["structure"], hashes

    def write(self, name: str, rows: Any) -> None:
        """Write the rows of a group, and then the index."""
        leaves, spec = tree_flatten(rows)
        make_folder(self.folder)
        tensors = {str(leaf): tensor.contiguous() for leaf, tensor in enumerate(leaves)}
        _replace(self.folder / name, lambda draft: save_file(tensors, draft))
        self._hashes[name] = _sha256(self.folder / name)
        self._index["structure"] = treespec_dumps(spec)
        _replace(self.folder / INDEX, lambda draft: write_text(draft, json.dumps(self.complete_index(), indent=1)))

    def complete_index(self) -> dict[str, Any]:
        """Return the content of cache.json, with files in the order of samples."""
        return {**self._index, "files": dict(sorted(self._hashes.items()))}

    def _damaged(self, name: str, fact: str) -> DataError:
        remedy = f"rm -r {self.folder}; the outputs are then computed again."
        return DataError(f"The teacher's outputs in {self.folder / name} are damaged.", fact, remedy)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name, and then give it its own, so that a crash leaves no part of it."""
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        write(draft)
        make_like_folder(draft)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        fact, remedy = f"{type(error).__name__}: {error}", "name another folder: cache_outputs(..., folder=FOLDER)."
        raise DataError(f"Cannot write the teacher's outputs to {path}.", fact, remedy) from error


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"unknown: {error.strerror}"
