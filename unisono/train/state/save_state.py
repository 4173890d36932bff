"""Saving: what all processes of a run do together for a checkpoint, and again without one that dies in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.train.run import Run


def save(run: Run[Any], more_changes: Sequence[dict[str, Any]] = (), *, beside: bool = False) -> None:
    """A checkpoint of what there is between two steps. Every process must call it; all raise if it cannot be written.

    more_changes  of the mathematics, that the checkpoint alone knows of
    beside        return when everything is copied, and write beside the next steps
    """
    run.together("a checkpoint", lambda: _save(run, more_changes, beside))


def settle(run: Run[Any]) -> None:
    """What is being written beside the steps is written; all raise if it could not be."""
    run.together("a checkpoint", run._state.settle)


def _save(run: Run[Any], more_changes: Sequence[dict[str, Any]], beside: bool) -> None:
    run._table.require_same_call("a checkpoint")
    run._models.reshard()
    if run._engine is not None and run._engine.divergence is not None and not more_changes:
        run._engine.divergence.compare(run.steps_done)
    about = {"identity": run._identity, "changes": [*run.changes, *more_changes], "promise": run.promise()}
    with run._sites.as_one([*run._models.modules, *run._models.tracked]):
        run._state.save(run.steps_done, about, run.settings.checkpoint, beside=beside)
