"""Export adapters of Hugging Face's peft: merged into the model that they adapt, or alone.

    PeftModel --> merged    W + scale B A in place of W and the adapter: a model of transformers (--format hf)
              --> alone     the adapter's weights and configuration, for the base model (--format peft)

A quantized base is exported in float32.

LoRA: Hu et al. 2021, arXiv 2106.09685.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from unisono.errors import LoopError
from unisono.export.formats import BASE, FORMATS
from unisono.tensors.digest import fingerprint_of

MERGED_BOUND = 1e-5
"""The largest relative difference of outputs by merging, which rounds every adapted weight once."""


def has_adapter(model: torch.nn.Module) -> bool:
    """Return whether a model is a PeftModel. It does not load peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def merge_adapter(model: Any, folder: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Merge the active adapters of a PeftModel into its weights, in place.

    Args:
        model: The PeftModel, whole, on one device, with weights in float32 or quantized.
        folder: A folder for files that are needed in between.

    Returns:
        The model without adapters, and what to report of it.

    Raises:
        LoopError: The kind of adapter changes no weights.
    """
    names = list(model.active_adapters)
    if not hasattr(model.base_model, "merge_and_unload"):
        raise LoopError(
            f"Cannot merge the adapter of the {type(model).__name__} into its weights.",
            f"Adapters of the kind {_kind(model, names[0])} change no weights of the model.",
            "--format peft, which writes the adapter alone.",
        )
    if _quantized(model):
        model = _on_float_base(model, folder / "float")
    merged: torch.nn.Module = model.base_model.merge_and_unload()
    return merged, {
        "class": type(merged).__name__,
        "parameters": sum(p.numel() for p in merged.parameters()),
        "merged": names,
        "bound": MERGED_BOUND,
    }


def write_adapter(model: Any, path: Path) -> dict[str, Any]:
    """Write the active adapter of a PeftModel to the folder `path`, and the base model to a folder beside it.

    The base is written for the process that loads the adapter again, and is no part of the export.

    Args:
        model: The PeftModel, whole and on one device. It loses its adapter.
        path: The folder for adapter_model.safetensors and adapter_config.json.

    Returns:
        What to report: parameters of the adapter, its name, and the SHA-256 of the base model's weights.

    Raises:
        LoopError: Several adapters are active, or the base is no model of transformers.
    """
    names = list(model.active_adapters)
    if len(names) != 1:
        raise LoopError(
            f"Cannot export {len(names)} adapters as {FORMATS['peft'].text}.",
            f"The active adapters are {', '.join(names) or 'none'}, and the format holds one.",
            f"activate one before the loop: model.set_adapter({next(iter(model.peft_config))!r}).",
        )
    (name,) = names
    draft = path.with_name("adapters")
    model.save_pretrained(str(draft), selected_adapters=names)
    (draft if name == "default" else draft / name).rename(path)
    trained = _trained_by(model, name)
    kind = _kind(model, name)
    bound = MERGED_BOUND if _quantized(model) else FORMATS["peft"].bound
    base = model.base_model if model.active_peft_config.is_prompt_learning else model.base_model.unload()
    _dequantize(base)
    require_transformer(base, "peft")
    base.save_pretrained(path.with_name(BASE))
    return {
        "class": f"{kind} adapter of {type(base).__name__}",
        "parameters": trained,
        "adapter": name,
        "bound": bound,
        "base_sha256": fingerprint_of({"base": base.state_dict()}),
    }


def require_transformer(model: torch.nn.Module, kind: str) -> None:
    """Raise LoopError if a model is not of transformers, so that from_pretrained has no code for it."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise LoopError(
            f"Cannot export the {type(model).__name__} as {FORMATS[kind].text}.",
            "It is no model of transformers, so from_pretrained has no code for it.",
            "--format torch for a program, --format safetensors for the weights",
        )
    if not type(model).__module__.startswith("transformers."):
        raise LoopError(
            f"Cannot export the {type(model).__name__} as {FORMATS[kind].text}.",
            f"Its class is defined in {type(model).__module__}, so from_pretrained has no code for it.",
            "--format torch for a program, --format safetensors for the weights",
        )


def _quantized(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules with a weight of torchao, which is computed from several tensors."""
    return [
        part
        for part in model.modules()
        if is_parametrized(part, "weight") and hasattr(part.weight, "__tensor_flatten__")
    ]


def _dequantize(model: torch.nn.Module) -> None:
    """Replace quantized weights by their values in float32, in place."""
    for part in _quantized(model):
        value: Any = part.weight
        remove_parametrizations(part, "weight", leave_parametrized=True)
        part.weight = torch.nn.Parameter(value.dequantize().float(), requires_grad=False)


def _on_float_base(model: Any, folder: Path) -> Any:
    """Return the model with the same adapters, on a base in float32. It can be merged; a quantized one would round."""
    from peft import PeftModel

    names = list(model.active_adapters)
    model.save_pretrained(str(folder), selected_adapters=names)
    base = model.base_model.unload()
    _dequantize(base)
    places = {name: str(folder if name == "default" else folder / name) for name in names}
    first, *others = names
    found = PeftModel.from_pretrained(base, places[first], adapter_name=first)
    for name in others:
        found.load_adapter(places[name], name)
    found.base_model.set_adapter(names)
    return found.eval()


def _kind(model: Any, name: str) -> str:
    """Return the kind of an adapter in peft's words, such as LORA."""
    return str(getattr(model.peft_config[name].peft_type, "value", model.peft_config[name].peft_type))


def _trained_by(model: Any, name: str) -> int:
    """Return the number of parameters that an adapter has."""
    from peft import get_peft_model_state_dict

    return sum(value.numel() for value in get_peft_model_state_dict(model, adapter_name=name).values())
