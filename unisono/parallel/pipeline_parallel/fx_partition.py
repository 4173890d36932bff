"""Partition a model by tracing: torch.fx finds the computation of each stage of a pipeline, and its messages.

torch.fx traces the model's own forward once, without data, from one call of a module to the next:

    tokens --embed--> x --block 0--> x --block 1--> x --norm--> x --head--> logits
       `--shape--> length --slice of a buffer--> cos ----^

Each stage computes for itself all values that depend on inputs and buffers alone (lengths, masks, rotary angles),
because each stage has the batch. Everything else belongs to the stage of the module that was called last before it.
Results that later stages need are sent from stage to stage; mostly that is one tensor, the x above.

The modules that are called stay the same objects, with their hooks, modes and names, and so do the modules in them.
torch.distributed.pipelining has a tracer of its own. It is based on torch.export, needs an example batch, and its
result holds for batches of that shape and mode only.

Python's decisions between the modules are fixed by the trace. So a forward that differs in eval mode, or draws random
numbers there, is not traced (shadow_partition.py runs it). An attribute that it has read must not change later.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from unisono.errors import LoopError
from unisono.parallel.pipeline_parallel.fx_guards import IN_PLACE, GuardedProxy, TraceGuards
from unisono.parallel.pipeline_parallel.partition import (
    LocalStages,
    Partition,
    PartitionLink,
    StageInput,
    Tensors,
    called_alone_error,
    cost_of,
    unwrapped,
)
from unisono.torch_compat.modules import module_slots, parameter_slots

MAKERS = ("arange", "zeros", "ones", "full", "empty", "linspace", "tensor")
"""Functions of torch that make a tensor from numbers. fx does not detect by itself that a number is a proxy."""


@dataclass
class FxPiece:
    """The part of a graph that one stage computes.

    Attributes:
        nodes: The nodes that it computes, in order.
        receives: The values that the stage before it sends.
        sends: The values that it sends to the next stage.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    receives: list[fx.Node] = field(default_factory=list)
    sends: list[fx.Node] = field(default_factory=list)


class CannotTrace(Exception):
    """A forward cannot be traced without data."""


