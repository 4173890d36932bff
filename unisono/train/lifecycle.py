"""The end of a run: the script has returned, a signal arrived, or an error was raised."""

from __future__ import annotations

from unisono.errors import RunStopped
from unisono.train.context import RunContext
from unisono.train.state.save_state import finish_saving, save_checkpoint


def finish(context: RunContext) -> None:
    """Finish a run whose script has returned. If it left its loop with break, save its last step as well."""
    for attempt in context.collective.attempts("the script's end"):
        with attempt:
            pass
    for settle in context.hooks.settle:
        settle()
    progress, state = context.progress, context.state
    last = progress.step
    if progress.ended is None and last is not None:
        if last.stage == "updated":
            progress.done, progress.steps_done = last, last.number + 1
            context.loop.end_early(context)
        finish_saving(context)
        if state.saved_after != progress.steps_done:
            touched = state.touched_since_break(one_stream=context.settings.virtual_ranks == 1)
            now = {"step": progress.steps_done, "field": "the state", "from": "the last step's", "to": touched}
            save_checkpoint(context, [now] if touched else [])
        context.loop.finish(context)
    progress.is_over = True


def was_finished_before(context: RunContext) -> bool:
    """Return whether all steps of the run were done when this process began."""
    progress = context.progress
    return context.state.resumed is not None and progress.order is not None and progress.samples_here == 0


def leave(context: RunContext) -> None:
    """Handle a signal: save and leave after the current step, if there is one and it is not saved yet."""
    progress = context.progress
    if progress.is_over:
        return
    progress.leaving = True
    if progress.ended is not None and context.group.size == 1:
        raise RunStopped
    progress.requests["leave"] = True
    context.loop.wake()


def close(context: RunContext) -> None:
    """Stop monitoring, and release the models. A second call has no effect."""
    context.state.saver.close()
    context.monitor.close()
    context.models.close()
    for end in context.hooks.close:
        end()
