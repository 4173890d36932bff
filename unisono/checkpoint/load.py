"""Load the newest complete checkpoint of a run. Damaged ones are reported and skipped. No file is ever unpickled."""

from __future__ import annotations

import os
import shutil
import socket
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from unisono.checkpoint import manifest
from unisono.checkpoint.contents import FORMAT, STATE, check_state, read_state
from unisono.checkpoint.safetensors_reader import LazyTensor, lazy_tensors
from unisono.checkpoint.signature import TrustedKey, check_checkpoint
from unisono.checkpoint.storage import checkpoints_at, storage_of, storages_of
from unisono.config import plural
from unisono.errors import CheckpointError
from unisono.tensors.codec import decode
from unisono.tensors.digest import fingerprint_of

Accept = Callable[[Path], None]
"""Raises CheckpointError for an intact checkpoint that is not to be loaded."""


class Checkpoint(NamedTuple):
    """A checkpoint that was read. `about` is state.json without the states."""

    path: Path
    steps: int
    about: dict[str, Any]
    states: dict[str, Any]


def any_signature(path: Path) -> None:
    """Accept a checkpoint whether it is signed or not."""


def only_signed(keys: Sequence[TrustedKey]) -> Accept:
    """Return the function that accepts checkpoints which one of these keys has signed; without keys, all."""
    return partial(_check_signed, keys=keys) if keys else any_signature


def _check_signed(path: Path, keys: Sequence[TrustedKey]) -> None:
    check_checkpoint(path, keys)


def newest(run_dir: Path, note: Callable[[str], None], accept: Accept = any_signature) -> Path | None:
    """Return the newest intact checkpoint of a run, or None if the run has no checkpoint.

    A checkpoint at a URL is copied into the run directory; the next save removes the copy.

    Args:
        run_dir: The run directory.
        note: Called with a sentence about every damaged checkpoint that is skipped.
        accept: Raises CheckpointError for an intact checkpoint whose signature is missing or wrong.

    Raises:
        CheckpointError: All checkpoints are damaged, or the newest intact one is not accepted.
    """
    found, damages = _newest_intact(run_dir, note)
    if found is not None:
        accept(found)
    elif damages:
        raise CheckpointError(
            f"Cannot resume the run in {run_dir}: no checkpoint is intact.",
            f"It has {plural(len(damages), 'checkpoint')}: {'; '.join(damages)}.",
            "restore one of them from a copy, or begin again in another directory (--run-dir DIR, without --resume).",
        )
    return found


def _newest_intact(run_dir: Path, note: Callable[[str], None]) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, None if there is none, and the damages of newer ones."""
    damages: list[str] = []
    for storage in storages_of(run_dir):
        found = checkpoints_at(storage)
        for steps in found:
            path = storage.fetch(steps, run_dir / "checkpoints")
            damage = manifest.damage_of(path)
            if damage is None:
                return path, damages
            damages.append(damage)
            note(f"The checkpoint after step {steps} is damaged and skipped: {damage}.")
        if found:
            break  # locations that the run used earlier hold earlier steps
    return None, damages


def warn(text: str) -> None:
    """Warn of a damaged checkpoint that is skipped."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def localize(path: Path, run_dir: Path, accept: Accept = any_signature) -> Path:
    """Return the path at which this process can read the checkpoint that the main process has found.

    Hosts that share no folder each fetch a checkpoint that is stored at a URL.

    Raises:
        CheckpointError: This process cannot read it.
    """
    if path.is_dir():
        return path
    steps = int(path.name.rpartition("-")[2])
    found = storage_of(run_dir).fetch(steps, run_dir / "checkpoints" / f".{os.getpid()}.fetched")
    damage = manifest.damage_of(found) if found.is_dir() else "It is not there."
    if damage is not None:
        raise CheckpointError(
            f"Cannot read {path} on {socket.gethostname()}.",
            damage,
            "store checkpoints where every host can read: --set checkpoint.dir=FOLDER, one that they share, or a URL.",
        )
    accept(found)
    return found


