"""A model as a chain that can be cut: what each stage of a pipeline computes, and what goes from one to the next.

torch.fx follows the model's own forward once, without data, from one call of a module to the next:

    tokens --embed--> x --block 0--> x --block 1--> x --norm--> x --head--> logits
       `--shape--> length --slice of a buffer--> cos ----^

What follows from the inputs and from buffers alone (lengths, masks, rotary angles) every stage computes for itself,
since every stage sees the batch. All else belongs to the stage of the module that was called last before it. What a
later stage needs of it crosses, from stage to stage; mostly that is one tensor, the x above.

The modules that are called keep their identity (their hooks, their mode, their names), as those of a block do, which is
one link. torch.distributed.pipelining has a tracer of its own; it is based on torch.export, needs an example batch,
and holds for batches of this one shape and mode.

What Python decides between these modules is settled when it is followed, so nothing may depend on it: a forward that is
another one in eval mode, or that draws random numbers there, is not followed (but run: shadow_partition.py), and when
an attribute that it has read has another value later, that is an error.
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
from unisono.parallel.pipeline_parallel.fx_guards import WRITES, GuardedProxy, TraceGuards
from unisono.parallel.pipeline_parallel.partition import (
    Partition,
    PartitionLink,
    StageInput,
    Tensors,
    called_alone,
    cost_of,
    unwrapped,
)

MAKERS = ("arange", "zeros", "ones", "full", "empty", "linspace", "tensor")
"""torch's functions that make a tensor of nothing but numbers: fx does not notice by itself when these follow from an
input."""


@dataclass
class FxPiece:
    """What one stage computes: these nodes, in order. `receives` come from the stage before it, `sends` go on."""

    nodes: list[fx.Node] = field(default_factory=list)
    receives: list[fx.Node] = field(default_factory=list)
    sends: list[fx.Node] = field(default_factory=list)


class CannotTrace(Exception):
    """A forward that torch.fx does not get through without data."""


class FxPartition(Partition):
    """A model's forward, followed. Raises CannotFollow."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.signature = inspect.signature(model.forward)
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in self.signature.parameters.values()):
            raise CannotTrace("its forward takes any number of arguments")
        self.defaults = {
            name: p.default for name, p in self.signature.parameters.items() if p.default is not inspect.Parameter.empty
        }
        self._read: list[tuple[nn.Module, str, Any]] = []  # attributes that the forward has read
        self.asked = TraceGuards()
        self.graph = self._follow(model)
        self._deep: set[fx.Node] = set()
        self._calls: list[fx.Node] = []  # of the links
        self.links = self._links(model)
        self.cut: list[FxPiece] = []

    def _follow(self, model: nn.Module) -> fx.Graph:
        within = list(unwrapped(model))
        before = _dice()

        def follow() -> fx.Graph:
            with _noticed_makers():
                return _Tracer(set(within), self.asked).trace(model, concrete_args=dict(self.defaults))

        try:
            with _noted_reads(within) as read, self.asked.watching():
                graph = follow()
            with _otherwise(model), torch.set_grad_enabled(not torch.is_grad_enabled()):
                other = follow()
        except Exception as error:
            raise CannotTrace((str(error) or type(error).__name__).splitlines()[0]) from error
        if self.asked.nones and self.asked.loose:
            names = ", ".join(sorted({attribute.attr for attribute in self.asked.loose.values()}))
            raise CannotTrace(f"it asks whether something is None, and looks at {names}")
        if self.asked.why:
            raise CannotTrace(self.asked.why)
        if before != _dice():
            raise CannotTrace("it draws random numbers between its modules")
        if str(graph) != str(other):
            raise CannotTrace("it computes something else in eval mode, or without gradients")
        self._read = [(part, name, _settled(vars(part)[name])) for part, name in read]
        return graph

    def _check_read(self) -> None:
        """What Python read while the forward was followed must still be so."""
        for part, name, was in self._read:
            if (now := _settled(vars(part).get(name))) != was:
                raise LoopError(
                    f"{self.name} was called, and {type(part).__name__}.{name} is {now} now.",
                    f"It was {was} when the model was cut into the stages of a pipeline, and its forward has read it.",
                    "keep what changes in a buffer (self.register_buffer), or read it within a layer; or "
                    "--set parallel.pipeline=1.",
                )

    def _links(self, model: nn.Module) -> list[PartitionLink]:
        links: list[PartitionLink] = []
        loose: list[nn.Parameter] = []  # that were used by no module, before the first one was called
        seen: set[nn.Module] = set()
        for node in self.graph.nodes:
            parameter = _attribute(model, str(node.target)) if node.op == "get_attr" else None
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                params = list(module.parameters())
                cost = 0 if module in seen else cost_of(module)
                seen.add(module)
                links.append(PartitionLink(str(node.target), loose + params, cost))
                self._calls.append(node)
                loose = []
            elif isinstance(parameter, nn.Parameter):
                (links[-1].params if links else loose).append(parameter)
            elif node.op in ("placeholder", "output", "get_attr") or not any(
                before in self._deep for before in node.all_input_nodes
            ):
                if _writes(node):
                    raise CannotTrace(f"{node.name} changes in place what follows from its inputs")
                continue
            self._deep.add(node)
        return links

    def _widths(self) -> list[int]:
        place = {node: number for number, node in enumerate(self.graph.nodes)}
        starts = [place[node] for node in self._calls]
        last = {node: max([place[user] for user in node.users], default=-1) for node in self._deep}
        return [0, *(sum(place[node] < start <= last[node] for node in self._deep) for start in starts[1:])]

    def pieces(self, begins: Sequence[int]) -> list[FxPiece]:
        """What each stage computes, if the stages begin with these links."""
        starts = {self._calls[first]: stage for stage, first in enumerate(begins)}
        home: dict[fx.Node, int] = {}
        pieces, now = [FxPiece() for _ in begins], 0
        for node in self.graph.nodes:
            now = starts.get(node, now)
            if node in self._deep:
                home[node] = now
            elif node.op == "output":
                home[node] = len(begins) - 1
        needed: list[set[fx.Node]] = [set() for _ in begins]
        if self.asked.nones:  # what nobody uses may have been asked whether it is None: the first stage sees that
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
        """What every stage computes for itself; and link by link, what would be its own if it were a stage."""
        pieces = self.pieces(range(len(self.links)))
        used = {node for piece in pieces for node in piece.nodes if node.op != "output"}
        common = [node for node in self.graph.nodes if node in used - self._deep]
        return common, [[node for node in piece.nodes if node in self._deep] for piece in pieces]

    def settle(self, model: nn.Module, begins: Sequence[int], ours: Collection[int], kept: Collection[int]) -> None:
        """Modules that other stages call leave an `AbsentModule` behind."""
        self.cut = self.pieces(begins)
        stretches = self.stretches(begins)
        others = [stage for stage in range(len(begins)) if stage not in ours]
        stage_of = {  # ours last: a module may be called twice
            model.get_submodule(link.name): stage for stage in [*others, *ours] for link in stretches[stage]
        }
        gone = {
            part: stage
            for part, stage in stage_of.items()
            if stage not in ours and not any(id(p) in kept for p in part.parameters())
        }
        for prefix, parent in list(model.named_modules(remove_duplicate=False)):
            for name, part in list(parent._modules.items()):
                if part in gone:
                    parent._modules[name] = AbsentModule(f"{prefix}.{name}".lstrip("."), gone[part])
        for part in model.modules():
            for name, p in part._parameters.items():
                if p is not None and id(p) not in kept:
                    part._parameters[name] = None

    def compute(self, model: nn.Module, stage: int, call: StageInput, received: Tensors) -> tuple[Any, Tensors]:
        call.begin()
        self._check_read()
        inputs = self.bind(call.args, call.kwargs)
        return compute(model, self.cut[stage], inputs, received, self._none if self.asked.nones else None)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with, by name. Raises LoopError for what was left at its default when it was cut."""
        bound = self.signature.bind(*args, **kwargs).arguments
        other = [name for name, value in bound.items() if name in self.defaults and value is not self.defaults[name]]
        if other:
            raise LoopError(
                f"{self.name} was called with {' and '.join(other)}.",
                "It was cut into the stages of a pipeline as it is when these have their defaults.",
                "call it with what has no default only, or leave the default out of its forward's signature.",
            )
        nones = [name for name, value in bound.items() if value is None and name not in self.defaults]
        if nones and self.asked.nones:
            raise self._none(" and ".join(nones))
        return bound

    def _none(self, what: str) -> LoopError:
        return LoopError(
            f"{self.name} was called, and {what} is None.",
            "Its forward asks whether something is None, and it was cut into the stages of a pipeline as it is when "
            "only what has this default is.",
            "give it a default in forward's signature (mask=None), or let a layer ask; or --set parallel.pipeline=1.",
        )


def compute(
    model: nn.Module,
    piece: FxPiece,
    inputs: dict[str, Any],
    received: Sequence[Any],
    none: Callable[[str], LoopError] | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """One stage's part of the model's forward: its output, if this is the last stage, and what goes to the next.

    none  what to raise if something computed is None; None: that is as good as any other value
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
        if none is not None and _computes(node) and known[node] is None:
            raise none(node.name)
    for node in piece.sends:
        if not isinstance(known[node], torch.Tensor):
            raise LoopError(
                "A stage of a pipeline was to hand on what it had computed.",
                f"{node.name} is of class {type(known[node]).__name__}: only tensors travel.",
                "let a stage begin elsewhere (--set 'parallel.split_points=[...]'), or take it apart in the same "
                "module.",
            )
    return output, [known[node] for node in piece.sends]


