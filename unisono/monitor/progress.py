"""The progress line: one line that is redrawn on a terminal, plain lines now and then everywhere else.

    step 120/200  loss 2.3456  512 samples/s  data wait 3%  412 MB  0:42 left

A live line is drawn at most twice a second and ends with a carriage return, so the cursor rests at its beginning; the
launcher tells by that which parts of the output do not belong in a log. Between two drawings an update costs less than
half a microsecond.

The time left is that of the whole run: the steps that remain, at the pace of the later half of what this process has
done so far. So a resumed run does not count steps that an earlier process did, a run whose speed changes is believed
soon, and what happens every hundred steps (an evaluation, a checkpoint) is in the pace.
"""

from __future__ import annotations

import io
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TextIO

import psutil  # type: ignore[import-untyped]

from unisono.config import size

LIVE_SECONDS = 0.5
"""A live line is drawn at most this often."""
PLAIN_SECONDS = 10.0
"""A plain line is written at most this often."""
RECENT_SECONDS = 5.0
"""Speed and share are those of at least this long, once a run is that old."""
WAITS_TOO_LONG = 0.2
"""A share of waiting for data from which on it is shown in another colour."""

CLEAR = "\x1b[2K\r"


class Seconds(Protocol):
    """What the line needs of a clock (monitor/phase_clock.py): seconds per phase up to now."""

    @property
    def seconds(self) -> Mapping[str, float]: ...


class Sample(NamedTuple):
    """How far the run was at a moment."""

    time: float
    step: int
    samples: int
    data_seconds: float


class Field(NamedTuple):
    """A part of the line. The parts of the highest `rank` are left out first where the line is too long."""

    rank: int
    text: str
    style: str = ""


class Progress:
    """Shows how far the run is.

    stream        where to: standard output, or standard error
    live          True: a terminal, redraw one line; False: plain lines
    total_steps   steps of the whole run; None: nobody knows, so there is no time left either
    first_step    how many steps were done before this process began (0, or what the checkpoint says)
    samples_seen  how many samples these steps took
    color         False with NO_COLOR
    memory        bytes in use, for instance the accelerator's; by default what this process holds in main memory
    columns       of the terminal, where the stream is a pipe to a launcher that knows; 0: look
    now           seconds from any origin, never going back; tests pass their own
    """

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
        self.total_steps = total_steps
        self.samples_seen = samples_seen
        self._stream = stream
        self._live = live
        self._color = color
        self._memory = memory or resident_bytes
        self._now = now
        self._columns = columns
        self._pause = LIVE_SECONDS if live else PLAIN_SECONDS
        self._draw_at = now()  # at once
        self._last: tuple[int, float | None, Seconds, float] | None = None
        self._logged: dict[str, tuple[Any, int]] = {}  # and after how many steps
        self._marks: list[Sample] = []
        self._shown = ""  # the live line on the screen
        self._drawn_step = first_step
        self._drawn_before = first_step  # and of the line before
        self._open_line = False  # somebody else's line is not finished yet; see Aside
        self._gone = False

    def update(
        self, step: int, loss: float | None, samples: int, clock: Seconds, extra: Mapping[str, Any] | None = None
    ) -> None:
        """A step is over. Call it after every one.

        step     steps done in this run, this one included (1 after the first)
        loss     its loss
        samples  in its global batch
        clock    of this process
        extra    what the loop logged; a value is shown until a newer one of the same name comes, with its step
        """
        self.samples_seen += samples
        now = self._now()
        self._last = (step, loss, clock, now)
        if extra:
            self._logged.update({name: (value, step) for name, value in extra.items() if name != "loss"})
        if now >= self._draw_at or step == self.total_steps:
            self._draw_at = now + self._pause
            self._draw()

    def note(self, text: str) -> None:
        """Print a line (or several) of its own, above the live line."""
        unfinished = "\n" if self._open_line else ""
        self._open_line = False
        self._write(self._cleared() + unfinished + text.rstrip("\n") + "\n" + self._redrawn())

    def close(self) -> None:
        """Leave the last state as a plain line, and draw no more; closing twice changes nothing."""
        if self._last is not None and (self._live or self._last[0] != self._drawn_step):
            line = self._shown if self._shown and self._last[0] == self._drawn_step else self._line()
            self._write(self._cleared() + line + "\n")
        self._shown = ""
        self._last = None

    def _draw(self) -> None:
        if self._open_line:
            return
        line = self._line()
        if self._live:
            self._shown = line
            self._write(self._redrawn())
        else:
            self._write(line + "\n")

    def _cleared(self) -> str:
        return CLEAR if self._shown else ""

    def _redrawn(self) -> str:
        return f"\x1b[2K{self._shown}\r" if self._shown else ""

    def _write(self, text: str) -> None:
        if self._gone or not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal was closed, the pipe's reader went home: no reason to stop a training.
            self._gone = True

    def _line(self) -> str:
        """How far the run was at the last update; what came after it (an evaluation) is not in the speed."""
        assert self._last is not None
        step, loss, clock, now = self._last
        if step > self._drawn_step:  # the same step may be drawn again, at the end
            self._drawn_before, self._drawn_step = self._drawn_step, step
        here = Sample(now, step, self.samples_seen, clock.seconds["data"])
        fields = [Field(0, f"step {step}" + (f"/{self.total_steps}" if self.total_steps else ""), "1")]
        if loss is not None:
            fields.append(Field(1, f"loss {loss:.4f}"))
        for name, (value, at) in self._logged.items():
            fields.append(Field(3, f"{name} {_short(value)}" + (f" at step {at}" if at <= self._drawn_before else "")))
        if self._marks:
            recent = self._since(now - RECENT_SECONDS)
            if now > recent.time and step > recent.step:
                waiting = (here.data_seconds - recent.data_seconds) / (now - recent.time)
                fields.append(Field(4, f"{_rate((here.samples - recent.samples) / (now - recent.time))} samples/s"))
                fields.append(Field(5, f"data wait {waiting:.0%}", "33" if waiting > WAITS_TOO_LONG else ""))
        fields.append(Field(6, size(self._memory())))
        left = self._seconds_left(here)
        if left is not None:
            fields.append(Field(2, f"{duration(left)} left"))
        if not self._marks or step > self._marks[-1].step:
            self._marks.append(here)
            if len(self._marks) > 512:  # the past may be coarser than the present
                self._marks[1:256] = self._marks[1:256:2]
        return fit(fields, (terminal_width(self._stream, self._columns) - 1) if self._live else None, color=self._color)

    def _seconds_left(self, here: Sample) -> float | None:
        if self.total_steps is None or here.step >= self.total_steps:
            return None
        if not self._marks:  # the first step is slow in its own way; no guess from it
            return None
        since = self._since((self._marks[0].time + here.time) / 2)
        if here.step <= since.step:
            return None
        return (self.total_steps - here.step) * (here.time - since.time) / (here.step - since.step)

    def _since(self, time: float) -> Sample:
        """The latest mark that is as old as `time`, or else the first one."""
        return self._marks[max(0, bisect_right(self._marks, time, key=lambda mark: mark.time) - 1)]


