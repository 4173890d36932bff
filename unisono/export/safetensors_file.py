"""Write the weights of a run to one safetensors file, which can be loaded without this library.

    model = GPT(...)
    safetensors.torch.load_model(model, "model.safetensors")

Names are those of model.state_dict(). With several models, each name begins with that of its model:
"generator.weight". A tied weight is stored once, under its first name; the file's metadata maps its other names to the
first one, as in files of safetensors' own save_model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from unisono.checkpoint import load
from unisono.errors import CheckpointError, SettingsError
from unisono.tensors.digest import fingerprint_of


class ExportedWeights(NamedTuple):
    """The file that was written."""

    path: Path
    checkpoint: Path
    step: int
    weights_sha256: str
    tensors: int
    bytes: int
    aliases: dict[str, str]
    """Other names of tied weights: {name: the name under which the weight is stored}."""
    left_out: list[str]
    """Names of values that are no tensors, which the format cannot hold."""


def export(
    path: Path,
    out: Path,
    model: str | None = None,
    *,
    accept: load.Accept = load.any_signature,
    note: Callable[[str], None] = load.warn,
) -> ExportedWeights:
    """Write the weights of a run's newest complete checkpoint, or of one checkpoint, to a file.

    A failed export leaves no partial file. Needs memory for one copy of the weights.

    Args:
        path: A run directory or a checkpoint.
        out: The file to write.
        model: Export only the model tracked under this name, without the prefix.
        accept: Raises CheckpointError for a checkpoint whose signature is missing or wrong.
        note: Called with a sentence about every damaged checkpoint that is skipped.

    Raises:
        CheckpointError: There is no intact checkpoint, or the file cannot be written.
        SettingsError: No model of that name is tracked.
    """
    folder = load.complete_checkpoint(path, "Cannot export the weights in {}.", accept, note)
    names = load.metadata_of(folder)["models"]
    if model is not None and model not in names:
        fact = f"Its models are {', '.join(names) or 'none'}."
        do = f"--model {names[0]}" if names else "run.track(model=model)"
        raise SettingsError(f"The run tracks no model {model!r}.", fact, do)
    checkpoint = load.load(folder, only=names if model is None else [model])
    load.release(folder)
    states = checkpoint.states
    if strange := [name for name, state in states.items() if not isinstance(state, dict)]:
        fact = f"The state of {strange[0]!a} is a {type(states[strange[0]]).__name__}, and no dict of tensors."
        raise CheckpointError(f"Cannot export the weights in {folder}.", fact, "name another model (--model NAME).")
    values = {
        f"{name}.{key}" if len(states) > 1 else key: value
        for name, state in states.items()
        for key, value in state.items()
    }
    tensors, aliases = without_ties({name: value for name, value in values.items() if isinstance(value, torch.Tensor)})
    fingerprint = fingerprint_of(states)
    metadata = {"format": "pt", "step": str(checkpoint.steps), "weights_sha256": fingerprint}
    _write(out, tensors, {**aliases, **metadata})
    size = sum(tensor.nbytes for tensor in tensors.values())
    left_out = [name for name, value in values.items() if not isinstance(value, torch.Tensor)]
    return ExportedWeights(out, folder, checkpoint.steps, fingerprint, len(tensors), size, aliases, left_out)


def without_ties(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor once, under its first name, and {other name: first name} of tied ones."""
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
            f"Cannot write the weights to {out}.", f"{type(error).__name__}: {error}", "name another file."
        ) from error
