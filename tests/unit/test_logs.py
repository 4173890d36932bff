"""Logs of all ranks are merged by time, and errors are whole."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.cli.logs.error_filter import ErrorFilter, is_error
from unisono.cli.logs.log_lines import LogLine, LogReader
from unisono.cli.logs.logs_command import MergedLogs
from unisono.launcher.rank_log import RankLog, append_failure
from unisono.launcher.rank_logging import RecordFormatter, SeenWarnings, read_head, stamp

RECORD = "2026-01-02 03:04:05.678 rank 2 step 17 "


def write_log(path: Path, pieces: Iterable[tuple[float, str]], monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Write a log whose pieces arrive at these times."""
    log = RankLog(path)
    with monkeypatch.context() as patch:
        for when, text in pieces:
            patch.setattr(time, "time", lambda when=when: when)
            log.write(text.encode())
        log.close(ending)


def texts(lines: Iterable[LogLine]) -> list[tuple[int, str]]:
    return [(line.rank, line.text if line.end is None else str(line.end)) for line in lines]


def merged(folder: Path, *ranks: int, errors: bool = False) -> MergedLogs:
    logs = MergedLogs(folder, ranks, errors=errors)
    assert logs.open_new()
    return logs


def errors_in(text: str, together: bool = False) -> str:
    """Return the lines of a log that are errors. Every line arrives alone, or all together."""
    chosen, errors = ErrorFilter(), list[LogLine]()
    for number, line in enumerate(textwrap.dedent(text).strip("\n").split("\n")):
        when = 1000.0 + (0 if together else number)
        errors += chosen.add(LogLine(when, when, 0, line))
    return "\n".join(line.text for line in errors)


def test_lines_of_all_ranks_are_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "log/rank-0.log", [(10, "a\nb\n"), (13, "c\n")], monkeypatch, "ended 0")
    write_log(tmp_path / "log/rank-1.log", [(11, "d\n"), (12, "e"), (14, "f\n")], monkeypatch, "ended 0")
    lines = list(merged(tmp_path).all_lines())
    assert texts(lines) == [(0, "a"), (0, "b"), (1, "d"), (0, "c"), (1, "ef")]
    assert [line.time for line in lines] == [10, 10, 11, 13, 14]
    assert texts(merged(tmp_path, 1).all_lines()) == [(1, "d"), (1, "ef")]
    assert lines[0].shown() == f"{stamp(10)} rank 0: a"


def test_a_record_is_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = f"{stamp(10.5)} rank 0 WARNING mine: record"
    pieces = [(10, "before\n"), (12, f"{record}\nafter\n")]  # the launcher was busy
    write_log(tmp_path / "log/rank-0.log", pieces, monkeypatch, "ended 0")
    write_log(tmp_path / "log/rank-1.log", [(11, "other\n")], monkeypatch, "ended 0")
    lines = list(merged(tmp_path).all_lines())
    assert texts(lines) == [(0, "before"), (0, record), (1, "other"), (0, "after")]
    assert [line.time for line in lines] == [10, 10.5, 11, 12]


def test_a_resumed_run_continues_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (10, 20):
        for rank in (0, 1):
            pieces = [(start + rank, f"rank {rank} of {start}\n")]
            write_log(tmp_path / f"log/rank-{rank}.log", pieces, monkeypatch, "died -9" if rank else "stopped -15")
    died = "died of signal 9 (SIGKILL)"
    expected = [
        (0, "rank 0 of 10"),
        (1, "rank 1 of 10"),
        (1, died),
        (0, "rank 0 of 20"),
        (1, "rank 1 of 20"),
        (1, died),
    ]
    assert texts(merged(tmp_path).all_lines()) == expected


def test_a_traceback_that_the_launcher_appends_has_the_time_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log/rank-0.log"
    write_log(path, [(10, "before\n")], monkeypatch, "failed 1")
    append_failure(path, "ValueError: no\n", 11.0)
    lines = list(merged(tmp_path).all_lines())
    assert [(line.time, line.text) for line in lines] == [(10.0, "before"), (11.0, "ValueError: no")]


