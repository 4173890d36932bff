"""The timeline of a process, `timeline/rank-N.jsonl`: a line of JSON for every step, or for several quick ones.

    {"step": 12, "t": 1760000000.123, "seconds": {"data": 0.00021, "forward": 0.01042}, "loss": 2.3, "log": {"lr": 0.1}}
    {"resumed_at": 10}
    {"checkpoint": 20}
    {"promise": "tolerance", "step": 4, "cause": "state", "reason": "A second computation of ..."}

`step` counts from 0, `t` is the time of its end (seconds since 1970), `seconds` the time spent in each phase. A resumed
run appends to the same file: the line `resumed_at` names the next step, so earlier lines with this step or a later one
were computed again. A number that is not finite is written as a string ("nan", "inf", "-inf"), because JSON has no NaN.

A step costs about 3.5 µs (six phases and a loss), and 1.5 µs more for each logged number.

If the file cannot be written, a note is printed once, and training continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WRITE_EVERY_SECONDS = 2.0
"""Longest time that lines stay in memory while steps finish. A crash of the machine loses these lines."""


class Timeline:
    """Appends to the timeline of one process."""

    def __init__(
        self, path: Path, note: Callable[[str], None] | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """Open the file, and create it and its folder if they are missing.

        Args:
            path: The file.
            note: Called once with a sentence if the file cannot be written.
            now: Returns seconds since 1970.
        """
        self.path = path
        self._note = note
        self._now = now
        self._lines: list[str] = []
        self._written = now()
        self._file: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _is_cut_off(self._file):
                self._lines.append("\n")
        except OSError as error:
            self._fail(error)

    def step(
        self,
        step: int,
        seconds: Mapping[str, float],
        loss: float | None = None,
        log: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the line of a finished step: seconds per phase (`PhaseClock.lap`), its loss, what the loop logged."""
        if self._file is None:
            return
        now = self._now()
        # not by json.dumps, which takes twice as long in every step
        spent = ", ".join([f'"{phase}": {s:.6f}' for phase, s in seconds.items()])
        tail = "" if loss is None else f', "loss": {_number(loss)}'
        if log:
            tail += ', "log": {' + ", ".join([f"{_encode(name)}: {_json(value)}" for name, value in log.items()]) + "}"
        self._lines.append(f'{{"step": {step}, "t": {now:.3f}, "seconds": {{{spent}}}{tail}}}\n')
        if abs(now - self._written) >= WRITE_EVERY_SECONDS:  # abs: the wall clock may be set back
            self._written = now
            self.flush()

    def resumed(self, step: int) -> None:
        """Add the line of a resume; `step` is the next step."""
        self._lines.append(f'{{"resumed_at": {step}}}\n')
        self.flush()

    def event(self, values: Mapping[str, Any]) -> None:
        """Add a line of these values, and write it immediately."""
        self._lines.append(json.dumps(dict(values)) + "\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines in memory."""
        if self._file is None or not self._lines:
            return
        data = "".join(self._lines).encode()
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write the lines in memory, and close the file. Closing twice changes nothing."""
        self.flush()
        self._shut()

    def _fail(self, error: OSError) -> None:
        self._shut()
        self._lines.clear()
        if self._note is not None:
            self._note(
                f"The timeline {self.path} ends here ({error.strerror or error}). Training continues without it."
            )

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # reported when writing, or irrelevant now
                os.close(file)


def read(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a timeline as dictionaries. A line that a crash or a full disk cut off is skipped.

    Args:
        path: The file.
        last_bytes: Read only the end of the file, as a quick sample of a long run.
    """
    with path.open("rb") as file:
        if last_bytes is not None:
            start = max(0, file.seek(0, os.SEEK_END) - last_bytes)
            file.seek(max(0, start - 1))
            if start:
                file.readline()
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry


def _is_cut_off(file: int) -> bool:
    """Return whether the file ends in the middle of a line."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _number(value: float) -> str:
    value = float(value)
    return repr(value) if math.isfinite(value) else f'"{value}"'


def _json(value: Any) -> str:
    """Return a logged value as JSON. Numbers of other libraries (numpy, a tensor of one element) become float."""
    if type(value) is float:
        return _number(value)
    if isinstance(value, (bool, int, str)) or value is None:
        return _encode(value)
    try:
        return _number(value)
    except (TypeError, ValueError, RuntimeError):
        return _encode(str(value))


_encode = json.JSONEncoder().encode
