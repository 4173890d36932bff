"""The timeline of a process, `timeline/rank-N.jsonl`: a line of JSON for every step, or for several quick ones.

    {"step":12,"t":1760000000.123,"us":[320,210,10420,20312,5321,300],"wait":4100,"loss":2.3,"log":{"bleu":0.1}}
    {"t":1760000001.003,"resumed_at":10}
    {"t":1760000003.517,"checkpoint":20}
    {"t":1760000004.120,"event":"death","step":31,"ranks":[2]}

The fields of a step's line; only the first three are in every line:

    step       the number of the step, from 0; of several quick steps, that of the last one
    t          the time of its end, in seconds since 1970
    us         microseconds in each phase, in the order of `phases.PHASES`, without zeros at the end
    wait       microseconds of them in which the process waited for messages of others
    cpu        microseconds in which the training thread was running, and not blocked or waiting for a processor
    gc         microseconds in collections of Python's oldest generation, if there were any
    n          the number of steps that share the line, if there are several
    loss       the loss of the step
    samples    samples of these steps over all processes, in the timeline of the main process, like the next three
    weight     their weight (tokens, say), if that is another number
    lr         the learning rate of the first parameter group, in seven digits, like the next one
    grad_norm  the norm of the gradient before clipping, if it was computed
    log        the values of `run.log`

`read` returns the phases by name and in seconds. A resumed run appends to the same file: the line `resumed_at` names
the next step, so earlier lines with this step or a later one were computed again. A number that is not finite is
written as a string ("nan", "inf", "-inf"), because JSON has no NaN.

A step costs about 5 µs, and 1.5 µs more for each logged number. 1,000,000 steps need about 130 MB.

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
from types import MappingProxyType
from typing import Any

from unisono.monitor.timeline_blocks import BlockWriter
from unisono.phases import PHASES
from unisono.security.file_modes import make_folder, open_like_folder

WRITE_EVERY_SECONDS = 2.0
"""Longest time that lines stay in memory while steps finish. A crash of the machine loses these lines."""


PARTIAL = {"wait", "cpu", "gc"}
"""Fields of a line that are microseconds of the phases' time."""

NOTHING: Mapping[str, float] = MappingProxyType({})


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
        self._blocks = BlockWriter(path.with_suffix(".blocks"), 0)
        try:
            make_folder(path.parent)
            self._file = open_like_folder(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            if is_cut_off(self._file, size):
                self._lines.append("\n")
                size += 1
            self._blocks = BlockWriter(path.with_suffix(".blocks"), size)
        except OSError as error:
            self._fail(error)

    def step(
        self,
        step: int,
        seconds: Mapping[str, float],
        loss: float | None = None,
        log: Mapping[str, Any] | None = None,
        *,
        steps: int = 1,
        wait: float = 0.0,
        cpu: float = 0.0,
        gc: float = 0.0,
        more: Mapping[str, float] = NOTHING,
    ) -> None:
        """Add the line of a finished step.

        Args:
            step: Its number.
            seconds: Seconds by phase (`PhaseClock.lap`).
            loss: Its loss.
            log: What the loop has logged.
            steps: The number of steps that share the line.
            wait: Seconds of waiting for messages.
            cpu: Seconds in which the training thread was running.
            gc: Seconds in collections of Python's oldest generation.
            more: Further fields of the line.
        """
        if self._file is None:
            return
        now = self._now()
        # not by json.dumps, which takes twice as long in every step
        spent = [round(1e6 * seconds.get(phase, 0.0)) for phase in PHASES]
        while spent and not spent[-1]:
            spent.pop()
        tail = f',"n":{steps}' if steps > 1 else ""
        partial = {"wait": round(1e6 * wait), "cpu": round(1e6 * cpu), "gc": round(1e6 * gc)}
        for name, us in partial.items():
            if us:
                tail += f',"{name}":{us}'
        if loss is not None:
            tail += f',"loss":{_number(loss)}'
        for name, value in more.items():
            tail += f',"{name}":{_seven_digits(value)}'
        if log:
            tail += ',"log":{' + ",".join([f"{_encode(str(name))}:{_json(value)}" for name, value in log.items()]) + "}"
        line = f'{{"step":{step},"t":{now:.3f},"us":{str(spent).replace(" ", "")}{tail}}}\n'
        self._lines.append(line)
        self._blocks.add(len(line.encode()) if log else len(line), step, now, spent, steps, partial, loss, more, log)
        if abs(now - self._written) >= WRITE_EVERY_SECONDS:  # abs: the wall clock may be set back
            self._written = now
            self.flush()

    def resumed(self, step: int) -> None:
        """Add the line of a resume; `step` is the next step."""
        self.event({"resumed_at": step})

    def event(self, values: Mapping[str, Any]) -> None:
        """Add a line of these values with the present time, and write it immediately."""
        entry = {"t": round(self._now(), 3), **values}
        line = json.dumps(entry, separators=(",", ":")) + "\n"
        self._lines.append(line)
        self._blocks.add_event(len(line), entry)
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
            self._blocks.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write the lines in memory, and close the files. Closing twice changes nothing."""
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
        self._blocks.close()


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
            entry = decode(line)
            if entry is not None:
                yield entry


def decode(line: bytes) -> dict[str, Any] | None:
    """Return a line as a dictionary, with the phases by name in seconds; None for a line that was cut off."""
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
            return None
        if "us" in entry:
            spent = entry.pop("us")
            entry["seconds"] = {phase: us / 1e6 for phase, us in zip(PHASES, spent, strict=False) if us}
            for name in PARTIAL.intersection(entry):
                entry[name] /= 1e6
    except (ValueError, TypeError):
        return None
    return entry


def as_number(value: Any) -> float | None:
    """Return a number of a timeline, in which NaN and infinity are strings; None if it is no number."""
    if isinstance(value, (int, float)) or value in ("nan", "inf", "-inf"):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


def is_cut_off(file: int, size: int) -> bool:
    """Return whether a file of this size ends in the middle of a line."""
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _number(value: float) -> str:
    value = float(value)
    return repr(value) if math.isfinite(value) else f'"{value}"'


def _seven_digits(value: float) -> str:
    return f"{value:.7g}" if math.isfinite(value) else f'"{value}"'


def _json(value: Any) -> str:
    """Return a logged value as JSON. Numbers of other libraries (numpy, a tensor of one element) become float."""
    if type(value) is float:
        return _number(value)
    if isinstance(value, (bool, int, str)) or value is None:
        return _encode(value)
    try:
        return _number(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _encode(str(value))


_encode = json.JSONEncoder().encode
