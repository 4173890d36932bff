"""Capture the forward and backward pass of a micro-batch as two CUDA graphs, and replay them.

A replay launches all kernels of a pass at once (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). It
reads and writes the same memory each time:

    batch --copy--> inputs --forward graph--> loss --copy--> the loss that step.backward gets
    gradient of the loss --copy--> seed --backward graph--> flat gradients --copy--> gradients for autograd

Autograd accumulates the copies as it does without graphs. So hooks on gradients run, and an exchange may keep what it
gets. Each gradient begins at a multiple of ALIGNMENT, as one in memory of its own does, because sums of unaligned
tensors may be added up in another order.

torch runs the accumulation of a parameter's gradient on the stream on which the parameter was first used. For the
model's own parameters that is the default stream, which a capture must not touch. So a pass computes with other
parameters in the same memory (`same_memory`), which are first used on the stream of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_unflatten

ALIGNMENT = 512
"""Bytes: the alignment of torch's allocator for CUDA."""

WARM_UPS = 3
"""Passes before the capture, in which libraries allocate their workspaces."""

Replay = Callable[[], None]
Capture = Callable[[Sequence[Replay]], Sequence[Replay]]
"""Captures functions that launch kernels, in this order, and returns functions that launch the same kernels again."""


class CaptureError(Exception):
    """A micro-batch cannot be captured."""


