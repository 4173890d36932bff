"""Write a placed model in the form that `from_pretrained` loads, without a whole copy on any process.

    parts on all processes --> the tensors of one file, on the main process --> model-00001-of-0000N.safetensors

The tensors of one file are gathered at a time. Of a model with an adapter, the adapter is written, as peft does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from unisono.checkpoint.safetensors_reader import INDEX, ONE_FILE
from unisono.checkpoint.sharded_state import gather_state
from unisono.errors import LoopError
from unisono.integrations.transformers.collation import base_of
from unisono.train.run import Run

MOST_BYTES = 5 * 10**9
"""The largest file of weights by default, as in transformers: 5GB."""


def problem_of(model: Any) -> str:
    """Return why `save_pretrained` cannot write a model; "" if it can."""
    base = base_of(model)
    if not hasattr(base, "config") or not hasattr(base, "all_tied_weights_keys"):
        return f"{type(base).__name__} is no model of transformers"
    if base is model and any(not isinstance(each, WeightRenaming) for each in get_model_conversion_mapping(model)):
        return f"weights of a {type(base).__name__} are converted when they are saved"
    return ""


def save_pretrained(
    run: Run[Any], model: Any, folder: str | Path, tokenizer: Any = None, *, most_bytes: int = MOST_BYTES
) -> None:
    """Write a placed model to a folder that `AutoModel.from_pretrained` loads. All processes call this.

    Args:
        run: The run.
        model: A placed model of transformers, or a PeftModel, of which the adapter is written.
        folder: The folder. Files with the same names are replaced.
        tokenizer: A tokenizer to write beside it.
        most_bytes: The largest file of weights.

    Raises:
        LoopError: The model has no such form.
    """
    if reason := problem_of(model):
        raise LoopError(
            f"Cannot write a {type(model).__name__} for from_pretrained.",
            f"It cannot be done in parts: {reason}.",
            "unisono export RUN FOLDER --format hf, after the run.",
        )
    out, is_main = Path(folder), run.context.group.rank == 0
    if is_main:
        out.mkdir(parents=True, exist_ok=True)
    if base_of(model) is not model:
        _write_adapter(run, model, out)
    else:
        _write_weights(run, model, out, most_bytes)
    if is_main and tokenizer is not None:
        tokenizer.save_pretrained(out)
    run.context.group.barrier()


def _write_weights(run: Run[Any], model: Any, out: Path, most_bytes: int) -> None:
    is_main = run.context.group.rank == 0
    files = _files_of(_sizes(run, model), most_bytes)
    names = [ONE_FILE]
    if len(files) > 1:
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    if is_main:
        for old in (*out.glob("model-*-of-*.safetensors"), out / ONE_FILE, out / INDEX):
            old.unlink(missing_ok=True)
    for file, inside in zip(names, files, strict=True):
        tensors = _gathered(run, model, inside)
        if is_main:
            plain = {name: tensors[name].contiguous() for name in inside}
            save_file(plain, out / file, metadata={"format": "pt"})
    if not is_main:
        return
    if len(files) > 1:
        places = {name: file for file, inside in zip(names, files, strict=True) for name in inside}
        total = {"total_size": sum(size for inside in files for size in inside.values())}
        text = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2)
        (out / INDEX).write_text(text + "\n", encoding="utf-8")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)


def _sizes(run: Run[Any], model: Any) -> dict[str, int]:
    """Return the bytes of each tensor of the whole model, without those that are tied to another one."""
    left_out = {*model.all_tied_weights_keys, *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    mine = {name: value.nbytes for name, value in model.state_dict().items() if name not in left_out}
    if run.context.state.stages is None:
        return mine
    parts = run.context.group.all_gather_object(mine)
    return {name: size for part in parts for name, size in part.items()}


def _files_of(sizes: Mapping[str, int], most_bytes: int) -> list[dict[str, int]]:
    """Divide tensors into files, in order: {name: bytes} of each."""
    files: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if files[-1] and sum(files[-1].values()) + size > most_bytes:
            files.append({})
        files[-1][name] = size
    return files


def _gathered(run: Run[Any], model: Any, names: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return these tensors of a model on the main process. All processes call this."""
    stages = run.context.state.stages
    own = model.state_dict()
    part = {name: own[name] for name in names if name in own}
    found = gather_state(part, keep=run.context.group.rank == 0 or stages is not None)
    if stages is not None:
        found = stages.whole(model, found)
    return {name: value.detach().cpu() for name, value in found.items() if isinstance(value, torch.Tensor)}


def _write_adapter(run: Run[Any], model: Any, out: Path) -> None:
    """Write the adapter of a PeftModel. Its parameters are those that the base model does not have."""
    prefixes = {type(part).prefix for part in model.modules() if isinstance(getattr(type(part), "prefix", None), str)}
    words = (*prefixes, "lora_", "modules_to_save")
    sizes = {name: size for name, size in _adapter_sizes(run, model).items() if any(word in name for word in words)}
    tensors = _gathered(run, model, sizes)
    if run.context.group.rank == 0:
        model.save_pretrained(str(out), state_dict=tensors)


def _adapter_sizes(run: Run[Any], model: Any) -> dict[str, int]:
    mine = {name: value.nbytes for name, value in model.state_dict().items()}
    if run.context.state.stages is None:
        return mine
    parts = run.context.group.all_gather_object(mine)
    return {name: size for part in parts for name, size in part.items()}
