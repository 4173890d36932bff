"""The progress line: one line that is redrawn on a terminal, and plain lines now and then everywhere else.

    step 120/200  loss 2.3456  512 samples/s  data wait 3%  412 MB  0:42 left

The live line is drawn at most twice a second and ends with a carriage return, so the cursor stays at its beginning; by
that the launcher knows which output does not belong in a log. Between two drawings an update takes less than half a
microsecond.

The time left is that of the whole run: the remaining steps at the pace of the later half of this process's steps. So a
resumed run does not count steps of an earlier process, a change of speed shows soon, and evaluations and checkpoints
are part of the pace.

rich.progress is not used. In a narrow terminal it shortens every column to "st...", the step too, where here the least
important fields are left out. It moves unfinished output of the script to a line of its own, its lines do not end with
a carriage return, and off a terminal it prints nothing until the end.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol, TextIO

import psutil  # type: ignore[import-untyped]

from unisono.config import size
from unisono.monitor.stream_text import write_text

LIVE_SECONDS = 0.5
"""Shortest time between two drawings of the live line."""
EARLY_SECONDS = 3.0
"""Shortest time between the first plain line and the second one, which is the first with a speed and the time left."""
PLAIN_SECONDS = 10.0
"""Shortest time between two later plain lines."""
RECENT_SECONDS = 5.0
"""Speed and data wait cover at least this time, once a run is that old."""
LONG_WAIT = 0.2
"""Share of time spent in waiting for data from which on it is highlighted."""
LONGEST_TEXT = 80
"""Characters of a logged text in the line."""
MAX_SAMPLES = 512
"""Samples of the past that are kept; then every second one of the older half is dropped."""

CLEAR = "\x1b[2K\r"


class Seconds(Protocol):
    """A clock that knows the seconds spent in each phase until now (monitor/phase_clock.py)."""

    @property
    def seconds(self) -> Mapping[str, float]: ...


class Sample(NamedTuple):
    """The progress of the run at one moment."""

    time: float
    step: int
    samples: int
    data_seconds: float


class Field(NamedTuple):
    """A part of the line. Where the line is too long, the fields of the highest `rank` are left out first."""

    rank: int
    text: str
    style: str = ""


class Progress:
    """Shows the progress of a run on a stream."""

    def __init__(
        self,
        stream: TextIO,
        live: bool,
        total_steps: int | None,
        first_step: int,
        samples_seen: int = 0,
        *,
        color: bool = False,
        memory: Callable[[], int] | None = None,
        columns: int = 0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a line that shows nothing until the first update.

        Args:
            stream: Standard output or standard error.
            live: Redraw one line, for a terminal; otherwise write plain lines.
            total_steps: Steps of the whole run; None: unknown, so no time left is shown.
            first_step: Steps done before this process began (0, or the checkpoint's).
            samples_seen: Samples of these steps.
            color: Use colors and bold type.
            memory: Returns bytes in use, for example of the accelerator; by default this process's resident memory.
            columns: Width of the terminal behind a pipe to the launcher; 0: ask the stream.
            now: Returns seconds of a monotonic clock.
        """
        self.total_steps = total_steps
        self.samples_seen = samples_seen
        self._stream = stream
        self._live = live
        self._color = color
        self._memory = memory or resident_bytes
        self._now = now
        self._columns = columns
        self._pauses = repeat(LIVE_SECONDS) if live else chain((EARLY_SECONDS,), repeat(PLAIN_SECONDS))
        self._draw_at = now()
        self._last: tuple[int, float | None, Seconds, float] | None = None
        self._logged: dict[str, tuple[Any, int]] = {}  # value, and the step after which it was logged
        self._past: list[Sample] = []
        self._shown = ""  # the live line on the screen
        self._drawn_step = first_step
        self._drawn_before = first_step  # the step of the line before
        self._unfinished = False  # the script has written a line without its end
        self._closed = False  # the stream cannot be written to any more

    def update(
        self, step: int, loss: float | None, samples: int, clock: Seconds, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Count a step, and draw the line if it is time.

        Args:
            step: Steps done in this run, this one included.
            loss: Its loss.
            samples: Samples of its global batch.
            clock: The clock of this process.
            extra: Logged values. Each is shown, with its step, until a newer one of the same name is logged.
        """
        self.samples_seen += samples
        now = self._now()
        self._last = (step, loss, clock, now)
        if extra:
            self._logged.update({name: (value, step) for name, value in extra.items() if name != "loss"})
        if now >= self._draw_at or step == self.total_steps:
            self._draw_at = now + (next(self._pauses) if self._draw() else LIVE_SECONDS)

    def note(self, text: str) -> None:
        """Print text on lines of its own, above the live line."""
        unfinished = "\n" if self._unfinished else ""
        self._unfinished = False
        self._write(self._cleared() + unfinished + text.rstrip("\n") + "\n" + self._redrawn())

    def make_way(self, text: str) -> None:
        """Clear the live line for output of the script; the next step draws it again."""
        if self._shown:
            self._write(CLEAR)
            self._shown = ""
            self._draw_at = self._now()
        self._unfinished = not text.endswith("\n") if text else self._unfinished

    def close(self) -> None:
        """Leave the last state as a plain line, and draw no more. Closing twice changes nothing."""
        if self._last is not None and (self._live or self._last[0] != self._drawn_step):
            line = self._shown if self._shown and self._last[0] == self._drawn_step else self._line()
            self._write(self._cleared() + line + "\n")
        self._shown = ""
        self._last = None

    def _draw(self) -> bool:
        """Draw the line, and return whether that was possible."""
        if self._unfinished:
            return False
        line = self._line()
        if self._live:
            self._shown = line
            self._write(self._redrawn())
        else:
            self._write(line + "\n")
        return True

    def _cleared(self) -> str:
        return CLEAR if self._shown else ""

    def _redrawn(self) -> str:
        return f"\x1b[2K{self._shown}\r" if self._shown else ""

    def _write(self, text: str) -> None:
        if self._closed or not text:
            return
        try:
            write_text(self._stream, text)
        except (OSError, ValueError):  # the terminal, or the reader of a pipe, is gone; training continues
            self._closed = True

    def _line(self) -> str:
        """Return the line of the last update. Time since then (an evaluation) does not count in the speed."""
        assert self._last is not None
        step, loss, clock, now = self._last
        if step > self._drawn_step:  # the line of one step may be drawn twice
            self._drawn_before, self._drawn_step = self._drawn_step, step
        here = Sample(now, step, self.samples_seen, clock.seconds["data"])
        fields = [Field(0, f"step {step}" + (f"/{self.total_steps}" if self.total_steps else ""), "1")]
        if loss is not None:
            fields.append(Field(1, f"loss {loss:.4f}"))
        for name, (value, at) in self._logged.items():
            fields.append(
                Field(3, f"{_one_line(name)} {_short(value)}" + (f" at step {at}" if at <= self._drawn_before else ""))
            )
        fields += self._speed(here)
        fields.append(Field(6, size(self._memory())))
        if (left := self._seconds_left(here)) is not None:
            fields.append(Field(2, f"{duration(left)} left"))
        self._remember(here)
        return fit(fields, (terminal_width(self._stream, self._columns) - 1) if self._live else None, color=self._color)

    def _speed(self, here: Sample) -> list[Field]:
        if not self._past:
            return []
        recent = self._since(here.time - RECENT_SECONDS)
        seconds = here.time - recent.time
        if seconds <= 0 or here.step <= recent.step:
            return []
        waiting = (here.data_seconds - recent.data_seconds) / seconds
        return [
            Field(4, f"{_rate((here.samples - recent.samples) / seconds)} samples/s"),
            Field(5, f"data wait {waiting:.0%}", "33" if waiting > LONG_WAIT else ""),
        ]

    def _seconds_left(self, here: Sample) -> float | None:
        if self.total_steps is None or here.step >= self.total_steps:
            return None
        if not self._past:  # the first step includes warm-up, so it predicts nothing
            return None
        since = self._since((self._past[0].time + here.time) / 2)
        if here.step <= since.step:
            return None
        return (self.total_steps - here.step) * (here.time - since.time) / (here.step - since.step)

    def _remember(self, here: Sample) -> None:
        if not self._past or here.step > self._past[-1].step:
            self._past.append(here)
            if len(self._past) > MAX_SAMPLES:
                self._past[1 : MAX_SAMPLES // 2] = self._past[1 : MAX_SAMPLES // 2 : 2]

    def _since(self, time: float) -> Sample:
        """Return the latest sample that is not after `time`, or else the first one."""
        return self._past[max(0, bisect_right(self._past, time, key=lambda sample: sample.time) - 1)]


class ProgressAwareStdout:
    """Standard output of the script while a live line is on the screen. The line makes way for what is printed."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self.stream = stream
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text in place of the live line."""
        self._progress.make_way(text)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines in place of the live line."""
        self.write("".join(lines))


def fit(fields: Iterable[Field], width: int | None, *, color: bool = False) -> str:
    """Return the fields as one line of at most `width` columns, without the least important ones that do not fit."""
    kept = list(fields)
    while width is not None and len(kept) > 1 and sum(len(f.text) + 2 for f in kept) - 2 > width:
        kept.pop(max(range(len(kept)), key=lambda i: (kept[i].rank, i)))
    if width is not None and len(kept) == 1:
        kept = [kept[0]._replace(text=kept[0].text[: max(0, width)])]
    return "  ".join(f"\x1b[{f.style}m{f.text}\x1b[0m" if color and f.style else f.text for f in kept)


def terminal_width(stream: TextIO, known: int = 0) -> int:
    """Return the columns of the terminal behind `stream`; if it is none, `known`; if that is 0, 80."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        columns = 0
    return columns or known or 80


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    rss: int = psutil.Process().memory_info().rss
    return rss


def duration(seconds: float) -> str:
    """Return a duration as 0:42, 12:34 or 3:00:05, and from two days on as 2d 03h."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days >= 2:
        return f"{days}d {hours % 24:02}h"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 99.5 else f"{per_second:.3g}"


def _short(value: Any) -> str:
    if isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, str):
        return _one_line(value)
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError, RuntimeError):
        return _one_line(str(value))


def _one_line(text: str) -> str:
    """Return the beginning of a text, with spaces instead of ends of lines and other control characters."""
    begin = f"{text[: LONGEST_TEXT - 1]}…" if len(text) > LONGEST_TEXT else text
    return "".join(character if character.isprintable() else " " for character in begin)
