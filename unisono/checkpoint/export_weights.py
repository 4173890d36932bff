"""A run's weights in one safetensors file, for whoever has the model's class and nothing of ours.

    model = GPT(...)
    safetensors.torch.load_model(model, "model.safetensors")

The names are those of model.state_dict(); of several models each is preceded by the model's, as in "generator.weight".
What has several names (tied weights) stands there once, under the first, and the file's metadata says which others mean
it, {name: the first name}, as safetensors' own save_model does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from unisono.checkpoint import load
from unisono.errors import CheckpointError, SettingsError

ASKED = "The weights in {} were to be exported."


class ExportedWeights(NamedTuple):
    """What was written."""

    path: Path
    checkpoint: Path
    step: int
    weights_sha256: str
    tensors: int
    bytes: int
    aliases: dict[str, str]
    """Names that stand for the content of others."""
    left_out: list[str]
    """What is no tensor, and has no place in such a file."""


def export(path: Path, out: Path, model: str | None = None) -> ExportedWeights:
    """Write the weights of a run's newest whole checkpoint, or of a checkpoint itself, to a file, whole or not at all.

    model  the one of this name only, under its own names

    Needs memory for the weights once. Raises CheckpointError, and SettingsError where there is no model of that name.
    """
    folder = load.complete_checkpoint(path, ASKED)
    names = load.metadata_of(folder)["models"]
    if model is not None and model not in names:
        true = f"It tracks no model {model!r}; there {'is' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}."
        raise SettingsError(f"--model {model}", true, f"--model {names[0]}" if names else "run.track(model=model)")
    checkpoint = load.load(folder, only=names if model is None else [model])
    load.release(folder)
    states = checkpoint.states
    values = {
        f"{name}.{key}" if len(states) > 1 else key: value
        for name, state in states.items()
        for key, value in state.items()
    }
    tensors, aliases = without_ties({name: value for name, value in values.items() if isinstance(value, torch.Tensor)})
    fingerprint = load.fingerprint_of(states)
    facts = {"format": "pt", "step": str(checkpoint.steps), "weights_sha256": fingerprint}
    _write(out, tensors, {**aliases, **facts})
    size = sum(tensor.nbytes for tensor in tensors.values())
    left_out = [name for name, value in values.items() if not isinstance(value, torch.Tensor)]
    return ExportedWeights(out, folder, checkpoint.steps, fingerprint, len(tensors), size, aliases, left_out)


def without_ties(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor under its first name, and the first name of each other one (a checkpoint holds it once as well)."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    aliases = {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name}
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


def _write(out: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    draft = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        save_file(tensors, draft, metadata)
        draft.replace(out)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"The weights were to be written to {out}.", f"{type(error).__name__}: {error}", "name another place."
        ) from error
