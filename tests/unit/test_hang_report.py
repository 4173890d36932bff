"""The diagnosis of a hang, and the position of a thread."""

from __future__ import annotations

import linecache
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.launcher.hang_report import ReportBackoff, judge
from unisono.launcher.status_file import ProcessStatus, is_own, line_of, read
from unisono.monitor.flight_recorder import describe_call
from unisono.monitor.status_thread import describe_frame

STILL = ProcessStatus(rank=0, size=3, pid=1, host="here", written=0.0, idle=70.0, step=4, limit=60.0, share=0.0)
WAITS = replace(STILL, phase="exchange", waits="others", call="all_reduce #7 of float32[3]", where="a.py:3 in main")


def test_a_status_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    status = replace(WAITS, workers=("one", "two"))
    assert read(tmp_path / "rank-0.status") is None
    status.write(tmp_path / "rank-0.status")
    assert read(tmp_path / "rank-0.status") == status
    (tmp_path / "rank-0.status").write_text("{")
    assert read(tmp_path / "rank-0.status") is None


def test_there_is_no_hang_while_a_process_makes_progress() -> None:
    assert judge([WAITS, replace(STILL, rank=1, idle=59.0)]) is None
    assert judge([replace(WAITS, limit=0.0)]) is None
    assert judge([WAITS, replace(STILL, rank=1, waits="person")]) is None, "a person debugs"
    assert judge([WAITS, replace(WAITS, rank=1, limit=180.0)]) is None, "it is in its first step"


def test_a_rank_that_does_not_wait_is_to_blame() -> None:
    diagnosis = judge([WAITS, replace(STILL, rank=1, where="b.py:9 in f", code="g()"), replace(WAITS, rank=2)])
    assert diagnosis is not None
    assert diagnosis.guilty == (1,)
    assert diagnosis.then == "end"
    message = str(diagnosis.error)
    assert message.startswith(
        "Step 4 makes no progress.\n  No process has made progress for 70 s. Ranks 0 and 2 wait for rank 1: it sleeps"
    )
    assert "at b.py:9 in f (g())." in message
    assert len([line for line in message.splitlines() if line.startswith("    ")]) == 4


def test_a_computing_rank_is_slow_and_the_run_is_not_ended() -> None:
    diagnosis = judge([WAITS, replace(STILL, rank=1, share=0.9), replace(WAITS, rank=2)])
    assert diagnosis is not None
    assert (diagnosis.guilty, diagnosis.works, diagnosis.then) == ((1,), True, "wait")
    assert "it computes" in str(diagnosis.error)
    waiting = judge([replace(WAITS, share=1.0), replace(STILL, rank=1)])  # waiting for a device uses a whole core
    assert waiting is not None
    assert waiting.then == "end"


def test_if_all_wait_the_rank_in_another_place_is_to_blame() -> None:
    odd = replace(WAITS, rank=2, call="barrier #7", where="a.py:8 in main")
    diagnosis = judge([WAITS, replace(WAITS, rank=1), odd])
    assert diagnosis is not None
    assert diagnosis.guilty == (2,)
    assert "rank 0 waits in all_reduce #7 of float32[3] at a.py:3 in main; rank 2 waits in barrier" in str(
        diagnosis.error
    )
    both = judge([WAITS, replace(odd, rank=1)])
    assert both is not None
    assert both.guilty == (0, 1)
    same = judge([WAITS, replace(WAITS, rank=1, call="all_reduce #8 of float32[3]")])
    assert same is not None
    assert same.guilty == ()


def test_a_hang_is_reported_with_exponential_backoff() -> None:
    backoff = ReportBackoff()
    assert [backoff.is_due(idle) for idle in (10, 11, 19, 20, 39, 41)] == [True, False, False, True, False, True]
    backoff.reset()
    assert backoff.is_due(10)


def test_the_line_of_a_thread() -> None:
    here, gone = threading.Event(), threading.Event()

    def waits() -> None:
        here.set()
        gone.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    here.wait()
    assert thread.ident is not None
    where, code, whom = describe_frame(sys._current_frames()[thread.ident])
    gone.set()
    thread.join()
    assert where.startswith("test_hang_report.py:")
    assert where.endswith("in waits")
    assert code in ("here.set()", "gone.wait()")
    assert whom == ""
    assert describe_frame(None) == ("", "", "")


def test_a_process_that_waits_for_input_does_not_hang() -> None:
    scope: dict[str, Any] = {"sys": sys, "stands": describe_frame, "input": lambda place: place}
    source = "def asks():\n    return input(stands(sys._getframe()))\n"
    linecache.cache["prompt.py"] = (len(source), None, source.splitlines(keepends=True), "prompt.py")
    exec(compile(source, "prompt.py", "exec"), scope)
    assert scope["asks"]() == ("prompt.py:2 in asks", "return input(stands(sys._getframe()))", "person")


def test_the_line_in_a_stack_of_faulthandler() -> None:
    stacks = (
        'Thread 0x00000000000000ff (most recent call first):\n  File "/home/me/other.py", line 1 in x\n\n'
        f'Thread 0x0000000000000abc (most recent call first):\n  File "{threading.__file__}", line 3 in wait\n'
        '  File "/home/me/data.py", line 33 in __getitem__\n  File "/home/me/data.py", line 40 in main\n'
    )
    assert line_of(stacks, 0xABC) == "data.py:33 in __getitem__"
    assert line_of(stacks, 0x1) == ""
    assert not is_own(threading.__file__)
    assert not is_own(pytest.__file__)
    assert is_own(__file__)


def test_the_description_of_a_collective() -> None:
    entry = {
        "profiling_name": "gloo:all_reduce",
        "process_group": ["0", "default_pg"],
        "is_p2p": False,
        "collective_seq_id": 8,
        "p2p_seq_id": 0,
        "input_dtypes": ["Float"],
        "input_sizes": [[2, 4]],
    }
    assert describe_call(entry) == "all_reduce #8 of float32[2, 4]"
    assert describe_call({**entry, "process_group": ["3", "rows"]}) == "all_reduce #8 of float32[2, 4] in group 3"
