"""Texts of the progress line, and the fields that are left out if there is no space."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config import size
from unisono.monitor.progress import Field, duration, fit


@given(st.lists(st.builds(Field, st.integers(0, 9), st.text("abc ", max_size=30)), min_size=1), st.integers(1, 120))
def test_a_line_fits_any_width(fields: list[Field], width: int) -> None:
    line = fit(fields, width)
    assert len(line) <= width
    assert re.sub(r"\x1b\[\d*m", "", fit([f._replace(style="1") for f in fields], width, color=True)) == line
    whole = fit(fields, None)
    assert whole == "  ".join(f.text for f in fields)
    assert fit(fields, max(1, len(whole))) == whole


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (-3, "0:00"),
        (41.6, "0:42"),
        (59.7, "1:00"),
        (754, "12:34"),
        (10805, "3:00:05"),
        (172799, "47:59:59"),
        (172800, "2d 00h"),
        (270000, "3d 03h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (412e6, "412 MB"),
        (1.236e9, "1.24 GB"),
        (2e12, "2 TB"),
        (3e15, "3000 TB"),
    ],
)
def test_size(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
