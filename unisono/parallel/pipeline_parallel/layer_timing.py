"""What each link of a cut costs: the time of its forward and its backward pass.

    forward  0 --x--> forward  1 --x--> forward  2 --x--> ...          x is cut off from the graph that made it, so a
    backward 0        backward 1        backward 2                     link goes backward at once, and is forgotten

All links take their turn before the first one has its next, so that whatever else the machine does meets all of them;
of each link the median of its turns counts. On the CPU the time is that for which it worked for us (`clock_of`).

Gradients are returned to us and not written down, so p.grad stays as it is. What comes into a link from behind is ones:
time does not depend on what they are. Loss and optimizer are not in it, and what every stage computes for itself
(masks, positions) is nobody's cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.parallel.pipeline_parallel.fx_partition import FxPartition
from unisono.parallel.pipeline_parallel.partition import PartitionLink

WARM_UPS = 2
"""Turns that do not count: memory is fetched in them, kernels are chosen, layers are compiled."""

TURNS = 9
"""Turns that count; a fixed number, since processes that share a layer's matrices must take equally many."""

Clock = Callable[[], float]
"""It tells seconds; only their differences mean something."""

Inputs = dict[str, Any]
"""What a model's forward is called with, by name."""


@dataclass
class TimedStretch:
    """A link, and what the forward computes between it and the next one.

    arrives  values of earlier stretches that it uses
    leaves   values that later ones use, or the model returns
    """

    nodes: list[fx.Node]
    arrives: list[fx.Node]
    leaves: list[fx.Node]
    params: list[nn.Parameter]


def clock_of(device: torch.device, *, together: bool) -> Clock:
    """The clock to time layers with; `together`: do several processes compute them?

    On a CPU with one thread it counts the seconds for which the processor worked for this process: what others do at
    the same time on a busy machine, and how long they made us wait, is not in it. With several threads, or where
    processes wait for each other's parts, waiting is part of the time. An accelerator is asked when it is done.
    """
    if device.type == "cpu":
        return time.perf_counter if together or torch.get_num_threads() > 1 else time.process_time
    accelerator = torch.get_device_module(device)

    def done() -> float:
        accelerator.synchronize(device)
        return time.perf_counter()

    return done


def seconds_of_links(
    model: nn.Module, chain: FxPartition, inputs: Inputs, clock: Clock, autocast: AbstractContextManager[Any]
) -> list[float]:
    """How long each link of the chain takes, forward and backward.

    inputs    on the model's device, as chain.bind gives them
    clock     as clock_of gives it
    autocast  in which the forward computes; it is entered for each link

    Draws random numbers, and buffers may change: to keep them is the caller's.
    """
    common, stretches = _stretches(chain)
    walk = _TimedInterpreter(model, garbage_collect_values=False, graph=chain.graph)
    with torch.enable_grad():
        turns = [list(walk.turn(common, stretches, inputs, clock, autocast)) for _ in range(WARM_UPS + TURNS)]
    return [median(times) for times in zip(*turns[WARM_UPS:], strict=True)]


def seconds_of_modules(
    model: nn.Module,
    links: Sequence[PartitionLink],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    clock: Clock,
    autocast: AbstractContextManager[Any],
) -> list[float]:
    """The same where the forward cannot be followed (shadow_partition.py): each link by itself, called with what a
    forward pass of the model calls it with. What is computed between them is nobody's cost."""
    calls: list[list[tuple[Any, Any]]] = [[] for _ in links]

    def note(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        calls[number].append(tree_map_only(torch.Tensor, _cut_off, (args, kwargs)))

    modules = [model.get_submodule(link.name) for link in links]
    hooks = [
        part.register_forward_pre_hook(partial(note, number), with_kwargs=True) for number, part in enumerate(modules)
    ]
    with torch.enable_grad():
        try:
            with autocast:
                model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        trained = [list(dict.fromkeys(p for p in link.params if p.requires_grad)) for link in links]
        turns = [
            [
                sum(_alone(part, *call, params, clock, autocast) for call in its)
                for part, its, params in zip(modules, calls, trained, strict=True)
            ]
            for _ in range(WARM_UPS + TURNS)
        ]
    return [median(times) for times in zip(*turns[WARM_UPS:], strict=True)]


def _alone(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    params: Sequence[nn.Parameter],
    clock: Clock,
    autocast: AbstractContextManager[Any],
) -> float:
    """The seconds of one call, forward and backward."""
    arrives = tree_map_only(torch.Tensor, _cut_off, (args, kwargs))
    args, kwargs = tree_map_only(torch.Tensor, _as_made, arrives)
    began = clock()
    with autocast:
        output = module(*args, **kwargs)
    ended = clock()
    made, wanted = _in_graphs([output]), [*_in_graphs([arrives]), *params]
    return ended - began + _backward(made, wanted, clock)


class _TimedInterpreter(fx.Interpreter):
    """Goes through a chain from node to node: https://docs.pytorch.org/docs/stable/fx.html#the-interpreter-pattern."""

    def turn(
        self,
        common: Sequence[fx.Node],
        stretches: Sequence[TimedStretch],
        inputs: Inputs,
        clock: Clock,
        autocast: AbstractContextManager[Any],
    ) -> Iterator[float]:
        """The seconds of each stretch."""
        known: dict[fx.Node, Any] = {}
        self.env = known
        copied = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), inputs)  # a layer may write over its input
        with autocast:
            for node in common:
                is_input = node.op == "placeholder"
                known[node] = copied.get(str(node.target)) if is_input else self.run_node(node)
        for stretch in stretches:
            kept = {node: known[node] for node in stretch.arrives}
            known |= {node: tree_map_only(torch.Tensor, _as_made, value) for node, value in kept.items()}
            began = clock()
            with autocast:
                for node in stretch.nodes:
                    known[node] = self.run_node(node)
            ended = clock()
            yield ended - began + self._backward(stretch, kept, clock)
            known |= kept
            for node in stretch.nodes:
                value = known.pop(node)
                if node in stretch.leaves:
                    known[node] = tree_map_only(torch.Tensor, _cut_off, value)

    def _backward(self, stretch: TimedStretch, kept: dict[fx.Node, Any], clock: Clock) -> float:
        made = _in_graphs(self.env[node] for node in stretch.leaves)
        return _backward(made, [*_in_graphs(kept.values()), *stretch.params], clock)


def _backward(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], clock: Clock) -> float:
    """Seconds; nothing, if nobody wants a gradient."""
    if not made or not wanted:
        return 0.0
    ones = [torch.ones_like(tensor) for tensor in made]
    began = clock()
    torch.autograd.grad(made, wanted, ones, allow_unused=True)
    return clock() - began


def _stretches(chain: FxPartition) -> tuple[list[fx.Node], list[TimedStretch]]:
    """What every stage computes for itself, and what comes with each link."""
    common, rows = chain.by_link()
    found = []
    for link, nodes in zip(chain.links, rows, strict=True):
        own = set(nodes)
        used = dict.fromkeys(before for node in nodes for before in node.all_input_nodes)
        arrives = [node for node in used if node not in own and node not in common]
        leaves = [node for node in nodes if any(user not in own for user in node.users)]
        trained = list(dict.fromkeys(p for p in link.params if p.requires_grad))
        found.append(TimedStretch(nodes, arrives, leaves, trained))
    return common, found


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """The same without the graph that made it. It wants a gradient if it did before."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _as_made(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that may be written over, as autograd does not allow for what nobody has computed."""
    return tensor.clone() if tensor.requires_grad else tensor


def _in_graphs(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
