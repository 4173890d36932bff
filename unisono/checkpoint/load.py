"""Load the newest whole checkpoint of a run. A damaged one is named and passed over; no file is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from unisono.checkpoint import manifest
from unisono.checkpoint.pack import described, unpack
from unisono.errors import CheckpointError


class Checkpoint(NamedTuple):
    """A checkpoint that was read: `about` is state.json without the states."""

    path: Path
    steps: int
    about: dict[str, Any]
    states: dict[str, Any]


def newest(run_dir: Path, note: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run; None if it has none at all.

    Damaged ones are told to `note` and passed over. Raises CheckpointError if all that are there are damaged.
    """
    found = manifest.checkpoints(run_dir)
    told = []
    for steps, path in found:
        wrong = manifest.damage(path)
        if wrong is None:
            return path
        told.append(wrong)
        note(f"The checkpoint after step {steps} is damaged and passed over: {wrong}.")
    if not found:
        return None
    raise CheckpointError(
        f"The run in {run_dir} was to be resumed.",
        f"It has {len(found)} checkpoint{'s' * (len(found) > 1)}, none of them whole: {'; '.join(told)}.",
        "restore one of them from a copy, or start anew in another directory (--run-dir DIR, without --resume).",
    )


def about(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, without reading its tensors."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    state.pop("states")
    return state


def load(path: Path, *, only: Collection[str] | None = None) -> Checkpoint:
    """Read a whole checkpoint, or `only` the states of these names. Tensors are on the CPU."""
    state = json.loads((path / "state.json").read_text())
    plain = {name: item for name, item in state.pop("states").items() if only is None or name in only}
    tensors: dict[str, torch.Tensor] = {
        name: torch.empty(of["shape"], dtype=getattr(torch, of["dtype"])) for name, of in described(plain).items()
    }
    if tensors:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return Checkpoint(path, state["steps"], state, {name: unpack(item, tensors) for name, item in plain.items()})


def fingerprint_of(states: dict[str, Any]) -> str:
    """sha256 over all tensors and numbers in these states: names, dtypes, shapes and bytes, sorted by name."""
    leaves: list[tuple[str, Any]] = []
    _flatten(states, "", leaves)
    digest = hashlib.sha256()
    for name, value in sorted(leaves, key=lambda leaf: leaf[0]):
        if isinstance(value, torch.Tensor):
            dense = value.detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()


def _flatten(value: Any, name: str, leaves: list[tuple[str, Any]]) -> None:
    if isinstance(value, (set, frozenset)):  # walks in another order in every process
        value = sorted(value, key=repr)
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _flatten(item, f"{name}.{key}" if name else str(key), leaves)
    else:
        leaves.append((name, value))


def whole_one(path: Path, asked: str) -> Path:
    """The newest whole checkpoint of a run directory, or the checkpoint itself, if it is whole. Raises CheckpointError;
    `asked` says what for, with {} for where."""
    itself = any((path / name).is_file() for name in ("state.json", "manifest.json"))
    folder = path if itself else newest(path, note=lambda text: None)
    if folder is None:
        raise CheckpointError(
            asked.format(path),
            "There is no checkpoint in it." if path.is_dir() else "There is no such directory.",
            "name a run's directory (runs/...) or one of its checkpoints (runs/.../checkpoints/step-...).",
        )
    wrong = manifest.damage(folder)
    if wrong is not None:
        raise CheckpointError(asked.format(folder), f"{wrong}.", "name another checkpoint.")
    return folder


def fingerprint(path: Path, state: bool = False) -> dict[str, Any]:
    """The fingerprint of a run directory's newest whole checkpoint, or of a checkpoint itself.

    weights_sha256 covers the tracked models; with `state`, state_sha256 covers optimizers and schedules as well.
    """
    folder = whole_one(path, "The fingerprint of {} was asked for.")
    checkpoint = load(folder)
    models = checkpoint.about["models"]
    result: dict[str, Any] = {"path": str(folder), "step": checkpoint.steps}
    result["weights_sha256"] = fingerprint_of({name: checkpoint.states[name] for name in models})
    if state:
        result["state_sha256"] = fingerprint_of(checkpoint.states)
    return result