def release(path: Path) -> None:
    """Remove the local copy of a checkpoint that was fetched; a checkpoint that is no copy stays."""
    for folder in (path.parent, path.parent.parent):
        if folder.name.endswith(".fetched"):
            shutil.rmtree(folder, ignore_errors=True)


def metadata_of(path: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint without the states. No tensor is read."""
    state = _state(path)
    state.pop("states")
    return state


def open_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint whose tensors are LazyTensors, which are read when they are needed."""
    state = _state(path)
    try:
        tensors = lazy_tensors(path, manifest.files_of(path), check_state({"format": FORMAT, **state}))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    plain = state.pop("states")
    return Checkpoint(path, state["steps"], state, {name: decode(item, tensors) for name, item in plain.items()})


def load(path: Path, *, only: Collection[str] | None = None) -> Checkpoint:
    """Return a checkpoint with its tensors in memory of the CPU; `only` the states of these names."""
    found = open_checkpoint(path)
    read: dict[str, torch.Tensor] = {}  # tied tensors become one object again

    def whole(tensor: LazyTensor) -> torch.Tensor:
        return read[tensor.name] if tensor.name in read else read.setdefault(tensor.name, tensor.whole())

    wanted = {name: state for name, state in found.states.items() if only is None or name in only}
    return found._replace(states=tree_map_only(LazyTensor, whole, wanted))


def _state(path: Path) -> dict[str, Any]:
    try:
        state = read_state(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if (version := state.pop("format", 1)) != FORMAT:
        raise CheckpointError(
            f"Cannot read {path}: it has another format.",
            f"Its format is {version!a:.40}, and this version of unisono reads and writes {FORMAT}.",
            "resume with the version that wrote it, or begin again in another --run-dir.",
        )
    return state


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    remedy = "name another checkpoint, or remove this one."
    return CheckpointError(f"Cannot read the checkpoint {path}.", f"{type(error).__name__}: {error}", remedy)


def complete_checkpoint(
    path: Path, error: str, accept: Accept = any_signature, note: Callable[[str], None] = warn
) -> Path:
    """Return the newest intact checkpoint of a run directory, or the checkpoint itself if it is intact.

    Args:
        path: A run directory or a checkpoint.
        error: First line of the error, with {} for the path.
        accept: As for `newest`.
        note: As for `newest`.

    Raises:
        CheckpointError: There is no intact checkpoint, or it is not accepted.
    """
    folder: Path | None = path
    if any((path / name).is_file() for name in (STATE, manifest.MANIFEST)):
        damages = [damage] if (damage := manifest.damage_of(path)) is not None else []
    else:
        folder, damages = _newest_intact(path, note)
        if folder is not None:
            damages = []
    if damages:
        several = f"It has {plural(len(damages), 'checkpoint')}, and none is intact: " if folder is None else ""
        do = "name another checkpoint." if folder is not None else "restore one of them from a copy."
        raise CheckpointError(error.format(path), f"{several}{'; '.join(damages)}.", do)
    if folder is None:
        raise CheckpointError(
            error.format(path),
            "There is no checkpoint in it." if path.is_dir() else "There is no such directory.",
            "name a run's directory (runs/...) or one of its checkpoints (runs/.../checkpoints/step-...).",
        )
    accept(folder)
    return folder


def fingerprint(path: Path, state: bool = False, note: Callable[[str], None] = warn) -> dict[str, Any]:
    """Return the fingerprint of a run directory's newest intact checkpoint, or of one checkpoint.

    Args:
        path: A run directory or a checkpoint.
        state: Add state_sha256, which also covers optimizers and schedules. weights_sha256 covers tracked models.
        note: As for `newest`.
    """
    folder = complete_checkpoint(path, "Cannot compute the fingerprint of {}.", note=note)
    checkpoint = load(folder)
    release(folder)
    models = checkpoint.about["models"]
    result: dict[str, Any] = {"path": str(folder), "step": checkpoint.steps}
    result["weights_sha256"] = fingerprint_of({name: checkpoint.states[name] for name in models})
    if state:
        result["state_sha256"] = fingerprint_of(checkpoint.states)
    return result
