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
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from unisono.errors import LoopError
from unisono.parallel.balance import Row, balance

MAKERS = ("arange", "zeros", "ones", "full", "empty", "linspace", "tensor")
"""torch's functions that make a tensor of nothing but numbers: fx does not notice by itself when these follow from an
input."""

ALIKE = 0.05
"""Stages whose times differ by no more than this share are alike: so far do clocks stray on a busy machine."""


@dataclass
class Piece:
    """What one stage computes: these nodes, in order. `receives` come from the stage before it, `sends` go on."""

    nodes: list[fx.Node] = field(default_factory=list)
    receives: list[fx.Node] = field(default_factory=list)
    sends: list[fx.Node] = field(default_factory=list)


@dataclass
class Link:
    """A module that is called, with the parameters that come into use with it, and what it costs: a number of
    parameters, or nanoseconds."""

    node: fx.Node
    params: list[nn.Parameter]
    cost: int = 0

    @property
    def name(self) -> str:
        return str(self.node.target)


class Chain:
    """A model's forward, followed.

    links  the modules that are called, in order; a stage begins with one of them
    timed  are their costs times (parallel/cost.py), or else numbers of parameters?
    """

    timed = False

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.signature = inspect.signature(model.forward)
        self.defaults = {
            name: p.default for name, p in self.signature.parameters.items() if p.default is not inspect.Parameter.empty
        }
        self.graph = self._follow(model)
        self._deep: set[fx.Node] = set()
        self.links = self._links(model)

    def _follow(self, model: nn.Module) -> fx.Graph:
        first: Exception | None = None
        for opened in (set(_opened(model)), {model}):  # what cannot be entered may be a link as it is
            try:
                with _noticed_makers():
                    return _Tracer(opened).trace(model, concrete_args=dict(self.defaults))
            except Exception as error:
                first = first or error
        raise LoopError(
            f"run.place was given a {self.name}, to be cut into the stages of a pipeline.",
            f"Its forward cannot be followed without data: {str(first).splitlines()[0]}",
            "make it a chain of modules (nn.Sequential, or embedding, a ModuleList of blocks, head), and put what "
            "looks into tensors inside of one of them.",
        ) from first

    def _links(self, model: nn.Module) -> list[Link]:
        links: list[Link] = []
        loose: list[nn.Parameter] = []  # that were used by no module, before the first one was called
        seen: set[nn.Module] = set()
        for node in self.graph.nodes:
            parameter = _attribute(model, str(node.target)) if node.op == "get_attr" else None
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                params = list(module.parameters())
                cost = 0 if module in seen else _cost(module)
                seen.add(module)
                links.append(Link(node, loose + params, cost))
                loose = []
            elif isinstance(parameter, nn.Parameter):
                (links[-1].params if links else loose).append(parameter)
            elif node.op in ("placeholder", "output", "get_attr") or not any(
                before in self._deep for before in node.all_input_nodes
            ):
                continue
            self._deep.add(node)
        return links

    def begins(self, stages: int, names: Sequence[str]) -> list[int]:
        """The number of the link with which each stage begins: as named, or so that the dearest stage is cheap."""
        with_weights = sum(any(p.requires_grad for p in link.params) for link in self.links)
        if with_weights < stages:
            raise LoopError(
                f"A pipeline of {stages} stages was asked for.",
                f"{self.name} is a chain of {len(self.links)} modules, of which {with_weights} have parameters that "
                "train; every stage needs one.",
                f"--set parallel.pipeline={max(1, with_weights)}"
                + (
                    ", or a schedule with one stage for each process: --set parallel.schedule=1F1B" * (with_weights > 1)
                ),
            )
        found = self._named(stages, names) if names else self._balanced(stages)
        for stage, (first, end) in enumerate(zip(found, [*found[1:], len(self.links)], strict=True)):
            if not any(p.requires_grad for link in self.links[first:end] for p in link.params):
                raise LoopError(
                    f"parallel.stages = {list(names)} was asked for.",
                    f"Stage {stage} would have no parameter that trains.",
                    "name other modules to begin with, or none: --set 'parallel.stages=[]'",
                )
        return found

    def _named(self, stages: int, names: Sequence[str]) -> list[int]:
        found = [0]
        for name in names:
            places = (i for i, link in enumerate(self.links) if f"{link.name}.".startswith(f"{name}."))
            found.append(next(places, -1))
        if len(found) != stages or sorted(set(found)) != found:
            known = ", ".join(dict.fromkeys(link.name for link in self.links[1:]))
            raise LoopError(
                f"parallel.stages = {list(names)} was asked for, for {stages} stages.",
                f"{stages - 1} modules are to be named in the order in which {self.name} calls them: {known}.",
                "name these, or none: --set 'parallel.stages=[]'",
            )
        return found

    def _balanced(self, stages: int) -> list[int]:
        trains = [any(p.requires_grad for p in link.params) for link in self.links]
        row = Row([link.cost for link in self.links], trains, self._widths())
        return balance(row, stages, ALIKE if self.timed else 0.0)

    def price(self, seconds: Sequence[float]) -> None:
        """From now on each link costs so much time."""
        self.timed = True
        for link, taken in zip(self.links, seconds, strict=True):
            link.cost = round(taken * 1e9)

    def shares(self, begins: Sequence[int]) -> list[float]:
        """How much of the cost of all links each stage has."""
        costs = [
            sum(link.cost for link in self.links[first:end])
            for first, end in zip(begins, [*begins[1:], len(self.links)], strict=True)
        ]
        return [cost / max(1, sum(costs)) for cost in costs]

    def _widths(self) -> list[int]:
        """How many tensors cross where each link begins."""
        place = {node: number for number, node in enumerate(self.graph.nodes)}
        starts = [place[link.node] for link in self.links]
        last = {node: max([place[user] for user in node.users], default=-1) for node in self._deep}
        return [0, *(sum(place[node] < start <= last[node] for node in self._deep) for start in starts[1:])]

    def pieces(self, begins: Sequence[int]) -> list[Piece]:
        """What each stage computes, if the stages begin with these links."""
        starts = {self.links[first].node: stage for stage, first in enumerate(begins)}
        home: dict[fx.Node, int] = {}
        pieces, now = [Piece() for _ in begins], 0
        for node in self.graph.nodes:
            now = starts.get(node, now)
            if node in self._deep:
                home[node] = now
            elif node.op == "output":
                home[node] = len(begins) - 1
        needed: list[set[fx.Node]] = [set() for _ in begins]
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

    def stretches(self) -> tuple[list[fx.Node], list[list[fx.Node]]]:
        """What every stage computes for itself; and link by link, what would be its own if it were a stage."""
        pieces = self.pieces(range(len(self.links)))
        used = {node for piece in pieces for node in piece.nodes if node.op != "output"}
        common = [node for node in self.graph.nodes if node in used - self._deep]
        return common, [[node for node in piece.nodes if node in self._deep] for piece in pieces]

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
        return bound


