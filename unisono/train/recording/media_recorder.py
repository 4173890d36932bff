"""Write images, texts, histograms and tables of a run to `RUN/media/`, and an event for each into the timeline:

    {"t": 1760000000.123, "media": "image", "name": "sample", "step": 12, "file": "media/sample/12.png"}
    {"t": 1760000000.124, "media": "histogram", "name": "weights", "step": 12, "counts": [3, 5], "edges": [0, 1, 2]}

Only the main process reads the values and writes. Nothing here changes a value or a random number. What cannot be
recorded is a note, once for each cause, and training continues.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from zlib import crc32

import numpy as np

from unisono.security.file_modes import make_folder, write_bytes
from unisono.train.extensions import Extension
from unisono.train.recording.png import array_of, encode_png, pixels_of
from unisono.train.state.run_result import plain

if TYPE_CHECKING:
    from unisono.train.context import RunContext
    from unisono.train.step_state import StepState

FOLDER_BYTES = 200
"""Longest name of a folder; file systems allow 255 bytes."""

NAME_BYTES = 90
"""Longest name of media. W&B puts 37 characters before that of a table, and allows 128."""

NAME_RULE = f"a name has at most {NAME_BYTES} bytes, all printable, and no empty part, '.' or '..'"
"""What all trackers can store."""

SHOWN = 40
"""Characters of a name in a note."""


class MediaRecorder(Extension):
    """Record media on the main process.

    Args:
        context: The context of the run.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._early: list[dict[str, Any]] = []  # events before the first step, when there is no timeline yet
        self._notes: set[str] = set()

    def image(self, name: str, image: Any) -> None:
        """Record an image (see `pixels_of`)."""
        self._record("image", name, lambda: encode_png(pixels_of(image)), "png")

    def figure(self, name: str, figure: Any) -> None:
        """Record a figure of Matplotlib as an image."""

        def draw() -> bytes:
            file = io.BytesIO()
            figure.savefig(file, format="png")
            return file.getvalue()

        self._record("image", name, draw, "png")

    def text(self, name: str, text: str) -> None:
        """Record a text."""
        self._record("text", name, lambda: str(text).encode(), "txt")

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Record a table."""
        self._record("table", name, lambda: table_json(columns, rows).encode(), "json")

    def histogram(self, name: str, values: Any, bins: int) -> None:
        """Record a histogram of all finite values."""
        self._attempt("histogram", name, lambda step, stored: histogram_of(values, bins))

    def _record(self, kind: str, name: str, build: Callable[[], bytes], suffix: str) -> None:
        """Write a file of this content, and its event."""

        def write(step: int, stored: str) -> Mapping[str, Any]:
            content, file = build(), Path("media", folder_of(stored), f"{step}.{suffix}")
            path = self._context.run_dir / file
            make_folder(path.parent)
            part = path.with_name(f".{path.name}.part")
            write_bytes(part, content)
            part.replace(path)  # so that a reader finds a whole file
            return {"file": file.as_posix()}

        self._attempt(kind, name, write)

    def _attempt(self, kind: str, name: str, record: Callable[[int, str], Mapping[str, Any]]) -> None:
        """Record something on the main process: of a step, by a name. An error is a note."""
        context = self._context
        if context.group.rank or context.waits or context.world.dry:
            return
        progress = context.progress
        step = max(progress.steps_done, progress.step.number if progress.step is not None else 0)
        stored = storable(str(name))
        try:
            values = record(step, stored)
        except Exception as error:
            problem = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            self._note(f"{kind} {name!r}", problem.strip().partition("\n")[0] or type(error).__name__)
            return
        if stored != str(name):
            self._note_name(kind, str(name), stored)
        event = {"media": kind, "name": stored, "step": step, **values}
        if progress.began is None:
            self._early.append(event)
        else:
            context.monitor.event(event)

    def _note(self, what: str, problem: str) -> None:
        if problem not in self._notes:
            self._notes.add(problem)
            self._context.monitor.note(f"The {what} is not recorded: {problem.rstrip('.')}. Training continues.")

    def _note_name(self, kind: str, name: str, stored: str) -> None:
        """Note once that a name was changed."""
        if NAME_RULE not in self._notes:
            self._notes.add(NAME_RULE)
            self._context.monitor.note(
                f"The {kind} {_shortened(name)} is recorded as {_shortened(stored)}, because {NAME_RULE}."
            )

    def before_step(self, step: StepState) -> None:
        while self._early:
            self._context.monitor.event(self._early.pop(0))


def storable(name: str) -> str:
    """Return a name that all trackers can store: `NAME_RULE`. Different long names stay different."""
    printable = "".join(letter if letter.isprintable() else f"_{ord(letter):x}_" for letter in name)
    found = "/".join("_" if part in ("", ".", "..") else part for part in printable.split("/"))
    if len(found.encode()) <= NAME_BYTES:
        return found
    mark = f"-{crc32(found.encode()):08x}"
    return found.encode()[: NAME_BYTES - len(mark)].decode(errors="ignore") + mark


def _shortened(name: str) -> str:
    return repr(name) if len(name) <= SHOWN else f"{name[:SHOWN]!r}..."


def folder_of(name: str) -> str:
    """Return the name of the folder for a name. Different names have different folders."""
    folder = quote(str(name), safe=" ")
    if folder.startswith("."):
        folder = "%2E" + folder[1:]
    if len(folder) > FOLDER_BYTES:
        folder = f"{folder[:FOLDER_BYTES]}-{crc32(str(name).encode()):08x}"
    return folder or "%"


def histogram_of(values: Any, bins: int) -> Mapping[str, Any]:
    """Return the counts and the edges of equal bins between the least and the greatest finite value.

    Raises:
        ValueError: there is no finite value.
    """
    array = array_of(values).ravel()
    array = array.astype(np.uint8) if array.dtype == np.bool_ else array
    finite = array[np.isfinite(array)]
    if not finite.size:
        raise ValueError("There is no finite value.")
    counts, edges = np.histogram(finite, bins)
    lost = {"not_finite": array.size - finite.size} if array.size > finite.size else {}
    return {"counts": counts.tolist(), "edges": [float(edge) for edge in edges], **lost}


def table_json(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as JSON, as pandas.read_json(..., orient="split") reads it.

    Raises:
        ValueError: a row has another length than `columns`.
    """
    names, data = [str(column) for column in columns], [[_cell(cell) for cell in row] for row in rows]
    if any(len(row) != len(names) for row in data):
        raise ValueError(f"A row has another length than the {len(names)} columns.")
    return json.dumps({"columns": names, "data": data}, ensure_ascii=False)


def _cell(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
