"""Start the process that sends what a run logs to experiment trackers (train/tracking/follower.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.config.wording import plural
from unisono.trackers.registry import names_of, variables_of
from unisono.train.recording.follower_process import FollowerProcess
from unisono.train.tracking.follower import modified

if TYPE_CHECKING:
    from unisono.train.context import RunContext

PATIENCE = 10.0
"""Seconds that the end of a run waits for its trackers. Then they finish by themselves."""


def build_tracking(context: RunContext) -> list[FollowerProcess]:
    """Return the extension, if the settings name a tracker."""
    track, timeline = context.settings.track, str(context.monitor.timeline_path)
    names, result = names_of(track), context.run_dir / "result.json"
    if not names:
        return []
    late = f"The {plural(len(names), 'tracker')} did not finish within {PATIENCE:.0f} s, and will end later."
    return [
        FollowerProcess(
            context,
            "unisono.train.tracking.follower",
            lambda: [str(context.run_dir), timeline, track, str(modified(result))],
            title="The process of the trackers",
            after_death="The next resume sends what is missing.",
            patience=PATIENCE,
            late=late,
            variables=variables_of(track, context.run_dir),
        )
    ]
