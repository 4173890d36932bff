"""Lines of a width: prose is wrapped, and what is copied stays whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config.wording import wrapped
from unisono.environment import wants_color
from unisono.report.closing_lines import time_shares

COMMAND = "unisono run train.py --set steps=100 --set batch=64 --resume"


def test_a_command_is_on_a_line_of_its_own() -> None:
    text = f"The end of an epoch, after 7 steps, was not checked. Next: {COMMAND}"
    assert wrapped(text, 40) == f"The end of an epoch, after 7 steps, was\n  not checked.\n  Next: {COMMAND}"
    assert wrapped(text, 0) == text
    assert wrapped(f"  Next: {COMMAND}", 40) == f"  Next: {COMMAND}"


def test_tracebacks_stay_as_they_are() -> None:
    text = f'Traceback (most recent call last):\n  File "{"a" * 60}.py", line 1\n    {"x + " * 30}'
    assert wrapped(text, 40) == text


@given(st.lists(st.text("ab-", min_size=1, max_size=30), min_size=1, max_size=20), st.integers(32, 90))
def test_words_stay_whole_and_lines_fit(words: list[str], width: int) -> None:
    lines = wrapped(" ".join(words), width).split("\n")
    assert " ".join(lines).split() == words
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [50, 60, 80])
def test_the_table_of_phases_fits(width: int) -> None:
    seconds = {"checkpoint": 12345.0, "forward": 0.01, "exchange": 500.0}
    lines = time_shares(seconds, steps=123456, width=width).split("\n")
    assert max(map(len, lines)) <= width
    assert max(line.count("█") for line in lines) == min(32, width - 12 - len("checkpoint") - len("3:26 h") - 2)


@pytest.mark.parametrize(
    ("no_color", "force_color", "on_terminal", "elsewhere"),
    [
        (None, None, True, False),
        ("1", None, False, False),
        ("", None, True, False),
        (None, "1", True, True),
        (None, "0", True, False),
        ("1", "1", False, False),
    ],
)
def test_variables_choose_colors(
    monkeypatch: pytest.MonkeyPatch,
    no_color: str | None,
    force_color: str | None,
    on_terminal: bool,
    elsewhere: bool,
) -> None:
    for name, value in (("NO_COLOR", no_color), ("FORCE_COLOR", force_color)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert (wants_color(terminal=True), wants_color(terminal=False)) == (on_terminal, elsewhere)
