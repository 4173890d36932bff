"""The loop of local SGD: steps within a site, and synchronizations of the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from unisono.local_sgd.sites import LocalSGD
from unisono.plan.assignment import Spans, assign_evenly
from unisono.train.context import RunContext
from unisono.train.gradient_sync import GradientSync
from unisono.train.loop import SyncLoop, SyncPoint
from unisono.train.step import StepParts
from unisono.train.step_state import StepState


class LocalSGDLoop(SyncLoop):
    """The loop of a run with sites."""

    sites: LocalSGD
    sync: GradientSync

    def attach(self, context: RunContext) -> None:
        self.sites = LocalSGD(context)

    def spans(self, size: int) -> Spans:
        return assign_evenly(self.settings.virtual_ranks, size, self.settings.local_sgd.sites)

    def build_sync(self, *arguments: Any, **more: Any) -> GradientSync:
        self.sync = super().build_sync(*arguments, **more)
        return self.sync

    def begin(self, context: RunContext, parts: StepParts) -> None:
        super().begin(context, parts)
        self.sites.begin(self.sync)

    def sync_point(self, context: RunContext, state: StepState) -> SyncPoint | None:
        return self.sites.after(self.sync, state)

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        return self.sites.as_one(models)

    def finish(self, context: RunContext) -> None:
        self.sites.finish(context.progress.done)

    def result(self) -> Mapping[str, Any]:
        return self.sites.result()