def test_without_marks_records_give_the_time(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/rank-0.log").write_text(f"first\n{stamp(100)} rank 0 WARNING a: one\nafter\n")
    (tmp_path / "log/rank-1.log").write_text(f"{stamp(90)} rank 1 WARNING a: two\n{stamp(110)} rank 1 WARNING a: three")
    found = list(merged(tmp_path).all_lines())
    assert [text.rpartition(" ")[2] for _, text in texts(found)] == ["first", "two", "one", "after", "three"]
    assert found[0].shown() == "rank 0: first"
    assert found[1].shown() == f"{stamp(90)} rank 1 WARNING a: two"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=12)), max_size=30),
    st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_every_line_is_read_once_while_logs_grow(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bytes]], looks: list[bool]
) -> None:
    folder = tmp_path_factory.mktemp("grows")
    logs = {rank: RankLog(folder / f"log/rank-{rank}.log") for rank in range(3)}
    readers = {rank: LogReader(log.path, rank) for rank, log in logs.items()}
    found: dict[int, list[str]] = {rank: [] for rank in logs}
    for rank, piece in pieces:
        logs[rank].write(piece)
        if looks.pop():
            found[rank] += [line.text for line in readers[rank].new_lines()]
    for log in logs.values():
        log.close("ended 0")
    for rank, log in logs.items():
        found[rank] += [line.text for line in readers[rank].new_lines()]
        whole = log.path.read_bytes().decode(errors="replace").split("\n")[:-1]
        assert found[rank] == [line.rstrip("\r") for line in whole]


