"""Load the newest whole checkpoint of a run. A damaged one is named and passed over; no file is ever unpickled."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from unisono.checkpoint import manifest
from unisono.checkpoint.manifest import STATE
from unisono.checkpoint.safetensors_reader import LazyTensor, stored
from unisono.checkpoint.save import FORMAT
from unisono.checkpoint.storage import checkpoints_at, place_of, places_of
from unisono.errors import CheckpointError
from unisono.tensors.codec import decode, specs_of
from unisono.tensors.digest import fingerprint_of


class Checkpoint(NamedTuple):
    """A checkpoint that was read: `about` is state.json without the states."""

    path: Path
    steps: int
    about: dict[str, Any]
    states: dict[str, Any]


def newest(run_dir: Path, note: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run; None if it has none at all. Of one that is kept at a URL, a copy of it in
    the run directory, which the next save removes.

    Damaged ones are told to `note` and passed over. Raises CheckpointError if all that are there are damaged.
    """
    told = []
    for there in places_of(run_dir):
        found = checkpoints_at(there)
        for steps in found:
            path = there.fetch(steps, run_dir / "checkpoints")
            wrong = manifest.damage_of(path)
            if wrong is None:
                return path
            told.append(wrong)
            note(f"The checkpoint after step {steps} is damaged and passed over: {wrong}.")
        if found:
            break  # what a run has left where it saved before is of earlier steps
    if not told:
        return None
    raise CheckpointError(
        f"The run in {run_dir} was to be resumed.",
        f"It has {len(told)} checkpoint{'s' * (len(told) > 1)}, none of them whole: {'; '.join(told)}.",
        "restore one of them from a copy, or start anew in another directory (--run-dir DIR, without --resume).",
    )


def localize(path: Path, run_dir: Path) -> Path:
    """The checkpoint that the main process has found, as this process sees it: hosts that share no folder fetch what is
    kept at a URL, each for itself. Raises CheckpointError where it is not to be had."""
    if path.is_dir():
        return path
    steps = int(path.name.rpartition("-")[2])
    found = place_of(run_dir).fetch(steps, run_dir / "checkpoints" / f".{os.getpid()}.fetched")
    wrong = manifest.damage_of(found) if found.is_dir() else "It is not there."
    if wrong is not None:
        raise CheckpointError(
            f"{path} was to be read on {socket.gethostname()}.",
            wrong,
            "keep checkpoints where every host can read: --set checkpoint.dir=FOLDER, one that they share, or a URL.",
        )
    return found


def release(path: Path) -> None:
    """A copy of a checkpoint that was fetched is not needed any more; what is no copy stays."""
    for folder in (path.parent, path.parent.parent):
        if folder.name.endswith(".fetched"):
            shutil.rmtree(folder, ignore_errors=True)


def metadata_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, without reading its tensors."""
    state = _state(path)
    state.pop("states")
    return state


def open_checkpoint(path: Path) -> Checkpoint:
    """A whole checkpoint, none of whose tensors has been read: each stands there as a Stored."""
    state = _state(path)
    plain = state.pop("states")
    tensors = stored(path, specs_of(plain))
    return Checkpoint(path, state["steps"], state, {name: decode(item, tensors) for name, item in plain.items()})


def load(path: Path, *, only: Collection[str] | None = None) -> Checkpoint:
    """Read a whole checkpoint, or `only` the states of these names. Tensors are on the CPU."""
    found = open_checkpoint(path)
    read: dict[str, torch.Tensor] = {}  # tied ones are one again

    def whole(tensor: LazyTensor) -> torch.Tensor:
        return read[tensor.name] if tensor.name in read else read.setdefault(tensor.name, tensor.whole())

    wanted = {name: state for name, state in found.states.items() if only is None or name in only}
    return found._replace(states=tree_map_only(LazyTensor, whole, wanted))


def _state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    if (form := state.pop("format", 1)) != FORMAT:
        raise CheckpointError(
            f"{path} was to be read.",
            f"Its format is {form}, and this version of unisono reads and writes {FORMAT}.",
            "go on with the version that wrote it, or start anew in another --run-dir.",
        )
    return state


def complete_checkpoint(path: Path, asked: str) -> Path:
    """The newest whole checkpoint of a run directory, or the checkpoint itself, if it is whole. Raises CheckpointError;
    `asked` says what for, with {} for where."""
    itself = any((path / name).is_file() for name in (STATE, manifest.MANIFEST))
    folder = path if itself else newest(path, note=lambda text: None)
    if folder is None:
        raise CheckpointError(
            asked.format(path),
            "There is no checkpoint in it." if path.is_dir() else "There is no such directory.",
            "name a run's directory (runs/...) or one of its checkpoints (runs/.../checkpoints/step-...).",
        )
    wrong = manifest.damage_of(folder)
    if wrong is not None:
        raise CheckpointError(asked.format(folder), f"{wrong}.", "name another checkpoint.")
    return folder


def fingerprint(path: Path, state: bool = False) -> dict[str, Any]:
    """The fingerprint of a run directory's newest whole checkpoint, or of a checkpoint itself.

    weights_sha256 covers the tracked models; with `state`, state_sha256 covers optimizers and schedules as well.
    """
    folder = complete_checkpoint(path, "The fingerprint of {} was asked for.")
    checkpoint = load(folder)
    release(folder)
    models = checkpoint.about["models"]
    result: dict[str, Any] = {"path": str(folder), "step": checkpoint.steps}
    result["weights_sha256"] = fingerprint_of({name: checkpoint.states[name] for name in models})
    if state:
        result["state_sha256"] = fingerprint_of(checkpoint.states)
    return result
