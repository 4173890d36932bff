"""The progress line: its content on a terminal and in a log, and the remaining time of the whole run."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import struct
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from unisono.monitor import progress as module
from unisono.monitor.progress import Progress, ProgressAwareStdout, terminal_width


class FakeClock:
    """A clock, and the seconds of each phase; the test sets both."""

    def __init__(self) -> None:
        self.at = 50.0
        self.seconds = {"data": 0.0, "forward": 0.0}

    def __call__(self) -> float:
        return self.at


class Terminal:
    """A pseudo-terminal of some width, and the lines that it shows."""

    def __init__(self, columns: int) -> None:
        self.reader, writer = os.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        os.set_blocking(self.reader, False)
        self.raw = ""

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reader, 65536):
                self.raw += data.decode()
        return self.raw

    def screen(self) -> list[str]:
        """Return the lines on the screen, without colors."""
        return screen(self.read())

    def close(self) -> None:
        self.stream.close()
        os.close(self.reader)


def screen(raw: str) -> list[str]:
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[a-zA-Z]|.", raw, re.DOTALL):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal(80)
    yield terminal
    terminal.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def plain(clock: FakeClock, total: int | None = 200, first: int = 0) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(stream, False, total, first, memory=lambda: 412_000_000, now=clock), stream


def live(clock: FakeClock, stream: TextIO, total: int | None = 200) -> Progress:
    return Progress(stream, True, total, 0, memory=lambda: 412_000_000, now=clock)


def test_plain_lines_come_after_three_seconds_then_every_ten_and_at_the_end(clock: FakeClock) -> None:
    progress, stream = plain(clock, total=100)
    for step in range(1, 101):
        clock.at += 0.3
        progress.update(step, 2.0, 32, clock)
    progress.close()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "12/100", "46/100", "80/100", "100/100"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_run_that_ends_early_shows_its_last_step(clock: FakeClock) -> None:
    progress, stream = plain(clock)
    for step in (1, 2, 3):
        progress.update(step, 2.0, 32, clock)
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/200", "3/200"]


@pytest.mark.parametrize("terminal_like", [False, True])
def test_time_after_the_last_step_does_not_count_in_the_speed(clock: FakeClock, terminal_like: bool) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal_like, 3, 0, memory=lambda: 0, now=clock)
    for step in (1, 2, 3):
        clock.at += 1
        progress.update(step, 2.0, 32, clock)
    clock.at += 1000  # an evaluation, at the end
    progress.close()
    last = screen(stream.getvalue())[-2]
    assert last == "step 3/3  loss 2.0000  32 samples/s  data wait 0%  0 B"  # and no remaining time


def test_a_run_without_a_step_shows_nothing(clock: FakeClock) -> None:
    progress, stream = plain(clock)
    progress.close()
    assert stream.getvalue() == ""


def test_the_fields_of_a_line(clock: FakeClock) -> None:
    progress, stream = plain(clock)
    progress.update(1, 3.25, 64, clock)
    for step in range(2, 126):
        clock.at += 0.125
        clock.seconds["data"] += 0.0125
        progress.update(step, 2.34567, 64, clock, {"lr": 3e-4, "loss": 9.0} if step == 50 else None)
    first, *_, last = stream.getvalue().splitlines()
    assert first == "step 1/200  loss 3.2500  412 MB"
    assert last == "step 105/200  loss 2.3457  lr 0.0003  512 samples/s  data wait 10%  412 MB  0:12 left"


def test_a_logged_text_is_short_and_one_line(clock: FakeClock) -> None:
    progress, stream = plain(clock)
    progress.update(1, None, 1, clock, {"a": "x" * 1000, "b\n": "\x1b[2Jy\n", "c": ["z"] * 1000})
    assert stream.getvalue() == f"step 1/200  a {'x' * 79}…  b   [2Jy   c {str(['z'] * 1000)[:79]}…  412 MB\n"


def test_an_older_logged_value_is_shown_with_its_step(clock: FakeClock) -> None:
    progress, stream = plain(clock)
    for step in range(1, 4):
        clock.at += 20
        progress.update(step, None, 1, clock, {"valid": 2.5} if step == 2 else {"lr": 0.1})
    assert [line.split("  ")[1:3] for line in stream.getvalue().splitlines()[1:]] == [
        ["lr 0.1 at step 1", "valid 2.5"],
        ["lr 0.1", "valid 2.5 at step 2"],
    ]


def test_a_line_that_is_drawn_again_is_unchanged(terminal: Terminal, clock: FakeClock) -> None:
    """At the end of a run, the script prints after its last step. The line is removed and drawn again."""
    progress = live(clock, terminal.stream, total=3)
    for step in (1, 2, 3):
        clock.at += 1
        progress.update(step, 2.0, 32, clock, {"valid": 2.5})
    (last,) = terminal.screen()
    with contextlib.redirect_stdout(ProgressAwareStdout(terminal.stream, progress)):
        print("done")
    progress.close()
    assert terminal.screen() == ["done", last, ""]
    assert "  valid 2.5  " in last


def test_without_total_steps_there_is_no_time_left(clock: FakeClock) -> None:
    progress, stream = plain(clock, total=None)
    for step in (1, 2):
        clock.at += 20
        progress.update(step, None, 0, clock)
    assert stream.getvalue() == "step 1  412 MB\nstep 2  0 samples/s  data wait 0%  412 MB\n"


def test_a_resumed_run_counts_its_own_steps_only(clock: FakeClock) -> None:
    progress, stream = plain(clock, total=1000, first=900)
    for step in range(901, 912):
        clock.at += 10
        progress.update(step, 1.0, 8, clock)
    assert stream.getvalue().splitlines()[-1].endswith("14:50 left")  # 89 steps of 10 s
    assert progress.samples_seen == 88


def test_samples_of_an_earlier_process_do_not_count_in_the_speed(clock: FakeClock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, False, 1000, 900, samples_seen=10**9, memory=lambda: 0, now=clock)
    for step in (901, 902, 903):
        clock.at += 10
        progress.update(step, 1.0, 40, clock)
    assert "  4 samples/s" in stream.getvalue()
    assert progress.samples_seen == 10**9 + 120


def test_the_first_step_does_not_count_in_the_time_left(clock: FakeClock) -> None:
    progress, stream = plain(clock, total=102)
    clock.at += 600  # a compiler, a cold disk
    progress.update(1, 1.0, 8, clock)
    clock.at += 10
    progress.update(2, 1.0, 8, clock)
    assert stream.getvalue().splitlines()[-1].endswith("16:40 left")  # 100 steps of 10 s


def test_the_time_left_follows_a_change_of_speed(clock: FakeClock) -> None:
    progress, stream = plain(clock, total=1000)
    for step in range(1, 101):
        clock.at += 10 if step <= 20 else 1
        progress.update(step, 1.0, 8, clock)
    clock.at += 10
    progress.update(101, 1.0, 8, clock)
    left = stream.getvalue().splitlines()[-1].split("  ")[-1]
    # from the beginning it would be 2.7 s a step, 40 minutes; the later half holds some slow steps still
    assert left == "34:49 left" or int(left.split(":")[0]) < 38


def test_evaluations_count_in_the_time_left(clock: FakeClock) -> None:
    progress, stream = plain(clock, total=2000)
    for step in range(1, 1001):
        clock.at += 1 + (100 if step % 100 == 0 else 0)  # an evaluation as long as the steps before it
        progress.update(step, 1.0, 8, clock)
    progress.close()
    minutes = int(stream.getvalue().splitlines()[-1].split("  ")[-1].split(":")[0])
    assert 30 <= minutes <= 37  # 1000 steps of 2 s are 33 minutes


def test_a_long_run_keeps_a_bounded_number_of_samples(clock: FakeClock) -> None:
    progress, _ = plain(clock, total=None)
    for step in range(1, 5001):
        clock.at += 10
        progress.update(step, 1.0, 8, clock)
    assert len(progress._past) <= 513
    assert progress._past[0].step == 1
    assert [sample.time for sample in progress._past] == sorted(sample.time for sample in progress._past)


def test_a_live_line_is_drawn_twice_a_second_and_ends_with_a_carriage_return(clock: FakeClock) -> None:
    stream = io.StringIO()
    progress = live(clock, stream)
    for step in range(1, 101):
        clock.at += 0.01
        progress.update(step, 2.0, 32, clock)
    drawn = stream.getvalue()
    assert drawn.count("step") == drawn.count("\r") == 2
    assert "\n" not in drawn
    progress.close()
    assert screen(stream.getvalue())[0].startswith("step 100/200")
    assert stream.getvalue().endswith("\n")


def test_a_log_contains_no_live_lines(clock: FakeClock) -> None:
    stream = io.StringIO()
    progress = live(clock, stream)
    for step in range(1, 4):
        clock.at += 1
        progress.update(step, 2.0, 32, clock)
        progress.note(f"note {step}")
    progress.close()
    segments = re.findall(r"[^\r\n]*[\r\n]", stream.getvalue())
    kept = [segment for segment in segments if segment.endswith("\n")]
    assert kept[:3] == ["note 1\n", "note 2\n", "note 3\n"]
    assert len(kept) == 4
    assert kept[3].startswith("step 3/200")


def test_a_note_is_printed_above_the_live_line(terminal: Terminal, clock: FakeClock) -> None:
    progress = live(clock, terminal.stream)
    progress.note("before the first step")
    progress.update(1, 2.0, 32, clock)
    progress.note("valid 1.23\nand a second line\n")
    lines = terminal.screen()
    assert lines[:3] == ["before the first step", "valid 1.23", "and a second line"]
    assert lines[3].startswith("step 1/200")
    clock.at += 1
    progress.update(2, 2.0, 32, clock)
    progress.close()
    assert [line.split("  ")[0] for line in terminal.screen()] == [
        "before the first step",
        "valid 1.23",
        "and a second line",
        "step 2/200",
        "",
    ]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_a_live_line_never_wraps(columns: int, clock: FakeClock) -> None:
    terminal = Terminal(columns)
    try:
        progress = live(clock, terminal.stream, total=100_000)
        for step in range(99_000, 99_010):
            clock.at += 1
            progress.update(step, 2.0, 32, clock, {"accuracy": 0.5, "learning_rate": 1e-4})
        assert terminal_width(terminal.stream) == columns
        lines = terminal.screen()
        assert len(lines) == 1
        assert 0 < len(lines[0]) < columns
        assert lines[0].startswith("step 99009/100000")
        assert ("left" in lines[0]) == (columns >= 60)
        assert ("accuracy 0.5" in lines[0]) == (columns >= 60)
        assert ("412 MB" in lines[0]) == (columns >= 200)
        progress.close()
    finally:
        terminal.close()


def test_a_shorter_line_clears_a_longer_one(terminal: Terminal, clock: FakeClock) -> None:
    progress = live(clock, terminal.stream)
    progress.update(1, 1e12, 32, clock)
    clock.at += 1
    progress.update(2, None, 32, clock)
    assert "loss" not in terminal.screen()[0]


def test_colors_are_optional(clock: FakeClock) -> None:
    for color in (False, True):
        stream = io.StringIO()
        progress = Progress(stream, True, 10, 0, color=color, memory=lambda: 0, now=clock)
        progress.update(1, 1.0, 1, clock)
        clock.at += 1
        clock.seconds["data"] += 0.5
        progress.update(2, 1.0, 1, clock)
        assert ("\x1b[33mdata wait 50%\x1b[0m" in stream.getvalue()) == color
        assert ("\x1b[1m" in stream.getvalue()) == color


def test_environment_variables_are_ignored(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal(100)
    assert terminal_width(terminal.stream) == 100
    terminal.close()


def test_the_width_of_a_stream_that_is_no_terminal() -> None:
    assert terminal_width(io.StringIO()) == 80
    assert terminal_width(io.StringIO(), known=132) == 132  # the width from the launcher


def test_the_line_makes_way_for_other_output(terminal: Terminal, clock: FakeClock) -> None:
    progress = live(clock, terminal.stream)
    with contextlib.redirect_stdout(ProgressAwareStdout(terminal.stream, progress)):
        progress.update(1, 2.0, 32, clock)
        print("from the loop")
        sys.stdout.flush()
        assert terminal.screen() == ["from the loop", ""]
        progress.update(2, 2.0, 32, clock)  # drawn at once, though half a second has not passed
        assert terminal.screen()[1].startswith("step 2/200")
        print("half a ", end="")
        clock.at += 1
        progress.update(3, 2.0, 32, clock)  # not drawn into an unfinished line
        print("line")
        clock.at += 1
        progress.update(4, 2.0, 32, clock)
        sys.stdout.flush()
    assert terminal.screen()[:2] == ["from the loop", "half a line"]
    assert terminal.screen()[2].startswith("step 4/200")


def test_a_note_does_not_continue_an_unfinished_line(terminal: Terminal, clock: FakeClock) -> None:
    progress = live(clock, terminal.stream)
    wrapper = ProgressAwareStdout(terminal.stream, progress)
    wrapper.write("half a line")
    progress.note("a note")
    progress.note("another")
    assert terminal.screen() == ["half a line", "a note", "another", ""]


def test_the_wrapper_passes_other_attributes_to_the_stream(terminal: Terminal, clock: FakeClock) -> None:
    wrapper = ProgressAwareStdout(terminal.stream, live(clock, terminal.stream))
    assert wrapper.isatty()
    assert wrapper.fileno() == terminal.stream.fileno()
    assert wrapper.encoding == "utf-8"
    assert wrapper.writable()
    wrapper.writelines(["a", "b\n"])
    wrapper.flush()
    assert terminal.screen()[0] == "ab"


def test_a_closed_pipe_does_not_stop_training(clock: FakeClock) -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    os.close(reader)
    progress = Progress(stream, False, 10, 0, now=clock)
    for step in range(1, 11):
        clock.at += 20
        progress.update(step, 1.0, 1, clock)
    progress.note("discarded")
    progress.close()
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    closed = io.StringIO()
    closed.close()
    Progress(closed, False, 10, 0, now=clock).update(1, 1.0, 1, clock)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("latin-1", "é ? x ?"), ("ascii", "? ? x ?"), ("utf-8", "é → x ?"), ("utf-16", "é → x ?")],
    ids=["latin-1", "ascii", "utf-8", "utf-16"],
)
def test_characters_that_the_stream_does_not_know_are_replaced(clock: FakeClock, encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    progress = Progress(io.TextIOWrapper(raw, encoding=encoding, newline=""), False, 10, 0, now=clock)
    progress.note("é → x \ud800")
    progress.note("after it")
    lines = raw.getvalue().decode(encoding).replace("\ufeff", "").splitlines()
    assert lines == [shown, "after it"]


def test_resident_memory_is_shown_by_default(clock: FakeClock) -> None:
    assert 1e6 < module.resident_bytes() < 1e12
    stream = io.StringIO()
    Progress(stream, False, 10, 0, now=clock).update(1, 1.0, 1, clock)
    assert stream.getvalue().rstrip().endswith("B")


def test_an_update_between_two_drawings_reads_only_the_clock(clock: FakeClock) -> None:
    """Neither memory, seconds nor the width of the terminal are read."""

    class Refuses:
        @property
        def seconds(self) -> dict[str, float]:
            raise AssertionError("read between two drawings")

    progress, _ = plain(clock)
    progress.update(1, 1.0, 1, clock)
    for step in range(2, 200):
        progress.update(step, 1.0, 1, Refuses())
