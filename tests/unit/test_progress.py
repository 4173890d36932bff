"""watch/progress: what is on the screen, what is in a log, and the time left of the whole run."""

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


class Hands:
    """A clock for the line, and the seconds that waiting for data took; the test moves both."""

    def __init__(self) -> None:
        self.at = 50.0
        self.seconds = {"data": 0.0, "forward": 0.0}

    def __call__(self) -> float:
        return self.at


class Terminal:
    """A pseudo-terminal of some width, and what a person would see on it."""

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
        """The lines on the screen, without colours."""
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
def hands() -> Hands:
    return Hands()


def plain(hands: Hands, total: int | None = 200, first: int = 0) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(stream, False, total, first, memory=lambda: 412_000_000, now=hands), stream


def live(hands: Hands, stream: TextIO, total: int | None = 200) -> Progress:
    return Progress(stream, True, total, 0, memory=lambda: 412_000_000, now=hands)


def test_off_a_terminal_the_first_step_then_every_ten_seconds_and_the_last(hands: Hands) -> None:
    progress, stream = plain(hands, total=100)
    for step in range(1, 101):
        hands.at += 0.3
        progress.update(step, 2.0, 32, hands)
    progress.close()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "35/100", "69/100", "100/100"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_run_that_ends_early_shows_its_last_step(hands: Hands) -> None:
    progress, stream = plain(hands)
    for step in (1, 2, 3):
        progress.update(step, 2.0, 32, hands)
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/200", "3/200"]


@pytest.mark.parametrize("terminal_like", [False, True])
def test_what_comes_after_the_last_step_does_not_slow_it_down(hands: Hands, terminal_like: bool) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal_like, 3, 0, memory=lambda: 0, now=hands)
    for step in (1, 2, 3):
        hands.at += 1
        progress.update(step, 2.0, 32, hands)
    hands.at += 1000  # an evaluation, at the end
    progress.close()
    last = screen(stream.getvalue())[-2]
    assert last == "step 3/3  loss 2.0000  32 samples/s  data wait 0%  0 B"  # and nothing is left


def test_a_run_without_a_step_shows_nothing(hands: Hands) -> None:
    progress, stream = plain(hands)
    progress.close()
    assert stream.getvalue() == ""


def test_what_a_line_says(hands: Hands) -> None:
    progress, stream = plain(hands)
    progress.update(1, 3.25, 64, hands)
    for step in range(2, 102):
        hands.at += 0.125
        hands.seconds["data"] += 0.0125
        progress.update(step, 2.34567, 64, hands, {"lr": 3e-4, "loss": 9.0} if step == 50 else None)
    first, *_, last = stream.getvalue().splitlines()
    assert first == "step 1/200  loss 3.2500  412 MB"
    assert last == "step 81/200  loss 2.3457  lr 0.0003  512 samples/s  data wait 10%  412 MB  0:15 left"


def test_a_number_that_was_not_logged_since_the_last_line_says_how_old_it_is(hands: Hands) -> None:
    progress, stream = plain(hands)
    for step in range(1, 4):
        hands.at += 20
        progress.update(step, None, 1, hands, {"valid": 2.5} if step == 2 else {"lr": 0.1})
    assert [line.split("  ")[1:3] for line in stream.getvalue().splitlines()[1:]] == [
        ["lr 0.1 at step 1", "valid 2.5"],
        ["lr 0.1", "valid 2.5 at step 2"],
    ]


def test_a_line_that_is_drawn_again_tells_the_same(terminal: Terminal, hands: Hands) -> None:
    """The end of a run: the script prints something after its last step, and the line gives way and comes back."""
    progress = live(hands, terminal.stream, total=3)
    for step in (1, 2, 3):
        hands.at += 1
        progress.update(step, 2.0, 32, hands, {"valid": 2.5})
    (last,) = terminal.screen()
    with contextlib.redirect_stdout(ProgressAwareStdout(terminal.stream, progress)):
        print("done")
    progress.close()
    assert terminal.screen() == ["done", last, ""]
    assert "  valid 2.5  " in last


def test_a_run_of_unknown_length_has_no_time_left_and_a_loop_may_have_no_loss(hands: Hands) -> None:
    progress, stream = plain(hands, total=None)
    for step in (1, 2):
        hands.at += 20
        progress.update(step, None, 0, hands)
    assert stream.getvalue() == "step 1  412 MB\nstep 2  0 samples/s  data wait 0%  412 MB\n"