def _writes(node: fx.Node) -> bool:
    """Does it change something in place? (A stage that needs it may not see that it needs this.)"""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":  # which has and_ and or_
        return name in WRITES
    return node.op.startswith("call_") and ((name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs)


def _computes(node: fx.Node) -> bool:
    """Does it make a value, other than of an argument that has its default?"""
    return node.op.startswith("call_") and getattr(node.target, "__name__", "") not in ("_assert_is_none", "_assert")


def _attribute(model: nn.Module, path: str) -> Any:
    *modules, name = path.split(".")
    found: Any = model.get_submodule(".".join(modules))
    return getattr(found, name)


class AbsentModule(nn.Module):
    """A module that another stage has."""

    def __init__(self, name: str, stage: int) -> None:
        super().__init__()
        self.name, self.stage = name, stage

    def extra_repr(self) -> str:
        return f"in stage {self.stage}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise called_alone(self.name, self.stage)


class _Tracer(fx.Tracer):
    """Follows a forward into what merely contains a row of layers, and no further."""

    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[nn.Module], asked: TraceGuards) -> None:
        super().__init__()
        self.opened, self.asked = opened, asked
        self.modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return GuardedProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:  # fx would leave it out without a word
            raise ValueError("it computes under torch.no_grad, or under an autocast of its own, between its modules")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.opened