class FxPartition(Partition):
    """A partition whose forward is traced.

    Raises:
        CannotTrace: The forward cannot be traced.

    Attributes:
        graph: The trace.
        pieces: The part of each stage, once the partition is applied.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.signature = inspect.signature(model.forward)
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in self.signature.parameters.values()):
            raise CannotTrace("its forward takes any number of arguments")
        self.defaults = {
            name: p.default for name, p in self.signature.parameters.items() if p.default is not inspect.Parameter.empty
        }
        self._attributes_read: list[tuple[nn.Module, str, Any]] = []  # and their values in the trace
        self.guards = TraceGuards()
        self.graph = self._trace(model)
        self._staged: set[fx.Node] = set()
        self._calls: list[fx.Node] = []  # of the links
        self.links = self._links(model)
        self.pieces: list[FxPiece] = []

    def _trace(self, model: nn.Module) -> fx.Graph:
        within = list(unwrapped(model))
        before = _rng_states()

        def trace() -> fx.Graph:
            with _traced_makers():
                return _Tracer(set(within), self.guards).trace(model, concrete_args=dict(self.defaults))

        try:
            with _recorded_reads(within) as read, self.guards.watching():
                graph = trace()
            with _other_mode(model), torch.set_grad_enabled(not torch.is_grad_enabled()):
                other = trace()
        except Exception as error:
            raise CannotTrace((str(error) or type(error).__name__).splitlines()[0]) from error
        if self.guards.asks_none and self.guards.unused:
            names = ", ".join(sorted({attribute.attr for attribute in self.guards.unused.values()}))
            raise CannotTrace(f"it asks whether something is None, and looks at {names}")
        if self.guards.problem:
            raise CannotTrace(self.guards.problem)
        if before != _rng_states():
            raise CannotTrace("it draws random numbers between its modules")
        if str(graph) != str(other):
            raise CannotTrace("it computes something else in eval mode, or without gradients")
        self._attributes_read = [(part, name, _comparable(vars(part)[name])) for part, name in read]
        return graph

    def _check_attributes(self) -> None:
        """Raise LoopError if an attribute that was read in the trace has changed."""
        for part, name, was in self._attributes_read:
            if (now := _comparable(vars(part).get(name))) != was:
                raise LoopError(
                    f"{type(part).__name__}.{name} has changed since the model was partitioned: it is {now} now.",
                    f"It was {was} when the forward of {self.name} was traced for a pipeline, which has read it.",
                    "keep a value that changes in a buffer (self.register_buffer), or read it within a layer; or "
                    "--set parallel.pipeline=1.",
                )

    def _links(self, model: nn.Module) -> list[PartitionLink]:
        links: list[PartitionLink] = []
        early: list[nn.Parameter] = []  # used between modules, before the first one is called
        seen: set[nn.Module] = set()
        for node in self.graph.nodes:
            parameter = _attribute(model, str(node.target)) if node.op == "get_attr" else None
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                params = list(module.parameters())
                cost = 0 if module in seen else cost_of(module)
                seen.add(module)
                links.append(PartitionLink(str(node.target), early + params, cost))
                self._calls.append(node)
                early = []
            elif isinstance(parameter, nn.Parameter):
                (links[-1].params if links else early).append(parameter)
            elif node.op in ("placeholder", "output", "get_attr") or not any(
                before in self._staged for before in node.all_input_nodes
            ):
                if _writes(node):
                    raise CannotTrace(f"{node.name} changes in place what follows from its inputs")
                continue
            self._staged.add(node)
        return links

    def _widths(self) -> list[int]:
        place = {node: number for number, node in enumerate(self.graph.nodes)}
        starts = [place[node] for node in self._calls]
        last = {node: max([place[user] for user in node.users], default=-1) for node in self._staged}
        return [0, *(sum(place[node] < start <= last[node] for node in self._staged) for start in starts[1:])]

    def split(self, starts: Sequence[int]) -> list[FxPiece]:
        """Return the part of each stage, if stages start with these links."""
        first_calls = {self._calls[first]: stage for stage, first in enumerate(starts)}
        home: dict[fx.Node, int] = {}
        pieces, now = [FxPiece() for _ in starts], 0
        for node in self.graph.nodes:
            now = first_calls.get(node, now)
            if node in self._staged:
                home[node] = now
            elif node.op == "output":
                home[node] = len(starts) - 1
        needed: list[set[fx.Node]] = [set() for _ in starts]
        if self.guards.asks_none:  # the code may compare an unused value with None: the first stage checks it
            needed[0] |= {node for node in self.graph.nodes if not node.users and node not in home and _computes(node)}
        for node in reversed(self.graph.nodes):
            stage = home.get(node)
            for s in [stage] if stage is not None else [s for s, nodes in enumerate(needed) if node in nodes]:
                needed[s] |= {node, *node.all_input_nodes}
        for stage, piece in enumerate(pieces):
            later = set().union(*needed[stage + 1 :])
            for node in self.graph.nodes:
                comes_from = home.get(node, stage if node in needed[stage] else None)
                if comes_from == stage:
                    piece.nodes.append(node)
                elif comes_from is not None and comes_from < stage and node in needed[stage] | later:
                    piece.receives.append(node)
                if node in home and home[node] <= stage and node in later:
                    piece.sends.append(node)
        return pieces

    def by_link(self) -> tuple[list[fx.Node], list[list[fx.Node]]]:
        """Return the nodes that every stage computes for itself, and those of each link if it were a stage."""
        pieces = self.split(range(len(self.links)))
        used = {node for piece in pieces for node in piece.nodes if node.op != "output"}
        common = [node for node in self.graph.nodes if node in used - self._staged]
        return common, [[node for node in piece.nodes if node in self._staged] for piece in pieces]

    def apply(self, model: nn.Module, stages: LocalStages) -> None:
        """Replace the modules of other stages by `AbsentModule`."""
        starts, own, kept, _ = stages
        self.pieces = self.split(starts)
        by_stage = self.links_by_stage(starts)
        others = [stage for stage in range(len(starts)) if stage not in own]
        stage_of = {  # our own last: a module may be called twice
            model.get_submodule(link.name): stage for stage in [*others, *own] for link in by_stage[stage]
        }
        gone = {
            part: stage
            for part, stage in stage_of.items()
            if stage not in own and not any(id(p) in kept for p in part.parameters())
        }
        for prefix, parent in list(model.named_modules(remove_duplicate=False)):
            slots = module_slots(parent)
            for name, part in list(slots.items()):
                if part in gone:
                    slots[name] = AbsentModule(f"{prefix}.{name}".lstrip("."), gone[part])
        for part in model.modules():
            params = parameter_slots(part)
            for name, p in params.items():
                if p is not None and id(p) not in kept:
                    params[name] = None

    def compute(self, model: nn.Module, stage: int, call: StageInput, received: Tensors) -> tuple[Any, Tensors]:
        call.begin()
        self._check_attributes()
        inputs = self.bind(call.args, call.kwargs)
        return compute(model, self.pieces[stage], inputs, received, self._none_error if self.guards.asks_none else None)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name. Raise LoopError if one differs from a default in the trace."""
        bound = self.signature.bind(*args, **kwargs).arguments
        other = [name for name, value in bound.items() if name in self.defaults and value is not self.defaults[name]]
        if other:
            raise LoopError(
                f"{self.name} was called with {' and '.join(other)}, which have a default.",
                "It was traced for a pipeline with the defaults of these arguments.",
                "pass only arguments without a default, or remove the default from its forward's signature.",
            )
        nones = [name for name, value in bound.items() if value is None and name not in self.defaults]
        if nones and self.guards.asks_none:
            raise self._none_error(" and ".join(nones))
        return bound

    def _none_error(self, what: str) -> LoopError:
        return LoopError(
            f"{self.name} was called with {what} = None, which its trace does not cover.",
            "Its forward asks whether a value is None. It was traced for a pipeline as if only arguments with this "
            "default were.",
            "give it a default in forward's signature (mask=None), or let a layer ask; or --set parallel.pipeline=1.",
        )