class MicroBatchGraph:
    """The passes of a micro-batch for one shape of the batch.

    Args:
        compute: Returns loss and weight; it must not depend on anything but the batch and the parameters.
        modules: The models that `compute` may use.
        params: Their parameters that train. Those without a gradient here get none from a replay.
        leaves: The tensors of an example batch.
        spec: Its structure.
        capture: Captures the two passes.
    """

    def __init__(
        self,
        compute: Callable[[Any], tuple[torch.Tensor, Any]],
        modules: Sequence[torch.nn.Module],
        params: Sequence[torch.nn.Parameter],
        leaves: Sequence[torch.Tensor],
        spec: TreeSpec,
        capture: Capture,
    ) -> None:
        self._compute, self._modules = compute, modules
        self._inputs = [torch.empty_like(leaf).copy_(leaf) for leaf in leaves]
        self._batch = tree_unflatten(self._inputs, spec)
        loss, weight = compute(self._batch)
        found: Any = torch.autograd.grad(loss, params, allow_unused=True)
        if any(grad is not None and grad.layout is not torch.strided for grad in found):
            raise CaptureError("a gradient is sparse")
        self._loss, self._seed = torch.empty_like(loss.detach()), torch.ones_like(loss.detach())
        self._weight = torch.empty_like(weight.detach()) if isinstance(weight, torch.Tensor) else weight
        self.params = [p for p, grad in zip(params, found, strict=True) if grad is not None]
        self._flats, self._views = _flat_gradients(self.params)
        self._live: torch.Tensor | None = None
        self._leaves: list[torch.nn.Parameter] = []
        self.addresses = [p.data_ptr() for p in self.params]
        del loss, weight, found
        self._forward, self._backward = capture([self._run_forward, self._run_backward])

    def _run_forward(self) -> None:
        with same_memory(self._modules, self.params) as self._leaves:
            self._live, weight = self._compute(self._batch)
        self._loss.copy_(self._live.detach())
        if isinstance(self._weight, torch.Tensor):
            self._weight.copy_(weight.detach())

    def _run_backward(self) -> None:
        assert self._live is not None
        torch._foreach_copy_(self._views, list(torch.autograd.grad(self._live, self._leaves, self._seed)))
        self._live, self._leaves = None, []

    @property
    def is_current(self) -> bool:
        """Whether the parameters are still in the memory that the graphs read."""
        return [p.data_ptr() for p in self.params] == self.addresses

    def replay(self, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Return loss and weight of a batch. Call backward on the loss before the next replay."""
        torch._foreach_copy_(self._inputs, list(leaves))
        loss: torch.Tensor = _Passes.apply(self, *self.params)
        weight = self._weight
        return loss, weight.clone() if isinstance(weight, torch.Tensor) else weight

    def replay_forward(self) -> torch.Tensor:
        """Replay the forward pass for the inputs, and return the loss without a graph of autograd."""
        self._forward()
        return self._loss.clone()

    def replay_backward(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Replay the backward pass, and return new gradients of the parameters that are used.

        They share one memory, but each has a version counter of its own (`data`): an exchange looks at it.
        """
        self._seed.copy_(gradient)
        self._backward()
        copies = {dtype: flat.clone() for dtype, flat in self._flats.items()}
        pairs = zip(self.params, self._views, strict=True)
        return [copies[p.dtype].as_strided(v.shape, v.stride(), v.storage_offset()).data for p, v in pairs]


@contextmanager
def same_memory(
    modules: Sequence[torch.nn.Module], params: Sequence[torch.nn.Parameter]
) -> Iterator[list[torch.nn.Parameter]]:
    """Give modules other parameters in the same memory, within this block, and yield these in the order of `params`."""
    others = {id(p): torch.nn.Parameter(p.detach(), p.requires_grad) for p in params}
    parts = {part for module in modules for part in module.modules()}
    named = {part: list(part.named_parameters(recurse=False, remove_duplicate=False)) for part in parts}
    places = [(part, name, p) for part, own in named.items() for name, p in own if id(p) in others]
    for part, name, p in places:
        setattr(part, name, others[id(p)])  # some layers keep lists of their parameters, and notice this
    try:
        yield [others[id(p)] for p in params]
    finally:
        for part, name, p in places:
            setattr(part, name, p)


class _Passes(torch.autograd.Function):
    """The passes of a graph, for autograd."""

    @staticmethod
    def forward(ctx: Any, graph: MicroBatchGraph, *params: torch.Tensor) -> torch.Tensor:
        ctx.graph = graph
        return graph.replay_forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *ctx.graph.replay_backward(gradient)


def _flat_gradients(
    params: Sequence[torch.nn.Parameter],
) -> tuple[dict[torch.dtype, torch.Tensor], list[torch.Tensor]]:
    """Return a flat tensor for each dtype, and views with the shapes and strides of the parameters."""
    sizes: dict[torch.dtype, int] = {}
    offsets: list[int] = []
    for p in params:
        offsets.append(sizes.get(p.dtype, 0))
        step = ALIGNMENT // p.element_size()
        sizes[p.dtype] = offsets[-1] + -(-p.numel() // step) * step
    flats = {dtype: torch.zeros(size, dtype=dtype, device=params[0].device) for dtype, size in sizes.items()}
    views = [
        flats[p.dtype].as_strided(p.shape, torch.empty_like(p, device="meta").stride(), offset)
        for p, offset in zip(params, offsets, strict=True)
    ]
    return flats, views


def capture_on_cuda(passes: Sequence[Replay]) -> list[Replay]:
    """Capture passes as CUDA graphs that share memory. Warm-up and captures run on one stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            for run in passes:
                run()
    torch.cuda.current_stream().wait_stream(stream)
    pool, replays = torch.cuda.graph_pool_handle(), list[Replay]()
    for run in passes:
        graph = torch.cuda.CUDAGraph()
        # Threads of the loader copy meanwhile.
        capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            with capture:
                run()
        except RuntimeError:
            _renew_generator()
            raise
        replays.append(graph.replay)
    return replays


def _renew_generator() -> None:
    """Give the device a new generator.

    A failed capture leaves the generator in the state of a capture, in which random numbers outside of graphs raise an
    error.
    """
    index = torch.cuda.current_device()
    torch.cuda.default_generators[index].graphsafe_set_state(torch.Generator(f"cuda:{index}").graphsafe_get_state())
