"""Maximal update parametrization: learning rates and initial weights by width, so that both transfer between widths.

A narrow model is tuned, and a wide one gets its learning rate. Which dims of a parameter grow with the width is found
by comparing the shapes of both. With n_in and n_out the factors by which they grow (Yang, Hu et al. 2021, Tensor
Programs V, arXiv 2203.03466, table 8):

    parameter                         initial size   lr of Adam   lr of SGD
    matrix: both dims grow            1/sqrt(n_in)   1/n_in       n_out/n_in
    vector: one dim grows             1              1            its n
    scalar: none grows                1              1            1

Biases, norms, embeddings and the output layer are vectors. The inputs of the output layer are multiplied by 1/n_in in
the model, and attention by 1/d instead of 1/sqrt(d): see `output_scale` and `attention_scale`. Input and output layers
so have the same rule, and may share weights.

At the base width all factors are 1, and nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from unisono.data.rng import preserve_rng
from unisono.errors import LoopError

Module = TypeVar("Module", bound=nn.Module)
Rule = Literal["adam", "sgd"]

CPU, META = torch.device("cpu"), torch.device("meta")
TRANSPOSED = ("Conv1D", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
"""Layers whose weights have their inputs in dim 0. The first one is that of transformers."""


@dataclass(frozen=True)
class ParameterWidth:
    """How a parameter grows with the width.

    Attributes:
        kind: Its number of dims that grow: "scalar", "vector" or "matrix".
        fan_in: The factor of its inputs; of a vector, that of the dim that grows.
        fan_out: The factor of its outputs; of a vector, that of the dim that grows.
    """

    kind: Literal["scalar", "vector", "matrix"]
    fan_in: float = 1.0
    fan_out: float = 1.0

    @property
    def init(self) -> float:
        """The factor of its initial size relative to the base model."""
        return 1 / math.sqrt(self.fan_in) if self.kind == "matrix" else 1.0

    @property
    def adam(self) -> float:
        """The factor of the learning rate of Adam, AdamW and other optimizers that normalize each element."""
        return 1 / self.fan_in if self.kind == "matrix" else 1.0

    @property
    def sgd(self) -> float:
        """The factor of the learning rate of SGD, with momentum or without."""
        return self.fan_out / self.fan_in if self.kind == "matrix" else self.fan_out


class WidthScaling:
    """The widths of a model's parameters, relative to those of a base model.

    Args:
        build: Builds the model. It is built without memory, on torch's device "meta".
        base: Builds the base model: the same one, but narrower.
        input_dims: For parameters whose dims grow by different factors and that belong to none of torch's layers: the
            dim of their inputs, by name.

    Raises:
        LoopError: The models differ in more than the width of their parameters.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        base: Callable[[], nn.Module],
        *,
        input_dims: Mapping[str, int] | None = None,
    ) -> None:
        self._base = base
        with preserve_rng(CPU), META:
            wide, narrow = build(), base()
        self._widths: dict[str, ParameterWidth] = {}
        shapes = {name: tuple(p.shape) for name, p in _named(narrow)}
        _check_names([name for name, _ in _named(wide)], list(shapes))
        for name, p in _named(wide):
            owner = wide.get_submodule(name.rpartition(".")[0])
            given = None if input_dims is None else input_dims.get(name)
            self._widths[name] = _width(name, tuple(p.shape), shapes[name], owner, given)

    def __getitem__(self, name: str) -> ParameterWidth:
        """Return the width of the parameter with this name."""
        return self._widths[name]

    def apply_init(self, model: Module, *, seed: int = 0) -> Module:
        """Scale the initial weights of a model that was just built, in place, and return it.

        The size (root mean square) of each parameter is measured in the model and in a base model, which is built for
        this. So it does not matter how the script's own initial weights depend on the width. Parameters at the base
        width, and those that are constant, keep their bits.

        Args:
            model: The model, as the function that `run.place` calls has built it.
            seed: The seed for the base model.
        """
        with preserve_rng(CPU), torch.no_grad():
            torch.manual_seed(seed)
            sizes = {name: _size(p) for name, p in _named(self._base())}
        with torch.no_grad():
            done = set()
            for name, p in _named(model):
                width, size = self._widths[name], _size(p)
                if width.kind != "scalar" and id(p) not in done and size > 0 and sizes[name] > 0:
                    p.mul_(width.init * sizes[name] / size)
                done.add(id(p))
        return model

    def groups(
        self, model: nn.Module, *, lr: float, rule: Rule = "adam", weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer of torch, one for each factor of the learning rate.

        Weight decay of torch's optimizers is multiplied by the learning rate. Here their product is the same in all
        groups.

        Args:
            model: The placed model.
            lr: The learning rate of the base model.
            rule: "adam" for optimizers that normalize each element, "sgd" for SGD.
            weight_decay: The weight decay of the base model.
        """
        by_factor: dict[float, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            width = self._widths[name]
            by_factor.setdefault(width.adam if rule == "adam" else width.sgd, []).append(p)
        return [
            {"params": params, "lr": lr * factor, "weight_decay": weight_decay / factor}
            for factor, params in sorted(by_factor.items(), reverse=True)
        ]


def output_scale(width: int, base_width: int) -> float:
    """Return the factor for the inputs of the output layer: base_width / width.

    Args:
        width: The number of inputs of the output layer.
        base_width: The same of the base model.
    """
    return base_width / width


def attention_scale(head_width: int, base_head_width: int) -> float:
    """Return the `scale` of scaled_dot_product_attention: proportional to 1/d, and 1/sqrt(d) at the base width.

    Args:
        head_width: The width of a head. If wider models have more heads of the same width, nothing changes.
        base_head_width: The same of the base model.
    """
    return math.sqrt(base_head_width) / head_width


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by name, tied ones with each of their names."""
    return model.named_parameters(remove_duplicate=False)


def _size(p: torch.Tensor) -> float:
    return float(p.double().square().mean().sqrt()) if p.numel() else 0.0


def _check_names(names: list[str], base: list[str]) -> None:
    if names != base:
        missing = [name for name in names if name not in base] or [name for name in base if name not in names] or names
        raise LoopError(
            "The base model has other parameters than the model.",
            f"{missing[0]} is in one of them only; the model has {len(names)} parameters, and the base {len(base)}.",
            "build both with the same settings except for the width: the same depth, and the same kinds of layers.",
        )


def _width(
    name: str, shape: tuple[int, ...], base: tuple[int, ...], owner: nn.Module, input_dim: int | None
) -> ParameterWidth:
    growing = [dim for dim, (now, before) in enumerate(zip(shape, base, strict=False)) if now != before]
    if len(shape) != len(base) or len(growing) > 2 or 0 in base:
        raise LoopError(
            f"The parameter {name} grows in a way that is not known.",
            f"Its shape is {list(base)} in the base model and {list(shape)} in the model.",
            "let at most two dims of a parameter depend on the width, its inputs and its outputs.",
        )
    factors = [shape[dim] / base[dim] for dim in growing]
    if not growing:
        return ParameterWidth("scalar")
    if len(growing) == 1:
        return ParameterWidth("vector", factors[0], factors[0])
    if input_dim is None:
        is_layer = isinstance(owner, nn.Linear) or type(owner).__name__.startswith("Conv")
        if factors[0] != factors[1] and not is_layer:
            raise LoopError(
                f"It is not known which dim of the parameter {name} is that of its inputs.",
                f"Its dims grow by {factors[0]:g} and {factors[1]:g}, and it belongs to a {type(owner).__name__}.",
                f"name the dim: WidthScaling(build, base, input_dims={{{name!r}: {growing[1]}}})",
            )
        input_dim = growing[0 if type(owner).__name__ in TRANSPOSED else 1]
    elif input_dim not in growing:
        raise LoopError(
            f"Dim {input_dim} of the parameter {name} does not grow with the width.",
            f"Its shape is {list(base)} in the base model and {list(shape)} in the model.",
            f"name one that does: input_dims={{{name!r}: {growing[1]}}}",
        )
    fan_in = factors[growing.index(input_dim)]
    return ParameterWidth("matrix", fan_in, factors[1 - growing.index(input_dim)])