class ProgressAwareStdout(io.TextIOBase):
    """Standard output for everybody else while a live line is on the screen: it gives way to what is printed.

    with contextlib.redirect_stdout(Aside(sys.stdout, progress)): ...
    """

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self.stream = stream
        self._progress = progress

    def write(self, text: str) -> int:
        progress = self._progress
        if progress._shown:
            progress._write(CLEAR)
            progress._shown = ""
            progress._draw_at = progress._now()  # the next step draws it again
        progress._open_line = not text.endswith("\n") if text else progress._open_line
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        self.write("".join(lines))

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding


def fit(fields: Iterable[Field], width: int | None, *, color: bool = False) -> str:
    """The fields on one line of at most `width` columns; the least important are left out where they do not fit."""
    kept = list(fields)
    while width is not None and len(kept) > 1 and sum(len(f.text) + 2 for f in kept) - 2 > width:
        kept.pop(max(range(len(kept)), key=lambda i: (kept[i].rank, i)))
    if width is not None and len(kept) == 1:
        kept = [kept[0]._replace(text=kept[0].text[: max(0, width)])]
    return "  ".join(f"\x1b[{f.style}m{f.text}\x1b[0m" if color and f.style else f.text for f in kept)


def terminal_width(stream: TextIO, known: int = 0) -> int:
    """Columns of the terminal behind `stream`; else what is known of it; else 80."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        columns = 0
    return columns or known or 80


def resident_bytes() -> int:
    """Main memory that this process holds."""
    rss: int = psutil.Process().memory_info().rss
    return rss


def duration(seconds: float) -> str:
    """0:42, 12:34, 3:00:05, and from two days on: 2d 03h."""
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
    if isinstance(value, (str, bool, int)):
        return str(value)
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError, RuntimeError):
        return str(value)