def compute(
    model: nn.Module,
    piece: FxPiece,
    inputs: dict[str, Any],
    received: Sequence[Any],
    none_error: Callable[[str], LoopError] | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """Compute one stage's part of the model's forward.

    Args:
        model: The model.
        piece: The stage's part of the graph.
        inputs: The arguments of the model, by name.
        received: The tensors that the stage before has sent.
        none_error: Returns the error to raise if a result is None; None: results may be None.

    Returns:
        The model's output, if this is the last stage; and the tensors for the next stage.
    """
    known: dict[fx.Node, Any] = dict(zip(piece.receives, received, strict=True))
    output: Any = None

    def value(argument: Any) -> Any:
        return fx.node.map_arg(argument, known.__getitem__)

    for node in piece.nodes:
        args, kwargs = value(node.args), value(node.kwargs)
        match node.op:
            case "placeholder":
                known[node] = inputs.get(str(node.target))
            case "get_attr":
                known[node] = _attribute(model, str(node.target))
            case "call_module":
                known[node] = model.get_submodule(str(node.target))(*args, **kwargs)
            case "call_method":
                known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case "call_function":
                assert callable(node.target)
                known[node] = node.target(*args, **kwargs)
            case "output":
                output = args[0]
        if none_error is not None and _computes(node) and known[node] is None:
            raise none_error(node.name)
    for node in piece.sends:
        if not isinstance(known[node], torch.Tensor):
            raise LoopError(
                f"A stage of a pipeline cannot send a {type(known[node]).__name__} to the next.",
                f"Only tensors are sent, and {node.name} is none.",
                "let a stage start elsewhere (--set 'parallel.split_points=[...]'), or unpack it in the same module.",
            )
    return output, [known[node] for node in piece.sends]


def _writes(node: fx.Node) -> bool:
    """Return whether a node writes in place. A stage that uses the result could miss the write in another stage."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":  # which has and_ and or_
        return name in IN_PLACE
    return node.op.startswith("call_") and ((name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs)


def _computes(node: fx.Node) -> bool:
    """Return whether a node computes a value; checks of arguments with defaults do not."""
    return node.op.startswith("call_") and getattr(node.target, "__name__", "") not in ("_assert_is_none", "_assert")


def _attribute(model: nn.Module, path: str) -> Any:
    *modules, name = path.split(".")
    found: Any = model.get_submodule(".".join(modules))
    return getattr(found, name)


class AbsentModule(nn.Module):
    """Replace a module of another stage."""

    def __init__(self, name: str, stage: int) -> None:
        super().__init__()
        self.name, self.stage = name, stage

    def extra_repr(self) -> str:
        return f"in stage {self.stage}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise called_alone_error(self.name, self.stage)


class _Tracer(fx.Tracer):
    """Trace a forward into modules that merely contain a row of layers, and no deeper."""

    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[nn.Module], guards: TraceGuards) -> None:
        super().__init__()
        self.opened, self.guards = opened, guards
        self.modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return GuardedProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:  # fx would leave it out without an error
            raise ValueError("it computes under torch.no_grad, or under an autocast of its own, between its modules")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.opened


def _comparable(value: Any) -> Any:
    """Return a value by which to compare an attribute's value: its content, or the object."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    return repr(value) if isinstance(value, list | tuple | dict | set) else id(value)


def _rng_states() -> tuple[Any, ...]:
    """Return the states of the random number generators."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state(legacy=False))


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """Switch the model from train to eval mode within this block, or from eval to train mode."""
    modes = {part: part.training for part in model.modules()}
    model.train(not model.training)
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def _recorded_reads(modules: Collection[nn.Module]) -> Iterator[list[tuple[nn.Module, str]]]:
    """Record which attributes of these modules are read within this block, other than tensors and modules."""
    read: dict[tuple[nn.Module, str], None] = {}
    kinds = {part: type(part) for part in modules}
    noted: list[tuple[nn.Module, str]] = []
    try:
        for part, kind in kinds.items():

            def note(self: nn.Module, name: str) -> Any:
                value = object.__getattribute__(self, name)
                held = object.__getattribute__(self, "__dict__")
                if name in held and name not in MODULE_ATTRIBUTES:
                    read[self, name] = None
                return value

            part.__class__ = type(kind.__name__, (kind,), {"__getattribute__": note})
        yield noted
        noted += read
    finally:
        for part, kind in kinds.items():
            part.__class__ = kind


MODULE_ATTRIBUTES = {*vars(nn.Module())}
"""Attributes that every module has: for tensors, modules and hooks, and its mode."""


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


@contextmanager
def _traced_makers() -> Iterator[None]:
    """Trace calls such as torch.arange(length) within this block, if `length` follows from an input."""

    def traced(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def call(*args: Any, **kwargs: Any) -> Any:
            proxy = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)), None)
            if proxy is None:
                return make(*args, **kwargs)
            return proxy.tracer.create_proxy("call_function", make, args, kwargs)

        return call

    kept = {name: getattr(torch, name) for name in MAKERS}
    try:
        for name, make in kept.items():
            setattr(torch, name, traced(make))
        yield
    finally:
        for name, make in kept.items():
            setattr(torch, name, make)