def compute(
    model: nn.Module, piece: Piece, inputs: dict[str, Any], received: Sequence[Any]
) -> tuple[Any, list[torch.Tensor]]:
    """One stage's part of the model's forward: its output, if this is the last stage, and what goes to the next."""
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
    for node in piece.sends:
        if not isinstance(known[node], torch.Tensor):
            raise LoopError(
                "A stage of a pipeline was to hand on what it had computed.",
                f"{node.name} is of class {type(known[node]).__name__}: only tensors travel.",
                "let a stage begin elsewhere (--set 'parallel.stages=[...]'), or take it apart in the same module.",
            )
    return output, [known[node] for node in piece.sends]


def _cost(module: nn.Module) -> int:
    """What a module's forward pass costs: a multiplication for each parameter, and nothing for looking one up."""
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    return sum(p.numel() for p in module.parameters() if id(p) not in looked_up)


def _attribute(model: nn.Module, path: str) -> Any:
    *modules, name = path.split(".")
    found: Any = model.get_submodule(".".join(modules))
    return getattr(found, name)


class _Tracer(fx.Tracer):
    """Follows a forward into what merely contains a row of layers, and no further."""

    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[nn.Module]) -> None:
        super().__init__()
        self.opened = opened
        self.modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:  # fx would leave it out without a word
            raise ValueError("it computes under torch.no_grad, or under an autocast of its own, between its modules")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.opened


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _opened(module: nn.Module, *, link: bool = False) -> Iterator[nn.Module]:
    """This module, and those of its parts which merely contain rows; `link`: it is one of several alike in a row."""
    container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    if link and not container:
        return
    yield module
    count = Counter(type(part) for part in module.children() if next(part.parameters(), None) is not None)
    for part in module.children():
        row = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if row or any(isinstance(inner, nn.Sequential | nn.ModuleList) and len(inner) > 1 for inner in part.modules()):
            yield from _opened(part, link=container and count[type(part)] > 1)


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
