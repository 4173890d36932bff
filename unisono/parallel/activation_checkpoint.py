"""Recompute: keep what goes into a layer, and compute the layer once more when backward wants what was in it.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv 1604.06174); torch's checkpoint does it
(https://docs.pytorch.org/docs/stable/checkpoint.html). Two ways, by the setting `parallel.activation_checkpoint`:

    layer      nothing of a layer is kept. Least memory, for another forward pass: about a third more computing.
    selective  the results of matrix products, convolutions and attention are kept, all else is computed again: it
               takes little time and most of the memory (Korthikanti et al., 2022, arXiv 2205.05198). Of a layer with
               an LSTM, a GRU or another recurrent module nothing is kept.

The second time must be the first to the bit. torch sees to its own random numbers and to autocast. Here is what it does
not know of: numpy's and Python's random numbers; tensors given by name; and buffers, which the second time works on
copies of, as they were before the first, so that batch norm counts every micro-batch once.
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

LARGE = 2**20
"""Elements of a buffer that is not copied for every forward pass (a causal mask, say), since it does not change."""

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Modules whose kernels write over their own products, some of them (GRU) without a trace in the tensor's version. Of a
layer that has one nothing is kept."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What the first and the second forward pass of a layer run in."""


def apply_activation_checkpoint(model: nn.Module, how: str, classes: list[str]) -> None:
    """From now on the layers of a model are computed again in the backward pass; `how`: layer, or selective."""
    for layer in outermost(model, classes):
        layer.forward = ActivationCheckpoint(layer, selective=how == "selective")


class ActivationCheckpoint(ForwardWrapper):
    """The forward of a layer of which nothing is kept, or not much."""

    def __init__(self, layer: nn.Module, *, selective: bool) -> None:
        super().__init__(layer)
        self.contexts: Callable[[], Contexts] | None = None
        if selective and not any(isinstance(part, RECURRENT) for part in layer.modules()):
            self.contexts = partial(create_selective_checkpoint_contexts, save_policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _within_checkpoint():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph has no buffers that change behind its back
            again = partial(checkpoint, self.forward, use_reentrant=False)
            return again(*args, context_fn=self.contexts, **kwargs) if self.contexts else again(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            return self.forward(*args, **kwargs)

        return checkpoint(run, *leaves, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> Contexts:
        before = ForwardState(self.module)
        first, second = self.contexts() if self.contexts else (nullcontext(), nullcontext())
        return first, FreshContext(lambda: self._again(before, second))

    @contextmanager
    def _again(self, before: ForwardState, inner: AbstractContextManager[Any]) -> Iterator[None]:
        name = type(self.module).__name__
        with before.again(name), inner:
            try:
                yield
            except RuntimeError as error:
                if not any(sign in str(error) for sign in ("not found in storage", "has been mutated")):
                    raise
                raise LoopError(
                    f"A layer {name} was to be computed again, but for its products.",
                    f"The second time was not the first: {str(error).splitlines()[0]}",
                    "--set parallel.activation_checkpoint=full; or let nothing in it write over a product "
                    "(ReLU(inplace=True)) "
                    "or fill a cache (Hugging Face: model.config.use_cache = False).",
                ) from error


def _within_checkpoint() -> bool:
    """Is a torch.utils.checkpoint of the script's own at work, or its second pass? The layer is computed again for it:
    a checkpoint within it would save nothing, and batch norm would count differently from a run without this setting.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # None: there are none
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


class FreshContext(AbstractContextManager[None]):
    """Whenever it is entered, the context that is made then. A graph may be walked twice: zero-bubble schedules do it,
    for the gradient of what went in and for that of the weights, and each time a layer is computed again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self.make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


class ForwardState:
    """What a layer's forward pass may read beside its inputs and parameters, as it was before."""

    def __init__(self, layer: nn.Module) -> None:
        self.numpy, self.random = np.random.get_state(), random.getstate()
        self.copies: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self.large: list[tuple[dict[str, Any], str, torch.Tensor, int]] = []
        for part in layer.modules():
            for key, buffer in part._buffers.items():
                if buffer is None:
                    continue
                if buffer.numel() <= LARGE:
                    self.copies.append((part._buffers, key, buffer.detach().clone()))
                else:
                    self.large.append((part._buffers, key, buffer, _version(buffer)))

    @contextmanager
    def again(self, layer: str) -> Iterator[None]:
        """All as it was; and afterwards as it is now. Buffers are exchanged, not written to: who counts how often they
        were written to (train/modules/buffer_sync.py) is not to count this."""
        for holder, key, buffer, version in self.large:
            if holder.get(key) is not buffer or _version(buffer) != version:
                raise LoopError(
                    f"A layer {layer} was to be computed again.",
                    f"Its buffer {key} has {buffer.numel()} elements, of which no copy was kept (the limit is {LARGE})"
                    ", and the first forward pass has changed it.",
                    "--set parallel.activation_checkpoint=none, or with --set 'parallel.layer_classes=[\"...\"]' "
                    "name layers without it.",
                )
        of_numpy, of_python = np.random.get_state(), random.getstate()
        now = [(holder, key, holder.get(key)) for holder, key, _ in self.copies]
        np.random.set_state(self.numpy)
        random.setstate(self.random)
        for holder, key, copied in self.copies:
            holder[key] = copied.clone()  # a graph may be walked twice
        try:
            yield
        finally:
            for holder, key, was in now:
                holder[key] = was
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# -- selective

_aten = torch.ops.aten
KEPT = {
    getattr(packet, overload)
    for packet in (
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten.linear,
        _aten.convolution,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_fused_attention_overrideable,
    )
    for overload in packet.overloads()
    if not overload.endswith("out")
}
"""Operators whose results are kept."""

UNSAFE = {
    getattr(packet, overload)
    for packet in (_aten.unsafe_split, _aten.unsafe_chunk, _aten.unsafe_split_with_sizes)
    for overload in packet.overloads()
}
"""Operators that give parts of a tensor which do not share its version."""


def save_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torch asks this about every operator, in both passes. Raises LoopError for a part that shares memory with what is
    kept and no version: a write to it would change what is kept, unseen."""
    if operator in UNSAFE:
        raise LoopError(
            "A layer was to be computed again, but for its products.",
            f"It calls {operator}, after which a write over a product cannot be noticed.",
            "--set parallel.activation_checkpoint=full; or call torch.split or torch.chunk instead.",
        )
    keep = operator in KEPT and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does attention drop out? What is kept does not draw the second time, and every draw after it would be another."""
    for i, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return False
