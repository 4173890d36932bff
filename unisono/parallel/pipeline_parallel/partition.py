"""Where a model is cut into stages: a row of modules that are called one after the other, and the even cuts of it.

There are two ways to compute what lies between two cuts: fx_partition.py follows the model's forward once and then
knows what belongs where; shadow_partition.py lets every stage run the whole forward, with shadows for what other stages
compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.errors import LoopError
from unisono.parallel.pipeline_parallel.stage_balance import BalancedRow, balanced_partition

ALIKE = 0.05
"""Stages whose times differ by no more than this share are alike: so far do the clocks of busy machines stray."""

Tensors = Sequence[torch.Tensor]


@dataclass
class PartitionLink:
    """A module that is called, with the parameters that come into use with it, and what it costs: a number of
    parameters, or nanoseconds."""

    name: str
    params: list[nn.Parameter]
    cost: int = 0


class StageInput(NamedTuple):
    """A call of the model that is cut.

    forward  the model's own
    begin    is to be called where the stage's own part begins: from there on torch's random numbers are those that the
             stage before it has left
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    begin: Callable[[], None]


class Partition(ABC):
    """A model as a row of links; a stage begins with one of them.

    name   of the model's class
    links  the modules that are called, in order
    timed  are their costs times (layer_timing.py), or else numbers of parameters?
    """

    name: str
    links: list[PartitionLink]
    timed = False

    @abstractmethod
    def _widths(self) -> list[int]:
        """How many tensors cross where each link begins, as far as that is known."""

    @abstractmethod
    def settle(self, model: nn.Module, begins: Sequence[int], ours: Collection[int], kept: Collection[int]) -> None:
        """The stages begin with these links, and some of them are ours: let go of what only others need.

        kept  parameters that stay, by id: those of our stages
        """

    @abstractmethod
    def compute(self, model: nn.Module, stage: int, call: StageInput, received: Tensors) -> tuple[Any, Tensors]:
        """One stage's part of the model's forward: its output, if this is the last stage, and what goes to the next.

        received  what the stage before it has sent
        """

    def users(self, model: nn.Module, begins: Sequence[int]) -> dict[int, list[int]]:
        """The stages that use each parameter, by its id; what belongs to no link is the first stage's."""
        found: dict[int, list[int]] = {id(p): [] for p in model.parameters()}
        for stage, links in enumerate(self.stretches(begins)):
            for key in {id(p) for link in links for p in link.params}:
                found[key].append(stage)
        return {key: stages or [0] for key, stages in found.items()}

    def stretches(self, begins: Sequence[int]) -> list[list[PartitionLink]]:
        """The links of each stage."""
        return [self.links[first:end] for first, end in zip(begins, [*begins[1:], len(self.links)], strict=True)]

    def begins(self, stages: int, names: Sequence[str]) -> list[int]:
        """The number of the link with which each stage begins: as named, or so that the dearest stage is cheap."""
        with_weights = sum(any(p.requires_grad for p in link.params) for link in self.links)
        if with_weights < stages:
            raise LoopError(
                f"A pipeline of {stages} stages was asked for.",
                f"{self.name} is a chain of {len(self.links)} modules, of which {with_weights} have parameters that "
                "train; every stage needs one.",
                f"--set parallel.pipeline={max(1, with_weights)}; or, where a process has several stages, --set "
                "parallel.schedule=1F1B",
            )
        found = self._named(stages, names) if names else self._balanced(stages)
        for stage, (first, end) in enumerate(zip(found, [*found[1:], len(self.links)], strict=True)):
            if not any(p.requires_grad for link in self.links[first:end] for p in link.params):
                raise LoopError(
                    f"parallel.split_points = {list(names)} was asked for.",
                    f"Stage {stage} would have no parameter that trains.",
                    "name other modules to begin with, or none: --set 'parallel.split_points=[]'",
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
                f"parallel.split_points = {list(names)} was asked for, for {stages} stages.",
                f"{stages - 1} modules are to be named in the order in which {self.name} calls them: {known}.",
                "name these, or none: --set 'parallel.split_points=[]'",
            )
        return found

    def _balanced(self, stages: int) -> list[int]:
        trains = [any(p.requires_grad for p in link.params) for link in self.links]
        row = BalancedRow([link.cost for link in self.links], trains, self._widths())
        return balanced_partition(row, stages, ALIKE if self.timed else 0.0)

    def price(self, seconds: Sequence[float]) -> None:
        """From now on each link costs so much time."""
        self.timed = True
        for link, taken in zip(self.links, seconds, strict=True):
            link.cost = round(taken * 1e9)

    def shares(self, begins: Sequence[int]) -> list[float]:
        """How much of the cost of all links each stage has."""
        costs = [sum(link.cost for link in links) for links in self.stretches(begins)]
        return [cost / max(1, sum(costs)) for cost in costs]


def cost_of(module: nn.Module) -> int:
    """What a module's forward pass costs: a multiplication for each parameter, and nothing for looking one up."""
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    return sum(p.numel() for p in module.parameters() if id(p) not in looked_up)


def unwrapped(module: nn.Module, *, link: bool = False) -> Iterator[nn.Module]:
    """This module, and those of its parts which merely contain rows; `link`: it is one of several alike in a row."""
    container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    if link and not container:
        return
    yield module
    count = Counter(type(part) for part in module.children() if next(part.parameters(), None) is not None)
    for part in module.children():
        row = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if row or any(isinstance(inner, nn.Sequential | nn.ModuleList) and len(inner) > 1 for inner in part.modules()):
            yield from unwrapped(part, link=container and count[type(part)] > 1)


def called_alone(name: str, stage: int) -> LoopError:
    return LoopError(
        f"{name} was called by itself.",
        f"It is in stage {stage} of a pipeline, and this process has other stages.",
        "call the whole model, on all processes.",
    )
