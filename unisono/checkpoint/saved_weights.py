"""Load the weights of another run into a model: to distill it, or to continue from it.

    source = unisono.SavedWeights("runs/large")                     a run, a checkpoint, or safetensors files
    teacher = run.place(lambda: source.load_frozen(GPT(large)))     in place of random weights
    model = run.place(lambda: GPT(large), weights=source)           each process reads only its part
    run.track(model=student, optimizer=optimizer, teacher=source)   a resume refuses other weights

Tensors are read in groups of GROUP_BYTES, so that a model which will be divided never exists as a whole in memory.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from unisono.checkpoint import load
from unisono.checkpoint.contents import SUFFIX
from unisono.checkpoint.safetensors_reader import LazyTensor, has_tensor_files, tensors_in
from unisono.checkpoint.signature import trusted_keys
from unisono.config import plural
from unisono.errors import CheckpointError
from unisono.tensors.digest import fingerprint_of

Module = TypeVar("Module", bound=torch.nn.Module)

GROUP_BYTES = 1 << 28
"""Bytes of tensors that are read before they are copied into the model."""

MOST_NAMES = 3
"""Names in an error message."""


class WeightSource(Protocol):
    """Weights for `run.place(..., weights=source)`."""

    def values_for(self, module: torch.nn.Module) -> Mapping[str, Any]:
        """Return the values of a whole model by the names of its state_dict; LazyTensors are read later, in part.

        Names that are missing keep what the model was built with.
        """
        ...


class SavedWeights:
    """The weights of one model, in a file that is read when they are loaded.

    Args:
        path: A run directory (its newest intact checkpoint is used), a checkpoint, a safetensors file, or a folder
            with model.safetensors or model.safetensors.index.json and the files that it names.
        model: The name under which that run tracked the model; needed if it tracked several.
        trust: Public keys, of which one must have signed the checkpoint. Not for safetensors files.

    Attributes:
        path: The checkpoint, the file, or the folder of files.
        modules: The modules that were filled, and whose parameters are frozen.

    Raises:
        CheckpointError: There is nothing intact to load.
    """

    def __init__(self, path: str | Path, *, model: str | None = None, trust: Sequence[str | Path] = ()) -> None:
        given = Path(path).expanduser()
        accept = load.only_signed(trusted_keys(tuple(Path(key).expanduser() for key in trust)))
        is_plain = (given.suffix == SUFFIX and not given.is_dir()) or has_tensor_files(given)
        self.path = given if is_plain else load.complete_checkpoint(given, "Cannot load the weights in {}.", accept)
        self._values = tensors_in(given) if is_plain else _of_checkpoint(self.path, model)
        self.modules: list[torch.nn.Module] = []

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of names, dtypes, shapes and bytes. It does not depend on the name of the model."""
        digest = hashlib.sha256()
        for name, value in sorted(self._values.items()):
            digest.update(fingerprint_of({name: _read(value)}).encode())
        return digest.hexdigest()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the run that saved them, nested as in its settings.toml; {} for safetensors files."""
        try:
            return tomllib.loads((self.path.parents[1] / "settings.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError, IndexError):
            return {}

    def values_for(self, module: torch.nn.Module) -> Mapping[str, Any]:
        """Return the values of a model by name, which are read later, for `run.place`.

        Raises:
            CheckpointError: Names or shapes differ.
        """
        self._require_fit(module)
        return self._values

    def load(self, module: Module) -> Module:
        """Copy the weights and buffers into a module, and return it.

        Raises:
            CheckpointError: Names or shapes differ.
        """
        self._require_fit(module)
        for group in self._groups():
            module.load_state_dict(group, strict=False)
        return module

    def load_frozen(self, module: Module) -> Module:
        """Copy the weights into a module, freeze its parameters, put it in eval mode, and return it.

        The module is not saved in checkpoints if this object is tracked.
        """
        self.load(module).requires_grad_(requires_grad=False).eval()
        self.modules.append(module)
        return module

    def holds(self, module: torch.nn.Module) -> bool:
        """Return whether these weights are those of a placed module that nothing changes."""
        if not any(module is own for own in self.modules):
            return False
        return not any(p.requires_grad for p in module.parameters()) and not any(m.training for m in module.modules())

    def state_dict(self) -> dict[str, Any]:
        """Return the path and the SHA-256, for checkpoints."""
        return {"path": str(self.path), "sha256": self.sha256}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the SHA-256 with that of a checkpoint. Raises CheckpointError if it differs."""
        if state["sha256"] != self.sha256:
            raise CheckpointError(
                f"Cannot resume with the weights in {self.path}.",
                f"The run was begun with others, of {state['path']}, and the result depends on them.",
                "name the same weights, or start a new run in another --run-dir.",
            )

    def _groups(self) -> Iterator[dict[str, Any]]:
        group: dict[str, Any] = {}
        size = 0
        for name, value in self._values.items():
            group[name] = _read(value)
            size += group[name].nbytes if isinstance(group[name], torch.Tensor) else 0
            if size >= GROUP_BYTES:
                yield group
                group, size = {}, 0
        yield group

    def _require_fit(self, module: torch.nn.Module) -> None:
        wanted = module.state_dict()
        missing, unexpected = wanted.keys() - self._values.keys(), self._values.keys() - wanted.keys()
        shapes = [
            f"{name} {list(self._values[name].shape)} instead of {list(value.shape)}"
            for name, value in wanted.items()
            if isinstance(value, torch.Tensor) and getattr(self._values.get(name), "shape", value.shape) != value.shape
        ]
        found = [
            f"{label}: {_some(names)}."
            for label, names in (
                ("Only the model has", missing),
                ("Only the file has", unexpected),
                ("Of another shape", shapes),
            )
            if names
        ]
        if found:
            raise CheckpointError(
                f"The weights in {self.path} do not fit a {type(module).__name__}.",
                " ".join(found),
                "build the model with the settings of the run that saved them (settings.toml in its directory).",
            )


def _some(names: Any) -> str:
    shown = sorted(names)
    more = f" and {plural(len(shown) - MOST_NAMES, 'other')}" if len(shown) > MOST_NAMES else ""
    return ", ".join(shown[:MOST_NAMES]) + more


def _read(value: Any) -> Any:
    return value.whole() if isinstance(value, LazyTensor) else value


def _of_checkpoint(folder: Path, model: str | None) -> dict[str, Any]:
    """Return the values of one model of a checkpoint by name; tensors are not read."""
    found = load.open_checkpoint(folder)
    names = found.about["models"]
    if (model is None and len(names) != 1) or (model is not None and model not in names):
        raise CheckpointError(
            f"Cannot choose the model in {folder}." if model is None else f"There is no model {model!r} in {folder}.",
            f"It holds {', '.join(names) or 'none'}.",
            f"SavedWeights(path, model={names[0]!r})" if names else "name a run that tracks a model.",
        )
    state = found.states[names[0] if model is None else model]
    if not isinstance(state, dict):
        raise CheckpointError(
            f"Cannot load the weights in {folder}.",
            f"The state of the model is a {type(state).__name__}, and no dict of tensors.",
            "name another model.",
        )
    return state
