"""Record numbers and media as TensorBoard's event files in `RUN/tensorboard/`, without TensorBoard.

One event holds everything of a step, so a step is written whole or not at all. Every start of the run has a file of its
own, and TensorBoard reads all of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from unisono.security.file_modes import make_folder, open_like_folder
from unisono.trackers import event_file
from unisono.trackers.tracker import Media, TrackedRun


class TensorBoard:
    """Append to an event file of this start of the run."""

    def start(self, run: TrackedRun) -> int:
        folder = run.dir / "tensorboard"
        make_folder(folder)
        files = sorted(folder.glob("events.out.tfevents.*"))
        last = max((step for file in files for step in event_file.steps_of(file)), default=-1)
        now = time.time()
        path = folder / f"events.out.tfevents.{now:.6f}.{os.getpid()}"
        self._file = open(path, "ab", opener=open_like_folder)  # noqa: SIM115  (closed in finish)
        self._media: dict[int, bytes] = {}  # by step: media that no event holds yet
        self._write(event_file.event(now, version="brain.Event:2"))
        if not files:
            for name, values in (("settings", run.settings), ("environment", run.environment)):
                self._write(event_file.event(now, _json(name, values)))
        self.flush()
        return last

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        values = b"".join(event_file.number(name, value) for name, value in numbers.items())
        values += self._media.pop(step, b"")
        self._write_media(time)
        self._write(event_file.event(time, values, step=step))

    def log_media(self, step: int, time: float, media: Media) -> None:
        self._media[step] = self._media.get(step, b"") + _encoded(media)

    def flush(self) -> None:
        self._file.flush()

    def finish(self, result: Mapping[str, Any]) -> None:
        now = time.time()
        if result:
            self._write_media(now)
            self._write(event_file.event(now, _json("result", result)))
        self._file.close()

    def _write_media(self, time: float) -> None:
        for step, values in self._media.items():
            self._write(event_file.event(time, values, step=step))
        self._media.clear()

    def _write(self, data: bytes) -> None:
        self._file.write(event_file.record(data))


def _encoded(media: Media) -> bytes:
    """Return media as values of a summary."""
    if media.kind == "image":
        return event_file.image(media.name, media.file.read_bytes())
    if media.kind == "histogram":
        return event_file.histogram(media.name, media.counts, media.edges)
    if media.kind == "text":
        return event_file.text(media.name, media.text())
    return event_file.text(media.name, _markdown(*media.table())) if media.kind == "table" else b""


def _markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _json(name: str, values: Mapping[str, Any]) -> bytes:
    return event_file.text(name, f"```json\n{json.dumps(values, indent=2, default=str)}\n```")