def test_a_printed_head_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may print what looks like a record: of another rank, of another time, with a number of any length."""
    now = 1_760_000_000.0
    forged = [
        "9999-01-01 00:00:00.000 rank 7 step 1 WARNING x: y",
        "9999-01-01 00:00:00.000 rank 0 step 1 WARNING x: y",
        "1999-01-01 00:00:00.000 rank 0 ERROR x: y",
        f"{stamp(now)} rank 7 WARNING x: y",
        f"{stamp(now)} rank {'7' * 5000} WARNING x: y",
        f"{stamp(now)} rank 0 step {'7' * 5000} WARNING x: y",
    ]
    record = f"{stamp(now + 5)} rank 0 step 1 WARNING x: y"
    for marks in (True, False):
        text = "\n".join([*forged[: None if marks else 2], record, "after", ""])
        write_log(tmp_path / "log/rank-0.log", [(now + 5, text)], monkeypatch, "ended 0")
        if not marks:
            (tmp_path / "log/rank-0.times").unlink()
        *before, real, after = merged(tmp_path).all_lines()
        begin = f"{stamp(now + 5)} rank 0: " if marks else "rank 0: "
        assert [line.shown() for line in before] == [begin + line for line in forged[: len(before)]]
        assert {json.loads(line.as_json()).get("level") for line in before} == {None}
        assert (real.shown(), after.shown()) == (record, f"{stamp(now + 5)} rank 0: after")
        (tmp_path / "log/rank-0.log").unlink()


def test_control_characters_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    title = "\x1b]0;title\x07\x1b[2J\ta\x9b2J\x1b[31mb"
    write_log(tmp_path / "log/rank-0.log", [(10, f"{title}\n")], monkeypatch, "ended 0")
    (line,) = merged(tmp_path).all_lines()
    assert line.shown() == rf"{stamp(10)} rank 0: \x1b]0;title\x07\x1b[2J" + "\ta\\x9b2Jb"


# -- errors


def test_a_traceback_is_whole() -> None:
    chained = """
    Traceback (most recent call last):
      File "a.py", line 1, in <module>
        f()
        ^^^
    KeyError: 'x'

    During handling of the above exception, another exception occurred:

    Traceback (most recent call last):
      File "a.py", line 3, in <module>
        g()
    ValueError: the first line
      Next: an indented one
    """
    expected = textwrap.dedent(chained).strip("\n")
    assert errors_in(f"    step 1\n{chained.rstrip()}\n    step 2\n\n    step 3") == expected
    together = f"{chained.rstrip()}\n    and a third one"
    assert errors_in(together, together=True) == textwrap.dedent(together).strip("\n")


def test_groups_of_exceptions_and_crashes_are_whole() -> None:
    group = """
      + Exception Group Traceback (most recent call last):
      |   File "a.py", line 1, in <module>
      | ExceptionGroup: several (1 sub-exception)
      +-+---------------- 1 ----------------
        | ValueError: one
        +------------------------------------
    """
    text = textwrap.dedent(group).strip("\n")
    assert errors_in(f"{text}\nafter") == text + "\nafter"  # the line after frames is taken for the message
    crash = 'Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n  File "a.py", line 1 in f'
    assert errors_in(f"before\n{crash}\nafter") == crash.replace("\n\n", "\n\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (RECORD + "ERROR mine: text", True),
        (RECORD + "CRITICAL mine: text", True),
        (RECORD + "WARNING mine: an ERROR", False),
        ("ERROR:root:no", True),
        ("2026-01-02 03:04:05,678 - mine - ERROR - no", True),
        ("[ERROR] no", True),
        ("[rank1]:E1125 14:00:00.000000 12 torch/x.py:1] no", True),
        ("error: rank 3: no", True),
        ("WARNING:root:careful", False),
        ("loss 0.1, relative error: 0.2", False),
        ("ERRORS 0", False),
        ("the level is 'ERROR'", False),
    ],
)
def test_levels(line: str, expected: bool) -> None:
    assert is_error(line) == expected


def test_a_dead_process_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [(number, f"line {number}\n") for number in range(30)]
    write_log(tmp_path / "log/rank-0.log", [*pieces, (25, "ERROR:root:no\n")], monkeypatch, "died -11")
    write_log(tmp_path / "log/rank-1.log", pieces, monkeypatch, "stopped -15")
    found = texts(merged(tmp_path, errors=True).all_lines())
    last = [f"line {number}" for number in range(21, 30)]
    assert found == [(0, text) for text in ["ERROR:root:no", "died of signal 11 (SIGSEGV)", *last]]


# -- records


def test_records_have_time_rank_and_step_and_are_indented() -> None:
    try:
        raise ValueError("no\ngood")
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, __file__, 1, "one\n%s", ("two",), sys.exc_info())
    text = RecordFormatter(3).format(record)
    head = read_head(text)
    assert head is not None
    assert (head.rank, head.step, head.level, head.logger) == (3, None, "ERROR", "a.b")
    assert abs(head.time - record.created) < 0.001
    assert all(line.startswith("  ") for line in text.split("\n")[1:])
    assert errors_in(f"{text}\nafter", together=True) == text


def test_a_warning_is_new_once() -> None:
    seen = SeenWarnings()
    assert [seen.add(text) for text in ("a", "b", "a", "b")] == [True, True, False, False]


def program(text: str, tmp_path: Path) -> tuple[list[str], list[str]]:
    """Run a program as rank 1. Return what it prints, and its log if the launcher does not write it."""
    start = "import logging, os, sys, warnings\nfrom pathlib import Path\nfrom unisono.launcher import rank_logging\n"
    (tmp_path / "program.py").write_text(start + textwrap.dedent(text))
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    log = tmp_path / "rank-1.log"
    return done.stderr.splitlines(), log.read_text().splitlines() if log.exists() else []


def test_a_script_that_configures_logging_keeps_its_form(tmp_path: Path) -> None:
    err, log = program(
        """
        rank_logging.start(1, Path("rank-1.log"), launched=True)
        logging.getLogger("bare").warning("before")
        logging.basicConfig(level=logging.INFO, format="<%(levelname)s %(message)s>")
        logging.getLogger("bare").info("after")
        logging.captureWarnings(True)
        warnings.warn("captured")
        rank_logging.stop()
        """,
        tmp_path,
    )
    assert err[0].endswith(" rank 1 WARNING bare: before")
    assert err[1] == "<INFO after>"
    assert err[2].startswith("<WARNING ")
    assert "UserWarning: captured" in err[2]
    assert log == []


def test_a_library_without_a_form_gets_that_of_records(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'unisono[huggingface]'")
    err, _ = program(
        """
        from transformers.utils import logging as theirs
        own = logging.getLogger("program")
        own.addHandler(logging.StreamHandler())
        rank_logging.start(1, Path("rank-1.log"), launched=True)
        theirs.get_logger("transformers.models").warning("be careful")
        own.warning("in my own form")
        rank_logging.stop()
        theirs.get_logger("transformers.models").warning("as before")
        theirs.enable_explicit_format()
        rank_logging.start(1, Path("rank-1.log"), launched=True)
        theirs.get_logger("transformers.models").warning("in a form that the script has chosen")
        """,
        tmp_path,
    )
    assert err[-1].startswith("[WARNING|")
    assert err[-4].endswith(" rank 1 WARNING transformers.models: be careful")
    assert err[-3:-1] == ["in my own form", "[transformers] as before"]


@pytest.mark.parametrize(("rank", "launched", "shown", "logged"), [(1, True, 1, 0), (1, False, 0, 1), (0, False, 1, 1)])
def test_warnings_are_printed_by_rank_0_or_for_our_launcher(
    tmp_path: Path, rank: int, launched: bool, shown: int, logged: int
) -> None:
    err, log = program(
        f"""
        rank_logging.start({rank}, Path("rank-1.log"), launched={launched})
        for i in range(3):
            warnings.warn("old")
        """,
        tmp_path,
    )
    assert (len(err), len(log)) == (shown, logged)
    assert all(line.endswith("UserWarning: old") for line in err + log)


def test_a_warning_of_several_children_is_printed_once(tmp_path: Path) -> None:
    err, log = program(
        """
        rank_logging.start(1, Path("rank-1.log"), launched=True)
        for child in range(3):
            if not os.fork():
                warnings.warn_explicit("old", UserWarning, "program.py", 7)
                os._exit(0)
            os.wait()
        warnings.simplefilter("always")
        warnings.warn_explicit("old", UserWarning, "program.py", 7)
        for i in range(2):
            warnings.warn_explicit("new", UserWarning, "program.py", 8)
        """,
        tmp_path,
    )
    assert [line.rpartition(": ")[2] for line in err] == ["old", "new", "new"]
    assert [line.rpartition(": ")[2] for line in log] == ["old"] * 3
