"""torch.compile, for layers or whole models (https://docs.pytorch.org/docs/stable/generated/torch.compile.html).

Only a forward pass is compiled. With `parallel.compile` it is that of each layer. So hooks around it, such as FSDP2's,
stay as they are, and layers of one class share their code. Each shape is compiled by itself, and no kernel is chosen by
measuring: what a kernel computes must not depend on what a process has compiled before, or on how busy its machine was.
The bits differ from those of eager torch, but are the same on any number of processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from unisono.errors import LoopError
from unisono.parallel.compiler_determinism import VARIANTS
from unisono.parallel.layers import ForwardWrapper, outermost


def apply_compile(model: nn.Module, classes: list[str]) -> None:
    """Compile the layers of a model; each is compiled when it first meets a shape."""
    for layer in outermost(model, classes):
        layer.forward = CompiledForward(layer, "parallel.compile")


def compile_model(model: nn.Module) -> None:
    """Compile the forward pass of a model as a whole; it is compiled when it first meets a shape."""
    model.forward = CompiledForward(model, "speed.compile_model")


class CompiledForward(ForwardWrapper):
    """Compile the forward of a layer or a model.

    Args:
        module: The layer, or the model.
        setting: The setting that asked for it, for messages.
    """

    compiled: Any = None

    def __init__(self, module: nn.Module, setting: str) -> None:
        super().__init__(module)
        self.setting = setting

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        copied = super().__deepcopy__(memo)
        copied.compiled = None
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is None:
            self.compiled = torch.compile(self.forward, dynamic=False, options={"deterministic": True})
        # A pending collective (a sum under parallel.tensor) is no tensor yet: compiled code would pass its
        # gradient to what is behind the wait (torch 2.13). A copy has waited, and passes its gradient on correctly.
        args, kwargs = tree_map_only(AsyncCollectiveTensor, torch.clone, (args, kwargs))
        try:
            with torch._dynamo.config.patch(recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True):
                return self.compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise LoopError(
                f"{type(self.module).__name__} met too many shapes to be compiled.",
                f"There are {VARIANTS} variants of it already, one for each shape of its inputs.",
                f"pad batches to a few lengths, or --set {self.setting}=false.",
            ) from error
