"""The loop of a run: how its processes run one step after the other. The exchange chooses the type of loop.

`SyncLoop` is the loop of every exchange in which all processes run each step together. Other loops inherit from it and
override some of its methods: local SGD (local_sgd/sites.py), and parameter servers (param_server/).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from unisono import phases
from unisono.config import Settings
from unisono.config.exchange_registry import EXCHANGES
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import RunStopped
from unisono.plan.assignment import Spans, assign_evenly
from unisono.train.context import LoopParts, RunContext
from unisono.train.gradient_sync import GradientSync
from unisono.train.state.save_state import finish_saving, save_checkpoint
from unisono.train.step import Step, StepParts
from unisono.train.step_state import StepState

NOTED_CHANGES = 3
"""Differences from the checkpoint that are printed. A model that trains other layers has one for each parameter."""


class SyncPoint(NamedTuple):
    """A moment at which all processes have completed the same steps.

    agreed  for each flag, the number of processes that raised it: a stop, a checkpoint
    before  steps completed at the previous synchronization point
    """

    agreed: Mapping[str, int]
    before: int


class SyncLoop:
    """The loop in which all processes run every step together."""

    is_uniform = True
    saves = True

    def __init__(self, settings: Settings, group: ProcessGroup) -> None:
        self.settings, self.group, self.training = settings, group, group

    # -- before the loop

    def attach(self, context: RunContext) -> None:
        """Add the objects of this loop to the context, before anything is loaded."""

    def place(self, model: torch.nn.Module) -> None:
        """Prepare a placed model."""

    def track(self, things: Iterable[Any]) -> None:
        """Check objects that are about to be tracked. Raise LoopError for one that this loop does not support."""

    def spans(self, size: int) -> Spans:
        """Return the virtual ranks that each of `size` processes computes, unless a later assignment differs."""
        return assign_evenly(self.settings.virtual_ranks, size)

    def parts(self, context: RunContext, parts: LoopParts, steps: StepParts) -> StepParts:
        """Return the parts of this process's steps. `steps`: the parts if all processes have the same role."""
        return steps

    def build_sync(self, *arguments: Any, **more: Any) -> GradientSync:
        """Build the object that completes gradients."""
        return GradientSync(*arguments, **more)

    def check_collective(self) -> None:
        """Raise LoopError if processes cannot run the script's own collectives now."""

    # -- the steps

    def steps(self, context: RunContext, parts: StepParts) -> Iterator[Step]:
        """Yield the steps from the run's current step to its end. Checkpoints are written between two steps."""
        progress, hooks, last = context.progress, parts.hooks, context.progress.last
        if context.world.joins:
            parts.recovery.join()
        self.begin(context, parts)
        checked = 0  # number of checked models and optimizers: a new one may be added later
        for number in range(progress.steps_done, last):
            state = StepState(number, parts.checks.order.batch_size(number))
            yield from self.step(context, parts, state)
            if checked != (checked := len(context.models.modules) + len(progress.steppers)):
                context.state.check_whole(context.models.modules, progress.steppers)
            progress.steps_done = number + 1
            self.count(context, state)
            for after in hooks.after_step:
                after(state)
            point = self.sync_point(context, state)
            if point is not None and self._at(context, parts, point):
                break
        finish_saving(context)
        if context.state.saved_after != progress.steps_done:
            save_checkpoint(context)
        self.finish(context)
        progress.ended = time.perf_counter()
        self.end(parts)

    def step(self, context: RunContext, parts: StepParts, state: StepState) -> Iterator[Step]:
        """Yield one step to the script, and check afterward that it has its update."""
        progress, hooks = context.progress, parts.hooks
        for before in hooks.before_step:
            before(state)
        phases.begin_step(state.number)
        progress.step = state
        progress.requests["leave"] = progress.leaving
        progress.requests["unsaved"] = context.state.saver.failed
        parts.source.seed_step(state.number)
        try:
            yield Step(state, parts)
        except GeneratorExit:  # the loop was left with break
            context.state.seal(half_done=state.is_half_done)
            raise
        state.check_finished()
        for ended in hooks.step_ended:
            ended(state)

    def begin(self, context: RunContext, parts: StepParts) -> None:
        """Begin the loop, after all objects that the script tracks are known and loaded."""
        progress = context.progress
        done, changes = progress.steps_done, context.state.begin()
        progress.changes += [{"step": done, "field": name, "from": before, "to": now} for name, before, now in changes]
        for name, before, now in changes[:NOTED_CHANGES] if done < progress.last else ():
            context.monitor.note(f"{name} changes from {before} to {now}: other results from step {done} on")
        if len(changes) > NOTED_CHANGES and done < progress.last:
            context.monitor.note(f"{len(changes) - NOTED_CHANGES} more changes are in result.json.")
        for name, before, now in context.state.options.changed:
            context.monitor.note(f"{name} changes from {before} to {now}, with the settings")
        seen = parts.checks.order.samples(progress.steps_done)
        context.monitor.begin(
            progress.last,
            progress.steps_done,
            seen,
            resumed=progress.resumed_at > 0,
            learning_rate=progress.learning_rate,
        )
        progress.began = time.perf_counter()

    def end(self, parts: StepParts) -> None:
        """End the loop: stop the loader workers."""
        parts.source.close()

    @staticmethod
    def count(context: RunContext, state: StepState) -> None:
        """Count a step after its update."""
        context.progress.samples_here += state.samples
        context.progress.done = state
        context.monitor.step(state)

    def _at(self, context: RunContext, parts: StepParts, point: SyncPoint) -> bool:
        """Act on the agreed flags, after all processes have completed the same steps. Return whether the loop ends."""
        progress, agreed = context.progress, point.agreed
        done, every = progress.steps_done, context.settings.checkpoint.every
        if agreed.get("unsaved"):
            finish_saving(context)  # raises the error of a checkpoint that could not be written
        if agreed["leave"]:
            save_checkpoint(context)
            self.finish(context)
            raise RunStopped
        if agreed["stop"]:
            return True
        if done >= progress.last:
            return False
        if every and done // every > point.before // every:
            save_checkpoint(context, in_background=True)
        if agreed.get("joins"):
            parts.recovery.admit_joiners()
        for between in parts.hooks.between_steps:
            between(done)
        return False

    # -- when all processes hold the same model

    def sync_point(self, context: RunContext, state: StepState) -> SyncPoint | None:
        """Return the synchronization point after a step, or None if there is none."""
        return SyncPoint(context.progress.agreed, state.number)

    def as_one(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """Return a block in which these models are equal on all processes."""
        return nullcontext()

    def refresh(self, *, states: bool = False) -> None:
        """Get the part of the model that other processes hold, and with `states` also of its optimizers."""

    def finish(self, context: RunContext) -> None:
        """Leave all processes with the same model. No more steps follow."""

    def end_early(self, context: RunContext) -> None:
        """Finish the last step of a loop that was left with break, after its update."""
        if context.progress.done is not None:
            self.sync_point(context, context.progress.done)

    # -- results

    def wake(self) -> None:
        """End a wait for messages, because a signal arrived."""

    def promise(self, context: RunContext) -> tuple[str, str] | None:
        """Return the promise of the loop and its reason; None if both follow from the exchange and the layout."""
        return None

    def result(self) -> Mapping[str, Any]:
        """Return entries of result.json."""
        return {}


def choose_loop(settings: Settings, group: ProcessGroup) -> SyncLoop:
    """Build the loop that the exchange of these settings needs (config/exchange_registry.py).

    Args:
        settings: the settings of the run.
        group: all processes of the run.
    """
    target = EXCHANGES[settings.exchange].loop
    if not target:
        return SyncLoop(settings, group)
    module, name = target.split(":")
    loop: SyncLoop = getattr(importlib.import_module(module), name)(settings, group)
    return loop
