"""torch.compile, a layer at a time (https://docs.pytorch.org/docs/stable/generated/torch.compile.html).

Only a layer's forward is compiled: hooks around it, those of shards for one, stay what they are, and layers of one
class share their code. Every shape is compiled by itself, and nothing is measured to choose between kernels: what a
kernel computes may depend on neither what a process has seen before nor how busy its machine was. So the bits are
others than without, but the same on any number of processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from unisono.errors import LoopError
from unisono.parallel.layers import ForwardWrapper, outermost

SHAPES = 64
"""So many variants (shapes; training, evaluation) of one forward are compiled; torch's 8 would go on without a word,
uncompiled, with other bits."""


def apply_compile(model: nn.Module, classes: list[str]) -> None:
    """From now on the layers of a model run as compiled code; each is compiled when it first meets a shape."""
    for layer in outermost(model, classes):
        layer.forward = CompiledForward(layer)


class CompiledForward(ForwardWrapper):
    """The forward of a layer, compiled."""

    _code: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        copied = super().__deepcopy__(memo)
        copied._code = None
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._code is None:
            self._code = torch.compile(self.forward, dynamic=False, options={"deterministic": True})
        # A sum that is on its way (an embedding's, under parallel.tensor) is not a tensor yet: compiled code would hand
        # its gradient to what lies behind the wait (torch 2.13). A copy has waited, and its gradient goes home.
        args, kwargs = tree_map_only(AsyncCollectiveTensor, torch.clone, (args, kwargs))
        try:
            with torch._dynamo.config.patch(recompile_limit=SHAPES, fail_on_recompile_limit_hit=True):
                return self._code(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise LoopError(
                f"{type(self.module).__name__} was to be compiled for another shape.",
                f"There are {SHAPES} variants of it already, one for each shape of its inputs.",
                "pad batches to a few lengths, or --set parallel.compile=false.",
            ) from error