def test_a_resumed_run_counts_its_own_steps_only(hands: Hands) -> None:
    progress, stream = plain(hands, total=1000, first=900)
    for step in range(901, 912):
        hands.at += 10
        progress.update(step, 1.0, 8, hands)
    assert stream.getvalue().splitlines()[-1].endswith("14:50 left")  # 89 steps of 10 s
    assert progress.samples_seen == 88


def test_samples_of_an_earlier_process_do_not_make_this_one_faster(hands: Hands) -> None:
    stream = io.StringIO()
    progress = Progress(stream, False, 1000, 900, samples_seen=10**9, memory=lambda: 0, now=hands)
    for step in (901, 902, 903):
        hands.at += 10
        progress.update(step, 1.0, 40, hands)
    assert "  4 samples/s" in stream.getvalue()
    assert progress.samples_seen == 10**9 + 120


def test_a_slow_first_step_is_not_the_pace(hands: Hands) -> None:
    progress, stream = plain(hands, total=102)
    hands.at += 600  # a compiler, a cold disk
    progress.update(1, 1.0, 8, hands)
    hands.at += 10
    progress.update(2, 1.0, 8, hands)
    assert stream.getvalue().splitlines()[-1].endswith("16:40 left")  # 100 steps of 10 s


def test_a_run_that_became_faster_is_believed(hands: Hands) -> None:
    progress, stream = plain(hands, total=1000)
    for step in range(1, 101):
        hands.at += 10 if step <= 20 else 1
        progress.update(step, 1.0, 8, hands)
    hands.at += 10
    progress.update(101, 1.0, 8, hands)
    left = stream.getvalue().splitlines()[-1].split("  ")[-1]
    # from the beginning it would be 2.7 s a step, 40 minutes; the later half holds some slow steps still
    assert left == "34:49 left" or int(left.split(":")[0]) < 38


def test_what_happens_now_and_then_is_in_the_pace(hands: Hands) -> None:
    progress, stream = plain(hands, total=2000)
    for step in range(1, 1001):
        hands.at += 1 + (100 if step % 100 == 0 else 0)  # an evaluation as long as the steps before it
        progress.update(step, 1.0, 8, hands)
    progress.close()
    minutes = int(stream.getvalue().splitlines()[-1].split("  ")[-1].split(":")[0])
    assert 30 <= minutes <= 37  # 1000 steps of 2 s are 33 minutes


def test_a_long_run_remembers_a_bounded_past(hands: Hands) -> None:
    progress, _ = plain(hands, total=None)
    for step in range(1, 5001):
        hands.at += 10
        progress.update(step, 1.0, 8, hands)
    assert len(progress._past) <= 513
    assert progress._past[0].step == 1
    assert [sample.time for sample in progress._past] == sorted(sample.time for sample in progress._past)


def test_a_live_line_is_drawn_twice_a_second_and_ends_with_a_carriage_return(hands: Hands) -> None:
    stream = io.StringIO()
    progress = live(hands, stream)
    for step in range(1, 101):
        hands.at += 0.01
        progress.update(step, 2.0, 32, hands)
    drawn = stream.getvalue()
    assert drawn.count("step") == drawn.count("\r") == 2
    assert "\n" not in drawn
    progress.close()
    assert screen(stream.getvalue())[0].startswith("step 100/200")
    assert stream.getvalue().endswith("\n")


def test_what_is_left_for_a_log_without_the_live_segments(hands: Hands) -> None:
    stream = io.StringIO()
    progress = live(hands, stream)
    for step in range(1, 4):
        hands.at += 1
        progress.update(step, 2.0, 32, hands)
        progress.note(f"note {step}")
    progress.close()
    segments = re.findall(r"[^\r\n]*[\r\n]", stream.getvalue())
    kept = [segment for segment in segments if segment.endswith("\n")]
    assert kept[:3] == ["note 1\n", "note 2\n", "note 3\n"]
    assert len(kept) == 4
    assert kept[3].startswith("step 3/200")


def test_a_note_stands_above_the_live_line(terminal: Terminal, hands: Hands) -> None:
    progress = live(hands, terminal.stream)
    progress.note("before the first step")
    progress.update(1, 2.0, 32, hands)
    progress.note("valid 1.23\nand a second line\n")
    lines = terminal.screen()
    assert lines[:3] == ["before the first step", "valid 1.23", "and a second line"]
    assert lines[3].startswith("step 1/200")
    hands.at += 1
    progress.update(2, 2.0, 32, hands)
    progress.close()
    assert [line.split("  ")[0] for line in terminal.screen()] == [
        "before the first step",
        "valid 1.23",
        "and a second line",
        "step 2/200",
        "",
    ]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_a_live_line_never_wraps(columns: int, hands: Hands) -> None:
    terminal = Terminal(columns)
    try:
        progress = live(hands, terminal.stream, total=100_000)
        for step in range(99_000, 99_010):
            hands.at += 1
            progress.update(step, 2.0, 32, hands, {"accuracy": 0.5, "learning_rate": 1e-4})
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


