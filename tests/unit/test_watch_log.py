"""watch/log: rank 0 speaks, the others only when something is wrong, and never through the progress line."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from unisono.watch import log
from unisono.watch.progress import Progress


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = (log.logger.level, log.logger.propagate)
    yield
    log.stop()
    assert (log.logger.level, log.logger.propagate) == before
    assert not any(isinstance(handler, log.Voice) for handler in log.logger.handlers)  # pytest adds some of its own


def test_only_rank_0_says_things() -> None:
    for rank, said in [(0, "hello\n"), (1, "")]:
        stream = io.StringIO()
        log.start(rank, 2, stream)
        log.say("hello")
        assert stream.getvalue() == said


def test_a_record_names_its_level_and_its_rank() -> None:
    stream = io.StringIO()
    log.start(3, 4, stream)
    log.logger.info("seen %d samples", 7)
    log.logger.warning("slow")
    logging.getLogger("unisono.exchange").error("lost")
    log.logger.debug("not shown")
    assert stream.getvalue() == "rank 3: seen 7 samples\nwarning: rank 3: slow\nerror: rank 3: lost\n"


def test_a_lone_process_has_no_rank() -> None:
    stream = io.StringIO()
    log.start(0, 1, stream, level=logging.DEBUG)
    log.logger.debug("details")
    log.logger.info("as it is")
    assert stream.getvalue() == "debug: details\nas it is\n"


def test_words_go_above_the_progress_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, True, 10, 0, memory=lambda: 0)
    log.start(0, 1, stream)
    log.through(progress)
    log.say("one")
    log.logger.warning("two")
    log.through(None)
    log.say("three")
    assert stream.getvalue() == "one\nwarning: two\nthree\n"


def test_before_a_start_words_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    log.say("early")
    log.start(0, 1)
    log.say("now")
    log.stop()
    log.stop()
    log.say("late")
    assert capsys.readouterr().out == "early\nnow\nlate\n"


def test_starting_again_replaces_the_voice() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.start(0, 2, first)
    log.start(1, 2, second)
    log.logger.warning("once")
    assert first.getvalue() == ""
    assert second.getvalue() == "warning: rank 1: once\n"


def test_a_script_with_logging_of_its_own_does_not_see_lines_twice() -> None:
    stream, theirs = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(theirs)
    logging.getLogger().addHandler(handler)
    try:
        log.start(0, 1, stream)
        log.logger.warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == "warning: once\n"
    assert theirs.getvalue() == ""


def test_a_closed_stream_stops_nobody() -> None:
    stream = io.StringIO()
    log.start(0, 1, stream)
    stream.close()
    log.say("into the void")


def test_an_exception_is_told_with_its_traceback() -> None:
    stream = io.StringIO()
    log.start(0, 1, stream)
    try:
        raise ValueError("inner")
    except ValueError:
        log.logger.exception("outer")
    assert stream.getvalue().startswith("error: outer\nTraceback")
    assert stream.getvalue().endswith("ValueError: inner\n")
