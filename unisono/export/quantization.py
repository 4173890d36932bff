"""Quantize the linear layers of a model with torchao, and write them so that nothing else needs torchao.

torchao stores a quantized weight as a subclass of Tensor. A program with such weights could be loaded only where
torchao is installed. So each weight is divided into its plain tensors, and torchao's operators into those of torch.

torchao is imported in functions, because it takes seconds.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from unisono.errors import LoopError
from unisono.export.formats import DYNAMIC
from unisono.export.safetensors_file import without_ties

GROUP = 32
"""Weights of int4 that share a scale."""

INT4: Any = vars(torch)["int4"]
"""torch.int4, which type stubs of torch leave out."""


def config_of(kind: str) -> Any:
    """Return the configuration of torchao for a quantization (formats.py)."""
    from torchao import quantization as ao

    if kind == "int8":
        return ao.Int8WeightOnlyConfig()
    if kind == DYNAMIC:
        return ao.Int8DynamicActivationInt8WeightConfig()
    return ao.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=ao.PerGroup(GROUP))


def config_for_training(kind: str) -> Any:
    """Return the configuration of torchao that prepares a model for training with int8 or int4 weights."""
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    if kind == "int8":  # torchao derives none from its configuration for int8 weights
        return QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel"), step="prepare")
    return QATConfig(config_of(kind), step="prepare")


def without_fake_quantizers(model: nn.Module, kind: str) -> None:
    """Replace the layers of quantization-aware training with plain linear layers that have the same weights.

    Raises:
        LoopError: The layers were trained for another quantization.
    """
    fakes = {name: fake for name, fake in model.named_modules() if hasattr(fake, "weight_fake_quantizer")}
    if not fakes:
        return
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    wanted = nn.Sequential(nn.Linear(GROUP, 1))
    if kind != DYNAMIC:  # torchao trains for no quantization of activations that can be exported
        quantize_(wanted, config_for_training(kind))
    for name, fake in fakes.items():
        if not isinstance(fake, nn.Linear) or _fakes_of(fake) != _fakes_of(wanted[0]):
            found = ", ".join(f"{part}: {config}" for part, config in _fakes_of(fake).items())
            raise LoopError(
                f"Cannot export a model with --quantize {kind} that was trained for another quantization.",
                f"The layer {name or type(fake).__name__} has {found}.",
                "--quantize int4, for a model prepared with QATConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, "
                f'granularity=PerGroup({GROUP})), step="prepare"), or --quantize int8, for QATConfig('
                'weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel"), step="prepare")',
            )
    if "" in fakes:
        raise LoopError(
            "Cannot quantize a model that is one layer of quantization-aware training.",
            f"The model itself is a {type(model).__name__}, which cannot be replaced in place.",
            "make it a part of another module: nn.Sequential(nn.Linear(...))",
        )
    quantize_(model, QATConfig(step="convert"))


def _fakes_of(layer: nn.Module) -> dict[str, Any]:
    """Return the configurations of the fake quantizers of a layer."""
    parts = {part: getattr(layer, f"{part}_fake_quantizer", None) for part in ("weight", "activation")}
    return {part: fake.config for part, fake in parts.items() if fake is not None}


def quantize_linear(model: nn.Module, kind: str, *, plain: bool) -> dict[str, Any]:
    """Quantize the linear layers of a model in place, and return facts for the report.

    Args:
        model: The model, in eval mode.
        kind: The name of the quantization.
        plain: Divide each weight into its plain tensors.

    Raises:
        LoopError: The model has no linear layer that this quantization can be applied to.
    """
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    fitting = {name: layer for name, layer in linear.items() if _fits(layer, kind)}
    if not fitting:
        facts = f"It has {len(linear)} linear layers. Int4 needs a multiple of {GROUP} inputs. Layers with a "
        facts += "parametrization and the output layer of torch.nn.MultiheadAttention are not quantized."
        raise LoopError(
            f"The {type(model).__name__} has no layer that --quantize {kind} can quantize.",
            facts if linear else "It has no torch.nn.Linear, and other layers are not quantized.",
            "--quantize int8" if linear else "export it without --quantize",
        )
    from torchao.quantization import quantize_
    from torchao.utils import UnwrapTensorSubclass

    chosen = set(map(id, fitting.values()))
    quantize_(model, config_of(kind), filter_fn=lambda layer, _: id(layer) in chosen)
    if plain:
        for layer in fitting.values():
            parametrize.register_parametrization(layer, "weight", UnwrapTensorSubclass())
    return {
        "quantize": kind,
        "quantized_layers": len(fitting),
        "float_layers": [name for name in linear if name not in fitting],
    }


def _fits(layer: nn.Linear, kind: str) -> bool:
    """Return whether torchao can quantize this layer."""
    if isinstance(layer, NonDynamicallyQuantizableLinear) or parametrize.is_parametrized(layer):
        return False
    return kind != "int4" or layer.in_features % GROUP == 0


def is_quantized(model: nn.Module) -> bool:
    """Return whether weights of the model are divided into plain tensors."""
    return any(hasattr(part, "rebuild_stack") for part in model.modules())


def without_torchao(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the same program with operators of torch only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)  # torch's own copying
        return program.run_decompositions()


def quantized_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the weights for a safetensors file, and other names of tied ones.

    A quantized weight NAME is an int8 tensor [outputs, inputs], and NAME_scale is a float tensor [outputs, groups]. Its
    value is the product of both, where each scale belongs to a group of inputs.
    """
    state: dict[str, torch.Tensor] = {}
    tensors, aliases = without_ties(model.state_dict(keep_vars=True))
    for name, value in tensors.items():
        if quantized := _parts(value):
            state |= {name: quantized["qdata"], f"{name}_scale": quantized["scale"]}
        else:
            state[name] = value
    metadata = {**aliases, "format": "pt"}
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}, metadata


def forget_quantized(model: nn.Module) -> None:
    """Replace quantized weights with zeros in float."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and _parts(layer.weight):
            layer.weight = nn.Parameter(torch.zeros(layer.weight.shape), requires_grad=False)


def _parts(value: Any) -> dict[str, torch.Tensor]:
    """Return the integers and the scales of a quantized weight of torchao; {} for any other tensor."""
    return {name: getattr(value, name) for name in ("qdata", "scale")} if hasattr(value, "qdata") else {}
