"""The ways to compute a step that a run tries while it trains. None of them changes a bit of the result.

KeptActivations   layers that recomputation would free keep their activations, as many as there is memory for
BucketSizes       gradients are sent in smaller or larger buckets
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from unisono.config.wording import plural
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.parallel.activation_checkpoint import ActivationCheckpoint
from unisono.train.context import LoopParts

BUCKETS_MB = (5.0, 100.0)
"""The bucket sizes that are tried beside that of the settings."""

Agree = Callable[[Sequence[float]], list[float]]
"""Returns the largest value of all processes for each place."""


class Proposal(NamedTuple):
    """A way to compute steps that is worth a trial.

    Attributes:
        setting: The setting of which it is another value.
        old: How steps are computed now, in words.
        new: How they would be computed, in words.
        switch: Switches to the new way, and with False back.
    """

    setting: str
    old: str
    new: str
    switch: Callable[[bool], None]


class StepOption(Protocol):
    """A kind of changes. All processes call its methods between the same two steps."""

    def observe(self) -> None:
        """Begin to measure what `propose` needs to know. One or more steps follow."""
        ...

    def propose(self, agree: Agree) -> Iterator[Proposal]:
        """Yield what is worth a trial, the same on all processes. A proposal follows the verdict on the one before."""
        ...

    def reset(self) -> None:
        """Return to what the settings say."""
        ...


# -- activations


class KeptActivations:
    """Let the last layers of each model keep their activations, where the settings recompute those of all layers.

    The last layers are the first that backward needs. When it recomputes an earlier layer, theirs are released.

    Args:
        layers: The layers of all models, in the order of their forward passes.
        kind: The value of parallel.activation_checkpoint.
        free: Returns the bytes that this process may use in addition.
    """

    def __init__(self, layers: Sequence[ActivationCheckpoint], kind: str, free: Callable[[], int]) -> None:
        self.layers, self.kind, self.free = layers, kind, free
        self._gauges: dict[type, ActivationGauge] = {}

    def observe(self) -> None:
        """Measure one layer of each class. It keeps its activations during the measurement."""
        chosen = {type(layer.module): layer for layer in self.layers}
        self._gauges = {kind: ActivationGauge(layer) for kind, layer in chosen.items()}

    def propose(self, agree: Agree) -> Iterator[Proposal]:
        for gauge in self._gauges.values():
            gauge.close()
        (count,) = agree([-self._affordable()])
        kept = self.layers[len(self.layers) + round(count) :] if count else []
        if kept:
            old = f"activations are recomputed ({self.kind})"
            new = f"those of {len(kept)} of {plural(len(self.layers), 'layer')} are kept"
            yield Proposal("parallel.activation_checkpoint", old, new, partial(_keep, kept))

    def _affordable(self) -> int:
        """Return the number of layers, from the last one, for which this process has the memory."""
        left = self.free()
        for count, layer in enumerate(reversed(self.layers)):
            left -= self._gauges[type(layer.module)].bytes
            if left < 0 or not self._gauges[type(layer.module)].bytes:
                return count
        return len(self.layers)

    def reset(self) -> None:
        for gauge in self._gauges.values():
            gauge.close()
        _keep(self.layers, False)


def _keep(layers: Iterable[ActivationCheckpoint], are_kept: bool) -> None:
    for layer in layers:
        layer.recomputes = not are_kept


class ActivationGauge:
    """Measure the bytes that a layer's forward pass saves for its backward pass, without parameters and inputs.

    Attributes:
        bytes: The most bytes of a forward pass so far.
    """

    def __init__(self, layer: ActivationCheckpoint) -> None:
        self.bytes = 0
        self._layer, self._sizes, self._others = layer, dict[int, int](), set[int]()
        layer.recomputes = False
        self._saving: list[saved_tensors_hooks] = []
        module = layer.module
        self._hooks = (
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, always_call=True),
        )

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [*tree_leaves((args, kwargs)), *module.parameters(), *module.buffers()]
        self._others = {_storage(each) for each in tensors if isinstance(each, torch.Tensor)}
        self._sizes.clear()
        self._saving.append(saved_tensors_hooks(self._pack, lambda saved: saved))
        self._saving[-1].__enter__()

    def _end(self, *_: Any) -> None:
        if self._saving:
            self._saving.pop().__exit__()
            self.bytes = max(self.bytes, sum(self._sizes.values()))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        address = _storage(tensor)
        if address and address not in self._others:
            self._sizes[address] = tensor.untyped_storage().nbytes()
        return tensor

    def close(self) -> None:
        """End the measurement. The layer recomputes its activations again."""
        for hook in self._hooks:
            hook.remove()
        self._layer.recomputes = True


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or a subclass
        return 0


# -- buckets


class BucketSizes:
    """Try other sizes of the buckets in which gradients are sent.

    Args:
        parts: The parts of the loop.
        now: The size that the settings say, in megabytes.
    """

    def __init__(self, parts: LoopParts, now: float) -> None:
        self.parts, self.now, self.current = parts, now, now

    def observe(self) -> None:
        return

    def propose(self, agree: Agree) -> Iterator[Proposal]:
        sync = self.parts.sync
        exchanges = [each.exchange for each in sync.gradients]
        trees = [each for each in exchanges if isinstance(each, TreeExchange)]
        if sync.group.size == 1 or not trees or len(trees) < len(exchanges):
            return
        largest = max(each.layout.bytes_of_all for each in trees) / 2**20
        for size in BUCKETS_MB:
            before = self.current
            if min(size, largest) != min(before, largest):
                old, new = f"buckets have {before:g} MB", f"buckets have {size:g} MB"
                yield Proposal("tree.bucket_mb", old, new, partial(self._use, before, size))

    def _use(self, old: float, new: float, is_new: bool) -> None:
        self._set(new if is_new else old)

    def _set(self, size: float) -> None:
        if size != self.current:
            self.current = size
            self.parts.sync.set_bucket_size(size)

    def reset(self) -> None:
        self._set(self.now)