def _settled(value: Any) -> Any:
    """What is compared of an attribute: its content, or which object it is."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    return repr(value) if isinstance(value, list | tuple | dict | set) else id(value)


def _dice() -> tuple[Any, ...]:
    """Where the random number generators stand."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state(legacy=False))


@contextmanager
def _otherwise(model: nn.Module) -> Iterator[None]:
    """In it, the model is in eval mode if it is not, and the other way round."""
    modes = {part: part.training for part in model.modules()}
    model.train(not model.training)
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def _noted_reads(modules: Collection[nn.Module]) -> Iterator[list[tuple[nn.Module, str]]]:
    """In it, attributes of these modules that are read are noted: those that are no tensors and no modules."""
    read: dict[tuple[nn.Module, str], None] = {}
    kinds = {part: type(part) for part in modules}
    noted: list[tuple[nn.Module, str]] = []
    try:
        for part, kind in kinds.items():

            def note(self: nn.Module, name: str) -> Any:
                value = object.__getattribute__(self, name)
                held = object.__getattribute__(self, "__dict__")
                if name in held and name not in OURS:
                    read[self, name] = None
                return value

            part.__class__ = type(kind.__name__, (kind,), {"__getattribute__": note})
        yield noted
        noted += read
    finally:
        for part, kind in kinds.items():
            part.__class__ = kind


OURS = {*vars(nn.Module())}
"""What every module has: those of tensors and modules, hooks, and its mode."""


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


@contextmanager
def _noticed_makers() -> Iterator[None]:
    """While a forward is followed: torch.arange(length) is noted down when `length` follows from an input."""

    def noticed(make: Callable[..., Any]) -> Callable[..., Any]:
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
            setattr(torch, name, noticed(make))
        yield
    finally:
        for name, make in kept.items():
            setattr(torch, name, make)
