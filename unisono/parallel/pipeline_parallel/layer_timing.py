"""Measure the cost of each link of a partition: the time of its forward and backward.

    forward  0 --x--> forward  1 --x--> forward  2 --x--> ...          x is detached from the graph that made it, so a
    backward 0        backward 1        backward 2                     link runs backward at once, and frees its graph

All links are timed once before any is timed again, so that other load on the machine affects all of them. The cost of
a link is the median of its rounds. On a CPU it is the processor time of this process (`clock_of`).

Gradients are returned and not accumulated, so p.grad does not change. The gradients of outputs are ones, because the
time does not depend on their values. The loss, the optimizer and the values that every stage computes for itself
(masks, positions) are not timed.
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
"""Rounds that do not count: they allocate memory, choose kernels and compile layers."""

ROUNDS = 9
"""Rounds that count. The number is fixed, because processes that share a layer's matrices must run the same number."""

Clock = Callable[[], float]
"""Returns seconds, of which only differences have a meaning."""

Inputs = dict[str, Any]
"""The arguments of a model's forward, by name."""


@dataclass
class TimedLink:
    """A link, and the computation between it and the next one.

    Attributes:
        nodes: Its nodes in the graph.
        inputs: The values of earlier links that it uses.
        outputs: The values that later links use, or the model returns.
        params: The trained parameters.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    params: list[nn.Parameter]


def clock_of(device: torch.device, *, shared: bool) -> Clock:
    """Return the clock to time layers with.

    On a CPU with one thread it is the processor time of this process, which other processes on a busy machine do not
    change. With several threads, or if processes wait for each other's parts, it is wall-clock time. On an
    accelerator it waits until the device is done.

    Args:
        device: The device.
        shared: Whether several processes compute the layers together.
    """
    if device.type == "cpu":
        return time.perf_counter if shared or torch.get_num_threads() > 1 else time.process_time
    accelerator = torch.get_device_module(device)

    def synchronized() -> float:
        accelerator.synchronize(device)
        return time.perf_counter()

    return synchronized


def seconds_of_links(
    model: nn.Module, partition: FxPartition, inputs: Inputs, clock: Clock, autocast: AbstractContextManager[Any]
) -> list[float]:
    """Return the seconds that each link takes, forward and backward.

    It draws random numbers, and buffers may change; the caller restores them.

    Args:
        model: The model.
        partition: Its partition.
        inputs: The model's inputs, on its device, as `bind` of the partition returns them.
        clock: A clock of `clock_of`.
        autocast: The context in which the forward computes; it is entered for each link.
    """
    common, timed_links = _timed_links(partition)
    interpreter = _TimedInterpreter(model, garbage_collect_values=False, graph=partition.graph)
    with torch.enable_grad():
        rounds = [
            list(interpreter.time_links(common, timed_links, inputs, clock, autocast)) for _ in range(WARM_UPS + ROUNDS)
        ]
    return [median(times) for times in zip(*rounds[WARM_UPS:], strict=True)]


def seconds_of_modules(
    model: nn.Module,
    links: Sequence[PartitionLink],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    clock: Clock,
    autocast: AbstractContextManager[Any],
) -> list[float]:
    """Return the seconds that each link takes, for a forward that cannot be traced (shadow_partition.py).

    Each module is called by itself, with the arguments of a forward pass of the model. The computation between modules
    is not timed.

    Args:
        model: The model.
        links: The links of its partition.
        args: The arguments of its forward.
        kwargs: The keyword arguments.
        clock: A clock of `clock_of`.
        autocast: The context in which the forward computes.
    """
    calls: list[list[tuple[Any, Any]]] = [[] for _ in links]

    def note(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        calls[number].append(tree_map_only(torch.Tensor, _detached, (args, kwargs)))

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
        rounds = [
            [
                sum(_time_call(part, *call, params, clock, autocast) for call in part_calls)
                for part, part_calls, params in zip(modules, calls, trained, strict=True)
            ]
            for _ in range(WARM_UPS + ROUNDS)
        ]
    return [median(times) for times in zip(*rounds[WARM_UPS:], strict=True)]


def _time_call(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    params: Sequence[nn.Parameter],
    clock: Clock,
    autocast: AbstractContextManager[Any],
) -> float:
    """Return the seconds of one call, forward and backward."""
    inputs = tree_map_only(torch.Tensor, _detached, (args, kwargs))
    args, kwargs = tree_map_only(torch.Tensor, _writable, inputs)
    began = clock()
    with autocast:
        output = module(*args, **kwargs)
    ended = clock()
    outputs, wanted = _in_graphs([output]), [*_in_graphs([inputs]), *params]
    return ended - began + _time_backward(outputs, wanted, clock)


class _TimedInterpreter(fx.Interpreter):
    """Run a graph node by node: https://docs.pytorch.org/docs/stable/fx.html#the-interpreter-pattern."""

    def time_links(
        self,
        common: Sequence[fx.Node],
        timed_links: Sequence[TimedLink],
        inputs: Inputs,
        clock: Clock,
        autocast: AbstractContextManager[Any],
    ) -> Iterator[float]:
        """Yield the seconds of each link."""
        values: dict[fx.Node, Any] = {}
        self.env = values
        copied = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), inputs)  # a layer may overwrite its input
        with autocast:
            for node in common:
                is_input = node.op == "placeholder"
                values[node] = copied.get(str(node.target)) if is_input else self.run_node(node)
        for link in timed_links:
            inputs_of_link = {node: values[node] for node in link.inputs}
            values |= {node: tree_map_only(torch.Tensor, _writable, value) for node, value in inputs_of_link.items()}
            began = clock()
            with autocast:
                for node in link.nodes:
                    values[node] = self.run_node(node)
            ended = clock()
            yield ended - began + self._time_backward(link, inputs_of_link, clock)
            values |= inputs_of_link
            for node in link.nodes:
                value = values.pop(node)
                if node in link.outputs:
                    values[node] = tree_map_only(torch.Tensor, _detached, value)

    def _time_backward(self, link: TimedLink, inputs: dict[fx.Node, Any], clock: Clock) -> float:
        outputs = _in_graphs(self.env[node] for node in link.outputs)
        return _time_backward(outputs, [*_in_graphs(inputs.values()), *link.params], clock)


def _time_backward(outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], clock: Clock) -> float:
    """Return the seconds of a backward pass; 0 if no gradient is wanted."""
    if not outputs or not wanted:
        return 0.0
    ones = [torch.ones_like(tensor) for tensor in outputs]
    began = clock()
    torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    return clock() - began


def _timed_links(partition: FxPartition) -> tuple[list[fx.Node], list[TimedLink]]:
    """Return the nodes that every stage computes for itself, and those that are timed with each link."""
    common, rows = partition.by_link()
    found = []
    for link, nodes in zip(partition.links, rows, strict=True):
        own = set(nodes)
        used = dict.fromkeys(before for node in nodes for before in node.all_input_nodes)
        inputs = [node for node in used if node not in own and node not in common]
        outputs = [node for node in nodes if any(user not in own for user in node.users)]
        trained = list(dict.fromkeys(p for p in link.params if p.requires_grad))
        found.append(TimedLink(nodes, inputs, outputs, trained))
    return common, found


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor from the graph that made it. It requires a gradient if it did before."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that a layer may overwrite; autograd does not allow that for leaves."""
    return tensor.clone() if tensor.requires_grad else tensor


def _in_graphs(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
