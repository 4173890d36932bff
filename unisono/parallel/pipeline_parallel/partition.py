"""Partition a model into stages: a row of modules that are called one after the other, and where it is cut.

There are two ways to compute the part between two cuts. fx_partition.py traces the model's forward once, and assigns
each operation to a stage. shadow_partition.py lets every stage run the whole forward, with tensors without data in
place of the results of other stages.
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

TIMING_TOLERANCE = 0.05
"""The share by which measured times of stages may differ and count as equal: clocks on busy machines are not exact."""

Tensors = Sequence[torch.Tensor]


@dataclass
class PartitionLink:
    """A module that the forward calls, with the parameters whose first use is in it.

    Attributes:
        name: The module's name in the model.
        params: The parameters.
        cost: A number of parameters, or nanoseconds.
    """

    name: str
    params: list[nn.Parameter]
    cost: int = 0


class StageInput(NamedTuple):
    """A call of a partitioned model.

    Attributes:
        forward: The model's own forward.
        args: Its arguments.
        kwargs: Its keyword arguments.
        begin: Called where the stage's own part begins. It sets torch's random number generators to the state in which
            the stage before has left them.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    begin: Callable[[], None]


class LocalStages(NamedTuple):
    """Where the stages of a model start, and those of this process.

    Attributes:
        starts: The number of the link with which each stage starts.
        own: The stages of this process.
        kept: The ids of the parameters of these stages.
        device: The device to which they will be moved.
    """

    starts: Sequence[int]
    own: Collection[int]
    kept: Collection[int]
    device: torch.device


class Partition(ABC):
    """A model as a row of links. Each stage starts with one of them.

    Attributes:
        name: The name of the model's class.
        links: The modules that are called, in order.
        timed: Whether the costs of links are times (layer_timing.py); otherwise they are numbers of parameters.
    """

    name: str
    links: list[PartitionLink]
    timed = False

    @abstractmethod
    def _widths(self) -> list[int]:
        """Return the number of tensors that would be sent where each link starts, as far as it is known."""

    @abstractmethod
    def apply(self, model: nn.Module, stages: LocalStages) -> None:
        """Partition the model, and remove the parts that only other processes need.

        Args:
            model: The model.
            stages: Where stages start, and those of this process.
        """

    def drop_params(self, kept: Collection[int]) -> None:
        """Drop the references to parameters of other processes, after `apply`."""
        for link in self.links:
            link.params = [p for p in link.params if id(p) in kept]

    @abstractmethod
    def compute(self, model: nn.Module, stage: int, call: StageInput, received: Tensors) -> tuple[Any, Tensors]:
        """Compute one stage's part of the model's forward.

        Args:
            model: The model.
            stage: The stage.
            call: The call of the model.
            received: The tensors that the stage before has sent.

        Returns:
            The model's output, if this is the last stage; and the tensors for the next stage.
        """

    def stages_of_params(self, model: nn.Module, starts: Sequence[int]) -> dict[int, list[int]]:
        """Return the stages that use each parameter, by its id. Parameters of no link belong to the first stage."""
        found: dict[int, list[int]] = {id(p): [] for p in model.parameters()}
        for stage, links in enumerate(self.links_by_stage(starts)):
            for key in {id(p) for link in links for p in link.params}:
                found[key].append(stage)
        return {key: stages or [0] for key, stages in found.items()}

    def links_by_stage(self, starts: Sequence[int]) -> list[list[PartitionLink]]:
        """Return the links of each stage."""
        return [self.links[first:end] for first, end in zip(starts, [*starts[1:], len(self.links)], strict=True)]

    def stage_starts(self, stages: int, names: Sequence[str]) -> list[int]:
        """Return the number of the link with which each stage starts.

        Args:
            stages: The number of stages.
            names: The modules with which stages start; none: balance the costs.
        """
        trained = sum(any(p.requires_grad for p in link.params) for link in self.links)
        if trained < stages:
            raise LoopError(
                f"Cannot partition a {self.name} into {stages} stages: it has too few modules.",
                f"It is a chain of {len(self.links)} modules, of which {trained} have parameters that train; every "
                "stage needs one.",
                f"--set parallel.pipeline={max(1, trained)}; or, where a process has several stages, --set "
                "parallel.schedule=1F1B",
            )
        found = self._named_starts(stages, names) if names else self._balanced_starts(stages)
        for stage, (first, end) in enumerate(zip(found, [*found[1:], len(self.links)], strict=True)):
            if not any(p.requires_grad for link in self.links[first:end] for p in link.params):
                raise LoopError(
                    f"Stage {stage} would have no parameter that trains.",
                    f"parallel.split_points = {list(names)} chooses where stages start.",
                    "name other modules, or none: --set 'parallel.split_points=[]'",
                )
        return found

    def _named_starts(self, stages: int, names: Sequence[str]) -> list[int]:
        found = [0]
        for name in names:
            places = (i for i, link in enumerate(self.links) if f"{link.name}.".startswith(f"{name}."))
            found.append(next(places, -1))
        if len(found) != stages or sorted(set(found)) != found:
            known = ", ".join(dict.fromkeys(link.name for link in self.links[1:]))
            raise LoopError(
                f"parallel.split_points = {list(names)} does not give {stages} stages.",
                f"{stages - 1} modules are to be named in the order in which {self.name} calls them: {known}.",
                "name these, or none: --set 'parallel.split_points=[]'",
            )
        return found

    def _balanced_starts(self, stages: int) -> list[int]:
        trains = [any(p.requires_grad for p in link.params) for link in self.links]
        row = BalancedRow([link.cost for link in self.links], trains, self._widths())
        return balanced_partition(row, stages, TIMING_TOLERANCE if self.timed else 0.0)

    def set_times(self, seconds: Sequence[float]) -> None:
        """Use the measured time of each link as its cost."""
        self.timed = True
        for link, time in zip(self.links, seconds, strict=True):
            link.cost = round(time * 1e9)

    def cost_shares(self, starts: Sequence[int]) -> list[float]:
        """Return the share of each stage in the cost of all links."""
        costs = [sum(link.cost for link in links) for links in self.links_by_stage(starts)]
        return [cost / max(1, sum(costs)) for cost in costs]


def cost_of(module: nn.Module) -> int:
    """Return an estimate of a forward's cost: one multiplication for each parameter, except for embeddings."""
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    return sum(p.numel() for p in module.parameters() if id(p) not in embeddings)


def unwrapped(module: nn.Module, *, in_row: bool = False) -> Iterator[nn.Module]:
    """Yield a module, and its submodules that merely contain rows of layers.

    Args:
        module: The module.
        in_row: Whether it is one of several modules of one class in a row, and therefore a link itself.
    """
    container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    if in_row and not container:
        return
    yield module
    count = Counter(type(part) for part in module.children() if next(part.parameters(), None) is not None)
    for part in module.children():
        is_row = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if is_row or any(
            isinstance(inner, nn.Sequential | nn.ModuleList) and len(inner) > 1 for inner in part.modules()
        ):
            yield from unwrapped(part, in_row=container and count[type(part)] > 1)


def called_alone_error(name: str, stage: int) -> LoopError:
    return LoopError(
        f"{name} was called by itself.",
        f"It is in stage {stage} of a pipeline, and this process has other stages.",
        "call the whole model, on all processes.",
    )
