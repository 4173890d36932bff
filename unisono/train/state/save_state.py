"""Write checkpoints: all processes together, and once more without one that dies in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.train.context import RunContext
from unisono.train.guarantees.promise import promise

CHECKPOINT = "a checkpoint"


def save_checkpoint(
    context: RunContext, more_changes: Sequence[dict[str, Any]] = (), *, in_background: bool = False
) -> None:
    """Write a checkpoint, between two steps. All processes call this; all raise if it cannot be written.

    Args:
        context: of the run.
        more_changes: changes of bits that only this checkpoint records.
        in_background: return when everything is copied, and write during the next steps.
    """
    if not context.loop.saves:
        return
    context.loop.refresh(states=True)
    context.monitor.event({"checkpoint": context.progress.steps_done})  # writes all steps that no resume repeats
    models, progress = context.models, context.progress
    for attempt in context.collective.attempts(CHECKPOINT):
        with attempt:
            models.reshard()
            for before in () if more_changes else context.hooks.before_save:
                before(progress.steps_done)
            changes = [*progress.changes, *more_changes]
            about = {"identity": context.identity, "changes": changes, "promise": promise(context)}
            about["options"] = context.state.options.given
            with context.loop.as_one([*models.modules, *models.tracked]):
                checkpoint = context.settings.checkpoint
                context.state.save(progress.steps_done, about, checkpoint, in_background=in_background)


def finish_saving(context: RunContext) -> None:
    """Wait until the checkpoint that is written in the background is complete; all raise if it cannot be written."""
    context.collective.run(CHECKPOINT, context.state.settle)
