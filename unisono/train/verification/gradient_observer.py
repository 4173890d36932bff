"""Observe the gradient that each backward pass gives each parameter, under every placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.exchange.tree.reduce_scatter import ChunkReducer, NoReduce, ReduceScatterTree

if TYPE_CHECKING:
    from unisono.train.gradient_pass import GradientPass

Note = Callable[[int, torch.Tensor], None]
"""Called with a parameter's number in `gradient.leaves` and its whole gradient."""


@contextmanager
def listening(gradient: GradientPass, note: Note, *, spare: bool) -> Iterator[None]:
    """Call `note` for every gradient within this block.

    spare  no exchange uses these gradients: each one is dropped after the call
    """
    exchange = gradient.exchange
    if isinstance(exchange, ReduceScatterTree):
        with _layers(exchange, gradient, note, spare=spare):
            yield
        return
    handles: list[Any] = []
    for number, p in enumerate(gradient.leaves):
        if not p.requires_grad:
            continue
        if spare:
            handles.append(p.register_post_accumulate_grad_hook(partial(_take, note, number)))
        else:
            handles.append(p.register_hook(partial(note, number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _take(note: Note, number: int, p: torch.Tensor) -> None:
    """Pass the gradient that autograd has put there to `note`, and drop it."""
    if p.grad is not None:
        note(number, p.grad)
        p.grad = None


@contextmanager
def _layers(exchange: ReduceScatterTree, gradient: GradientPass, note: Note, *, spare: bool) -> Iterator[None]:
    """Observe layers that are gathered one by one: FSDP2 passes the whole gradient of a layer, flat."""
    numbers = {id(p): number for number, p in enumerate(gradient.params)}

    def on_gradient(reducer: ChunkReducer, flat: torch.Tensor) -> None:
        for p, whole in zip(reducer.params, reducer.full_gradients(flat), strict=True):
            if id(p) in numbers:
                note(numbers[id(p)], whole)

    if spare:
        for reducer in (*exchange.reducers, *exchange.dropped):
            reducer.layer.set_reduce_scatter(ObservedGradient(reducer, on_gradient))
        yield
        return
    exchange.on_gradient = on_gradient
    try:
        yield
    finally:
        exchange.on_gradient = None


class ObservedGradient(NoReduce):
    """Observe a layer's gradient, and drop it."""

    def __init__(self, reducer: ChunkReducer, on_gradient: Callable[[ChunkReducer, torch.Tensor], None]) -> None:
        super().__init__(reducer.layer, reducer.params, reducer.exchange, reducer.size)
        self._on_gradient = on_gradient

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        self._on_gradient(self, input_tensor)
