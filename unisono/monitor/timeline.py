"""The timeline of a process, `timeline/rank-N.jsonl`: a line of JSON for every step, or for several quick ones.

    {"step": 12, "t": 1760000000.123, "seconds": {"data": 0.00021, "forward": 0.01042}, "loss": 2.3, "log": {"lr": 0.1}}
    {"resumed_at": 10}
    {"promise": "tolerance", "step": 4, "cause": "state", "reason": "A second computation of ..."}

`step` counts from 0, `t` is when it was over (seconds since 1970), `seconds` how long it spent in each phase. A resumed
run goes on in the same file: the line `resumed_at` names the step that comes next, so lines before it with this step or
a later one were done again.
JSON knows no NaN: a number that is not finite is written as a string, "nan", "inf" or "-inf".

A step costs about 3.5 µs (six phases and a loss), and 1.5 µs more when the loop logs a number.

The file is a witness, not a part of the training: when it cannot be written, that is said once, and training goes on.
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
"""Lines wait in memory at most this long while steps go on: what a crash of the whole machine can lose."""


class Timeline:
    """Appends to one process's timeline.

    path  the file; it and its directory are made when they are not there
    note  is called once with a sentence, if the file cannot be written (any more)
    now   seconds since 1970; tests pass their own
    """

    def __init__(
        self, path: Path, note: Callable[[str], None] | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self._note = note
        self._now = now
        self._lines: list[str] = []
        self._written = now()
        self._file: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _torn(self._file):
                self._lines.append("\n")
        except OSError as error:
            self._give_up(error)

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
        # Put together by hand: json.dumps takes twice as long, and this runs every step.
        spent = ", ".join([f'"{phase}": {s:.6f}' for phase, s in seconds.items()])
        tail = "" if loss is None else f', "loss": {_number(loss)}'
        if log:
            tail += ', "log": {' + ", ".join([f"{_encode(name)}: {_json(value)}" for name, value in log.items()]) + "}"
        self._lines.append(f'{{"step": {step}, "t": {now:.3f}, "seconds": {{{spent}}}{tail}}}\n')
        if abs(now - self._written) >= WRITE_EVERY_SECONDS:  # abs: somebody may set the wall clock back
            self._written = now
            self.flush()

    def resumed(self, step: int) -> None:
        """Add the line that says: this run goes on here, and `step` is the next one."""
        self._lines.append(f'{{"resumed_at": {step}}}\n')
        self.flush()

    def event(self, values: Mapping[str, Any]) -> None:
        """Add a line of these values, and write it at once."""
        self._lines.append(json.dumps(dict(values)) + "\n")
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._file is None or not self._lines:
            return
        data = "".join(self._lines).encode()
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what waits and close the file; closing twice changes nothing."""
        self.flush()
        self._shut()

    def _give_up(self, error: OSError) -> None:
        self._shut()
        self._lines.clear()
        if self._note is not None:
            self._note(f"The timeline {self.path} ends here ({error.strerror or error}); training goes on without it.")

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what it says was said when writing, or is of no use any more
                os.close(file)


def read(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a timeline, as dictionaries. A line that was cut off by a crash or a full disk is passed over.

    last_bytes  look at the end of the file only, for a quick impression of a long run
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


def _torn(file: int) -> bool:
    """Does the file end in the middle of a line?"""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _number(value: float) -> str:
    value = float(value)
    return repr(value) if math.isfinite(value) else f'"{value}"'


def _json(value: Any) -> str:
    """What the loop logged, as JSON: numbers of other libraries (numpy's, a tensor of one number) become float."""
    if type(value) is float:
        return _number(value)
    if isinstance(value, (bool, int, str)) or value is None:
        return _encode(value)
    try:
        return _number(value)
    except (TypeError, ValueError, RuntimeError):
        return _encode(str(value))


_encode = json.JSONEncoder().encode
