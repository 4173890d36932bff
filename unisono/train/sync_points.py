"""After which steps all processes hold the same model: after every step, or, with local SGD, at a synchronization.

`sync_points` returns `NoLocalSGD` for every exchange but local SGD, whose class is imported when a run asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from unisono.config import Settings
    from unisono.train.loop import StepLoop
    from unisono.train.step import Step

_classes = {"local": "unisono.local_sgd.sites:LocalSGD"}
"""The class for each exchange under which processes train in several sites."""


class SyncPoint(NamedTuple):
    """All processes are after the same step: what they agreed on, and the steps done when that was so before."""

    agreed: Mapping[str, int]
    before: int


class SyncPoints(Protocol):
    """When all processes are after the same step, and how they hold one model in between.

    told  entries of result.json
    """

    @property
    def told(self) -> Mapping[str, Any]: ...

    def begin(self, engine: StepLoop, done: int) -> None: ...

    def after(self, engine: StepLoop, step: Step) -> SyncPoint | None: ...

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]: ...

    def rest(self, step: Step | None) -> None: ...


class NoLocalSGD:
    """All processes make every step together, as under all exchanges but one: nothing to do."""

    told: Mapping[str, Any] = {}

    def begin(self, engine: StepLoop, done: int) -> None:
        """The loop begins after so many steps."""

    def after(self, engine: StepLoop, step: Step) -> SyncPoint | None:
        """A step is done. Are all processes together now? None: not before a later one."""
        return SyncPoint(engine.agreed, step.number)

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """In it, these models are the same on all processes."""
        return nullcontext()

    def rest(self, step: Step | None) -> None:
        """No more steps will come: what is left is the same on all processes."""


def sync_points(settings: Settings, *collaborators: Any) -> SyncPoints:
    """Build the synchronization points of a run."""
    if settings.exchange not in _classes:
        return NoLocalSGD()
    module, name = _classes[settings.exchange].split(":")
    found: SyncPoints = getattr(importlib.import_module(module), name)(settings, *collaborators)
    return found
