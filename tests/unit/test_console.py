"""The console: rank 0 prints, other ranks print warnings only, and all of it appears above the progress line."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from unisono.monitor import console
from unisono.monitor.progress import Progress


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = (console.logger.level, console.logger.propagate)
    yield
    console.stop()
    assert (console.logger.level, console.logger.propagate) == before
    assert not any(
        isinstance(handler, console.RankHandler) for handler in console.logger.handlers
    )  # pytest adds some of its own


def test_only_rank_0_prints() -> None:
    for rank, said in [(0, "hello\n"), (1, "")]:
        stream = io.StringIO()
        console.start(rank, 2, stream)
        console.print_line("hello")
        assert stream.getvalue() == said


def test_a_record_names_its_level_and_its_rank() -> None:
    stream = io.StringIO()
    console.start(3, 4, stream)
    console.logger.info("seen %d samples", 7)
    console.logger.warning("slow")
    logging.getLogger("unisono.exchange").error("lost")
    console.logger.debug("not shown")
    assert stream.getvalue() == "rank 3: seen 7 samples\nwarning: rank 3: slow\nerror: rank 3: lost\n"


def test_a_single_process_prints_no_rank() -> None:
    stream = io.StringIO()
    console.start(0, 1, stream, level=logging.DEBUG)
    console.logger.debug("details")
    console.logger.info("as it is")
    assert stream.getvalue() == "debug: details\nas it is\n"


def test_text_is_printed_above_the_progress_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, True, 10, 0, memory=lambda: 0)
    console.start(0, 1, stream)
    console.route_logging(progress)
    console.print_line("one")
    console.logger.warning("two")
    console.route_logging(None)
    console.print_line("three")
    assert stream.getvalue() == "one\nwarning: two\nthree\n"


def test_characters_that_the_stream_does_not_know_are_replaced() -> None:
    raw = io.BytesIO()
    console.start(0, 1, io.TextIOWrapper(raw, encoding="latin-1"))
    console.print_line("3 → 4")
    console.print_line("after it")
    assert raw.getvalue() == b"3 ? 4\nafter it\n"


def test_before_the_start_text_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_line("early")
    console.start(0, 1)
    console.print_line("now")
    console.stop()
    console.stop()
    console.print_line("late")
    assert capsys.readouterr().out == "early\nnow\nlate\n"


def test_starting_again_replaces_the_handler() -> None:
    first, second = io.StringIO(), io.StringIO()
    console.start(0, 2, first)
    console.start(1, 2, second)
    console.logger.warning("once")
    assert first.getvalue() == ""
    assert second.getvalue() == "warning: rank 1: once\n"


def test_a_script_with_its_own_logging_prints_no_line_twice() -> None:
    stream, theirs = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(theirs)
    logging.getLogger().addHandler(handler)
    try:
        console.start(0, 1, stream)
        console.logger.warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == "warning: once\n"
    assert theirs.getvalue() == ""


def test_a_closed_stream_is_ignored() -> None:
    stream = io.StringIO()
    console.start(0, 1, stream)
    stream.close()
    console.print_line("into the void")


def test_an_exception_is_printed_with_its_traceback() -> None:
    stream = io.StringIO()
    console.start(0, 1, stream)
    try:
        raise ValueError("inner")
    except ValueError:
        console.logger.exception("outer")
    assert stream.getvalue().startswith("error: outer\nTraceback")
    assert stream.getvalue().endswith("ValueError: inner\n")