def test_a_shorter_line_leaves_nothing_of_a_longer_one(terminal: Terminal, hands: Hands) -> None:
    progress = live(hands, terminal.stream)
    progress.update(1, 1e12, 32, hands)
    hands.at += 1
    progress.update(2, None, 32, hands)
    assert "loss" not in terminal.screen()[0]


def test_colours_only_where_they_are_wanted(hands: Hands) -> None:
    for color in (False, True):
        stream = io.StringIO()
        progress = Progress(stream, True, 10, 0, color=color, memory=lambda: 0, now=hands)
        progress.update(1, 1.0, 1, hands)
        hands.at += 1
        hands.seconds["data"] += 0.5
        progress.update(2, 1.0, 1, hands)
        assert ("\x1b[33mdata wait 50%\x1b[0m" in stream.getvalue()) == color
        assert ("\x1b[1m" in stream.getvalue()) == color


def test_the_environment_is_not_asked(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal(100)
    assert terminal_width(terminal.stream) == 100
    terminal.close()


def test_a_stream_that_is_no_terminal_has_some_width() -> None:
    assert terminal_width(io.StringIO()) == 80
    assert terminal_width(io.StringIO(), known=132) == 132  # what the launcher told us


def test_other_output_makes_the_line_give_way(terminal: Terminal, hands: Hands) -> None:
    progress = live(hands, terminal.stream)
    with contextlib.redirect_stdout(ProgressAwareStdout(terminal.stream, progress)):
        progress.update(1, 2.0, 32, hands)
        print("from the loop")
        sys.stdout.flush()
        assert terminal.screen() == ["from the loop", ""]
        progress.update(2, 2.0, 32, hands)  # drawn at once, though half a second has not passed
        assert terminal.screen()[1].startswith("step 2/200")
        print("half a ", end="")
        hands.at += 1
        progress.update(3, 2.0, 32, hands)  # not into somebody's unfinished line
        print("line")
        hands.at += 1
        progress.update(4, 2.0, 32, hands)
        sys.stdout.flush()
    assert terminal.screen()[:2] == ["from the loop", "half a line"]
    assert terminal.screen()[2].startswith("step 4/200")


def test_a_note_does_not_go_on_in_somebodys_unfinished_line(terminal: Terminal, hands: Hands) -> None:
    progress = live(hands, terminal.stream)
    aside = ProgressAwareStdout(terminal.stream, progress)
    aside.write("half a line")
    progress.note("a note")
    progress.note("another")
    assert terminal.screen() == ["half a line", "a note", "another", ""]


def test_aside_is_the_stream_in_all_other_respects(terminal: Terminal, hands: Hands) -> None:
    aside = ProgressAwareStdout(terminal.stream, live(hands, terminal.stream))
    assert aside.isatty()
    assert aside.fileno() == terminal.stream.fileno()
    assert aside.encoding == "utf-8"
    assert aside.writable()
    aside.writelines(["a", "b\n"])
    aside.flush()
    assert terminal.screen()[0] == "ab"


def test_a_reader_that_went_home_does_not_stop_the_training(hands: Hands) -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    os.close(reader)
    progress = Progress(stream, False, 10, 0, now=hands)
    for step in range(1, 11):
        hands.at += 20
        progress.update(step, 1.0, 1, hands)
    progress.note("nobody hears this")
    progress.close()
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    closed = io.StringIO()
    closed.close()
    Progress(closed, False, 10, 0, now=hands).update(1, 1.0, 1, hands)


def test_memory_is_that_of_this_process_by_default(hands: Hands) -> None:
    assert 1e6 < module.resident_bytes() < 1e12
    stream = io.StringIO()
    Progress(stream, False, 10, 0, now=hands).update(1, 1.0, 1, hands)
    assert stream.getvalue().rstrip().endswith("B")


def test_an_update_that_does_not_draw_asks_for_nothing(hands: Hands) -> None:
    """Its cost is that of a look at the clock: no memory, no seconds, no width."""

    class Refuses:
        @property
        def seconds(self) -> dict[str, float]:
            raise AssertionError("asked between two drawings")

    progress, _ = plain(hands)
    progress.update(1, 1.0, 1, hands)
    for step in range(2, 200):
        progress.update(step, 1.0, 1, Refuses())
