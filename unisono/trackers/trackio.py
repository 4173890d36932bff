"""Record numbers and media with Trackio, in `RUN/trackio/` or the folder TRACKIO_DIR.

The library writes a row of its SQLite database for each call of `log`, half a second later and in a thread of its own.
Everything of a step is one row, so a step is there whole or not at all. `start` asks the database for the last step.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import resolve_space_id_and_server_url

from unisono.trackers.tracker import Media, TrackedRun

PROJECT = "unisono"
"""The project in which all runs are."""


class Trackio:
    """Log to a run of Trackio, whose name ends with a part of the run's id."""

    def start(self, run: TrackedRun) -> int:
        self._name = f"{run.name}-{run.id[:8]}"
        self._media: dict[int, dict[str, Any]] = {}  # by step: media that no row holds yet
        if any(resolve_space_id_and_server_url(None, None)):
            remedy = "Unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, and use trackio sync after the run."
            raise ValueError(f"only a folder can be asked for the last step. {remedy}")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open the dashboard
            self._run = trackio.init(
                PROJECT,
                self._name,
                resume="allow",
                config={**run.settings, "unisono.id": run.id},
                auto_log_gpu=False,
                auto_log_cpu=False,
                embed=False,
            )
        self._last = self._held()
        return self._last

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        row = {**self._media.pop(step, {}), **numbers}
        self._log_media()
        self._log_row(row, step)
        self._last = step

    def log_media(self, step: int, time: float, media: Media) -> None:
        self._media.setdefault(step, {})[media.name] = _converted(media)

    def flush(self) -> None:
        """Do nothing: the library's thread writes."""

    def finish(self, result: Mapping[str, Any]) -> None:
        if result:
            self._log_media()
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()
        if (held := self._held()) < self._last:
            raise OSError(f"its database has the steps up to {held} of {self._last}. Is the disk full?")

    def _log_media(self) -> None:
        for step, media in self._media.items():
            self._log_row(media, step)
        self._media.clear()

    def _log_row(self, row: dict[str, Any], step: int) -> None:
        """Log a row. The library leaves out what it cannot store, and only warns."""
        with warnings.catch_warnings(record=True) as found:
            self._run.log(row, step)
        for warning in found:
            if "skipped" in str(warning.message):
                warnings.filterwarnings("ignore", module="trackio")  # one message is enough
                with contextlib.redirect_stdout(io.StringIO()):
                    trackio.finish()
                raise OSError(str(warning.message))
            warnings.warn(warning.message, warning.category, stacklevel=1)

    def _held(self) -> int:
        held = SQLiteStorage.get_last_step(PROJECT, self._name)
        return -1 if held is None else int(held)


def _converted(media: Media) -> Any:
    """Return media as a value of Trackio."""
    if media.kind == "image":
        return trackio.Image(str(media.file))
    if media.kind == "histogram":
        return trackio.Histogram(np_histogram=(list(media.counts), list(media.edges)))
    if media.kind == "table":
        columns, rows = media.table()
        return trackio.Table(columns=columns, data=rows)
    return trackio.Markdown(media.text())
