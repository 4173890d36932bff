"""Record numbers and media with Weights & Biases: offline in `RUN/wandb/`, or online with WANDB_MODE=online.

Offline, every start of the run has a folder of its own with a file `run-ID.wandb`; `wandb sync` sends all of them as
one run. W&B adds everything of a step to one record, and writes it when the next step begins. So the file has whole
steps, and `start` reads them back. Online, the server says which step it has.

The file is a log of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md) with a header of seven
bytes. A record is a protocol buffer (wandb/proto/wandb_internal.proto).
"""

from __future__ import annotations

import html
import os
import shutil
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

from unisono.trackers.tracker import Media, TrackedRun

PROJECT = "unisono"
"""The project, unless WANDB_PROJECT names one."""

HEADER = 7
"""Bytes before the first block of a file."""

BLOCK = 32768
"""Bytes of a block. No part of a record crosses its end."""

PATIENCE = 2.0
"""Seconds that W&B's process of an earlier start has to finish its file. It ends with its follower."""

WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
"""Types of a part of a record."""


class WandB:
    """Send everything to W&B's own process, which writes the files and talks to the server."""

    def start(self, run: TrackedRun) -> int:
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            init_timeout=60,
        )
        project = settings.project or PROJECT
        self._folder = run.dir / "wandb"
        self._media: dict[int, dict[str, Any]] = {}  # by step: media that no record holds yet
        for folder in self._folder.glob("*run-*"):
            repair(folder)
        self._last = self._held()
        self._run = wandb.init(
            project=project,
            id=run.id,
            name=run.name,
            resume="allow",
            config={**run.settings, "environment": dict(run.environment)},
            settings=settings,
        )
        if not self._run.offline:
            self._last = self._run.starting_step - 1
        return self._last

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        row = {**self._media.pop(step, {}), **numbers, "_timestamp": time}
        self._log_media()
        self._run.log(row, step=step)
        self._last = step

    def log_media(self, step: int, time: float, media: Media) -> None:
        self._media.setdefault(step, {})[media.name] = _converted(media)

    def flush(self) -> None:
        """Do nothing: W&B's process writes by itself."""

    def finish(self, result: Mapping[str, Any]) -> None:
        if result:
            self._log_media()
        self._run.summary.update({name: value for name, value in result.items() if not isinstance(value, list)})
        self._run.finish(exit_code=0 if result else 1)
        wandb.teardown()  # waits until its process has written everything
        if self._run.offline and (held := self._held()) < self._last:
            raise OSError(f"{self._folder} has the steps up to {held} of {self._last}. Is the disk full?")

    def _log_media(self) -> None:
        for step, media in self._media.items():
            self._run.log(media, step=step)
        self._media.clear()

    def _held(self) -> int:
        return max((step for path in self._files() for step in steps_of(path)), default=-1)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*run-*/run-*.wandb"))


def _converted(media: Media) -> Any:
    """Return media as a value of W&B."""
    if media.kind == "image":
        return wandb.Image(str(media.file))
    if media.kind == "histogram":
        return wandb.Histogram(np_histogram=(list(media.counts), list(media.edges)))
    if media.kind == "table":
        columns, rows = media.table()
        return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
    return wandb.Html(f"<pre>{html.escape(media.text())}</pre>", inject=False)


def steps_of(path: Path) -> list[int]:
    """Return the steps in a file of W&B."""
    records, _ = whole_records(path.read_bytes())
    found = [wandb_internal_pb2.Record.FromString(record) for record in records]
    return [record.history.step.num for record in found if record.WhichOneof("record_type") == "history"]


def repair(folder: Path) -> None:
    """Make the folder of an earlier start one that `wandb sync` accepts, after W&B's process was killed.

    A record at the end of its file that was cut off is removed, and so is a folder that does not name its run.
    """
    until = time.monotonic() + PATIENCE
    for path in folder.glob("run-*.wandb"):
        while (found := whole_records(path.read_bytes()))[1] < path.stat().st_size and time.monotonic() < until:
            time.sleep(0.1)
        records, end = found
        if any(kind_of(record) == "run" for record in records):
            os.truncate(path, end)
            return
    shutil.rmtree(folder, ignore_errors=True)


def kind_of(record: bytes) -> str | None:
    """Return the kind of a record: "run", "history" and others."""
    kind: str | None = wandb_internal_pb2.Record.FromString(record).WhichOneof("record_type")
    return kind


def whole_records(data: bytes) -> tuple[list[bytes], int]:
    """Return the records of a log of LevelDB up to the first one that is cut off, and the end of the last one."""
    records: list[bytes] = []
    at = end = min(HEADER, len(data))
    parts = b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:  # the end of a block is filled with zeros
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or at > len(data):
            break
        parts = part if kind in (WHOLE, FIRST) else parts + part
        if kind in (WHOLE, LAST):
            records.append(parts)
            end = at
    return records, end
