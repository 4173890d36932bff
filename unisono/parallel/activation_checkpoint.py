"""Activation checkpointing: keep a layer's inputs, and compute the layer again when backward needs its activations.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv 1604.06174); torch's checkpoint does it
(https://docs.pytorch.org/docs/stable/checkpoint.html). The setting `parallel.activation_checkpoint` chooses:

    full       nothing of a layer is kept. Least memory, for one more forward pass: about a third more computation.
    selective  the results of matrix products, convolutions and attention are kept, everything else is recomputed. It
               takes little time and saves most of the memory (Korthikanti et al., 2022, arXiv 2205.05198). Of a layer
               with an LSTM, a GRU or another recurrent module nothing is kept.

The recomputation must have the bits of the first pass. torch restores its own random numbers and autocast. This module
restores the rest: numpy's and Python's random numbers; tensors passed by name; and buffers. The recomputation works on
copies of the buffers as they were before the first pass, so batch norm counts every micro-batch once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.errors import LoopError
from unisono.parallel.layers import ForwardWrapper, outermost
from unisono.torch_compat.modules import arguments_of, buffer_slots, saved_tensor_hooks, version_of

LARGE = 2**20
"""The elements above which a buffer is not copied for every forward pass (a causal mask, say): it must not change."""

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Modules whose kernels overwrite their own products, some of them (GRU) without a trace in the tensor's version. Of a
layer that has one nothing is kept."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of a layer's first pass and of its recomputation."""


def apply_activation_checkpoint(model: nn.Module, mode: str, classes: list[str]) -> None:
    """Recompute the layers of a model in the backward pass; `mode` is full or selective."""
    for layer in outermost(model, classes):
        layer.forward = ActivationCheckpoint(layer, selective=mode == "selective")


class ActivationCheckpoint(ForwardWrapper):
    """Run a layer's forward, and again in backward.

    Args:
        layer: The layer.
        selective: Keep the results of the operators in KEPT.

    Attributes:
        recomputes: False: the layer keeps its activations, as without this wrapper. It may change between two steps.
    """

    def __init__(self, layer: nn.Module, *, selective: bool) -> None:
        super().__init__(layer)
        self.recomputes = True
        self.contexts: Callable[[], Contexts] | None = None
        if selective and not any(isinstance(part, RECURRENT) for part in layer.modules()):
            self.contexts = partial(create_selective_checkpoint_contexts, save_policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes or not torch.is_grad_enabled() or _is_within_checkpoint():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph has no buffers that change unseen
            checkpointed = partial(checkpoint, self.forward, use_reentrant=False)
            if self.contexts:
                return checkpointed(*args, context_fn=self.contexts, **kwargs)
            return checkpointed(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            return self.forward(*args, **kwargs)

        return checkpoint(run, *leaves, use_reentrant=False, context_fn=self._build_contexts)

    def _build_contexts(self) -> Contexts:
        state = ForwardState(self.module)
        first, second = self.contexts() if self.contexts else (nullcontext(), nullcontext())
        return first, FreshContext(lambda: self._recompute(state, second))

    @contextmanager
    def _recompute(self, state: ForwardState, inner: AbstractContextManager[Any]) -> Iterator[None]:
        name = type(self.module).__name__
        with state.restored(name), inner:
            try:
                yield
            except RuntimeError as error:
                if not any(sign in str(error) for sign in ("not found in storage", "has been mutated")):
                    raise
                raise LoopError(
                    f"A layer {name} cannot be recomputed selectively.",
                    f"The recomputation differed from the first pass: {str(error).splitlines()[0]}",
                    "--set parallel.activation_checkpoint=full; or let nothing in it overwrite a product "
                    "(ReLU(inplace=True)) or fill a cache (Hugging Face: model.config.use_cache = False).",
                ) from error


def _is_within_checkpoint() -> bool:
    """Return whether a torch.utils.checkpoint of the script is active, or its recomputation.

    The layer is recomputed for it. A checkpoint within it would save nothing, and batch norm would count differently
    from a run without this setting.
    """
    hooks = saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


class FreshContext(AbstractContextManager[None]):
    """Enter a new context each time.

    A graph may be walked twice: zero-bubble schedules compute the gradient of the inputs and of the weights separately,
    and a layer is recomputed each time.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self.make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class ForwardState:
    """The state that a layer's forward may read besides its inputs and parameters: random numbers and buffers."""

    def __init__(self, layer: nn.Module) -> None:
        self.numpy, self.random = np.random.get_state(), random.getstate()
        self.copies: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self.large: list[tuple[dict[str, Any], str, torch.Tensor, int]] = []
        for part in layer.modules():
            slots = buffer_slots(part)
            for key, buffer in slots.items():
                if buffer is None:
                    continue
                if buffer.numel() <= LARGE:
                    self.copies.append((slots, key, buffer.detach().clone()))
                else:
                    self.large.append((slots, key, buffer, version_of(buffer)))

    @contextmanager
    def restored(self, layer: str) -> Iterator[None]:
        """Restore the state within a block, and then the state of now.

        Buffers are replaced, not written to, because train/modules/buffer_sync.py counts writes.
        """
        for slots, key, buffer, version in self.large:
            if slots.get(key) is not buffer or version_of(buffer) != version:
                raise LoopError(
                    f"A layer {layer} cannot be recomputed: it changes a large buffer.",
                    f"Its buffer {key} has {buffer.numel()} elements, of which no copy was kept (the limit is {LARGE})"
                    ", and the first forward pass has changed it.",
                    "--set parallel.activation_checkpoint=none, or with --set 'parallel.layer_classes=[\"...\"]' "
                    "name layers without it.",
                )
        numpy_now, random_now = np.random.get_state(), random.getstate()
        buffers_now = [(slots, key, slots.get(key)) for slots, key, _ in self.copies]
        np.random.set_state(self.numpy)
        random.setstate(self.random)
        for slots, key, copied in self.copies:
            slots[key] = copied.clone()  # a graph may be walked twice
        try:
            yield
        finally:
            for slots, key, buffer_now in buffers_now:
                slots[key] = buffer_now
            np.random.set_state(numpy_now)
            random.setstate(random_now)


# -- selective

KEPT = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "linear", "convolution"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    for overload in getattr(torch.ops.aten, name).overloads()
    if not overload.endswith("out")
}
"""Operators whose results are kept."""

UNSAFE = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
    for overload in getattr(torch.ops.aten, name).overloads()
}
"""Operators that return parts of a tensor which do not share its version counter."""


def save_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether torch keeps the results of an operator. torch calls this for every operator, in both passes.

    Raises:
        LoopError: The operator returns parts that share memory with a kept result but not its version counter. A write
            to a part would change the kept result, unseen.
    """
    if operator in UNSAFE:
        raise LoopError(
            "A layer cannot be recomputed selectively: it uses an unsafe operator.",
            f"It calls {operator}, after which a write over a product cannot be noticed.",
            "--set parallel.activation_checkpoint=full; or call torch.split or torch.chunk instead.",
        )
    keep = operator in KEPT and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention has dropout. If its result were kept, the recomputation would draw fewer numbers."""
    for argument, value in arguments_of(operator, args, kwargs):
        if argument.name == "dropout_p":
            return bool(value)
    return False
