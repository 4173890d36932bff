"""Start the process that serves the metrics of a run to Prometheus (metrics/exporter.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from unisono import __version__
from unisono.train.guarantees.promise import promise
from unisono.train.recording.follower_process import FollowerProcess

if TYPE_CHECKING:
    from unisono.train.context import RunContext

PATIENCE = 2.0
"""Seconds that the end of a run waits for the process."""


def build_metrics(context: RunContext) -> list[FollowerProcess]:
    """Return the extension, if the settings name a port."""
    wanted = context.settings.metrics

    def arguments() -> list[str]:
        facts = {
            "run": context.run_dir.name,
            "promise": promise(context)[0],
            "virtual_ranks": str(context.settings.virtual_ranks),
            "ranks": str(context.group.size),
            "batch": str(context.settings.batch),
            "exchange": context.settings.exchange,
            "device": context.device.type,
            "version": __version__,
        }
        secure = context.settings.secure
        files = [str(Path(context.world.folder, each)) for each in (secure.ca, secure.cert, secure.key) if each]
        return [str(context.run_dir), wanted.address, str(wanted.port), json.dumps(facts), *files]

    if not wanted.port:
        return []
    return [
        FollowerProcess(
            context,
            "unisono.metrics.exporter",
            arguments,
            title="The process of the metrics page",
            after_death="The next resume starts it again.",
            patience=PATIENCE,
        )
    ]
