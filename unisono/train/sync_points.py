"""After which steps all processes hold the same model: after every step, or, with local SGD, at a synchronization.

`sync_points` returns `NoLocalSGD` for every exchange but local SGD, whose class is imported when a run asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from unisono.config.exchanges import EXCHANGES

if TYPE_CHECKING:
    from unisono.config import Settings
    from unisono.train.loop import StepLoop
    from unisono.train.step import Step


class SyncPoint(NamedTuple):
    """A moment at which all processes have done the same steps.

    agreed  flags that all processes share: a stop, a checkpoint
    before  steps done at the previous synchronization point
    """

    agreed: Mapping[str, int]
    before: int


class SyncPoints(Protocol):
    """Decide when all processes hold the same model, and give them one model in between.

    told  entries of result.json
    """

    @property
    def told(self) -> Mapping[str, Any]: ...

    def begin(self, engine: StepLoop, done: int) -> None: ...

    def after(self, engine: StepLoop, step: Step) -> SyncPoint | None: ...

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]: ...

    def rest(self, step: Step | None) -> None: ...


class NoLocalSGD:
    """Synchronize all processes in every step: every exchange but local SGD."""

    told: Mapping[str, Any] = {}

    def begin(self, engine: StepLoop, done: int) -> None:
        """Begin the loop after `done` steps."""

    def after(self, engine: StepLoop, step: Step) -> SyncPoint | None:
        """Return the synchronization point after this step, or None if there is none."""
        return SyncPoint(engine.agreed, step.number)

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """Return a block in which these models are equal on all processes."""
        return nullcontext()

    def rest(self, step: Step | None) -> None:
        """Synchronize for the last time: no more steps follow."""


def sync_points(settings: Settings, *collaborators: Any) -> SyncPoints:
    """Build the synchronization points of a run."""
    target = EXCHANGES[settings.exchange].sync_points
    if not target:
        return NoLocalSGD()
    module, name = target.split(":")
    found: SyncPoints = getattr(importlib.import_module(module), name)(settings, *collaborators)
    return found
