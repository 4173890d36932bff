"""The supervisor starts, watches and ends any processes, not only scripts of Unisono."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from unisono import environment
from unisono.errors import WorldError
from unisono.launcher.failure_record import FailureRecord, read, write, write_to
from unisono.launcher.local_launch import loopback_name
from unisono.launcher.supervisor import RunOutcome, WorkerSpec, _is_readable, _Supervisor, supervise


def task(folder: Path, name: str, *command: str, log: Path | None = None) -> WorkerSpec:
    return WorkerSpec(
        command=command,
        environment=environment.inherited({}),
        log=log or folder / f"{name}.log",
        record=folder / f"{name}.json",
    )


def test_any_program_is_supervised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = supervise([task(tmp_path, "a", "echo", "first"), task(tmp_path, "b", "echo", "second")])
    assert outcome == RunOutcome(0)
    assert capfd.readouterr() == ("first\n", "")
    assert (tmp_path / "b.log").read_text() == "second\n"


def test_nothing_is_printed_without_screen_and_messages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = supervise([task(tmp_path, "a", "sh", "-c", "echo output; exit 3")], screen=None, verbose=False)
    assert (outcome.exit_status, outcome.stopped) == (3, False)
    assert capfd.readouterr() == ("", "")
    assert "output" in str(outcome.failure)


def test_if_one_process_cannot_start_the_others_are_killed(tmp_path: Path) -> None:
    tasks = [task(tmp_path, "a", "sleep", "1000"), task(tmp_path, "b", str(tmp_path / "no such program"))]
    with pytest.raises(WorldError, match="Cannot start process 1"):
        supervise(tasks)
    assert not [child for child in psutil.Process().children() if child.cmdline() == ["sleep", "1000"]]


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    outcome = supervise([task(tmp_path, "a", "sh", "-c", "echo one; echo two", log=full)])
    assert outcome == RunOutcome(0)
    printed = capfd.readouterr()
    assert printed.out == "one\ntwo\n"
    assert printed.err == "Cannot write the log /dev/full: No space left on device. The run continues.\n"


def test_signals_are_not_handled_outside_the_main_thread(tmp_path: Path) -> None:
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(supervise([task(tmp_path, "a", "true")], screen=None)))
    thread.start()
    thread.join()
    assert outcomes == [RunOutcome(0)]


def test_a_process_that_fills_its_pipe_is_read_to_the_end(tmp_path: Path) -> None:
    write_much = "import sys; sys.stdout.write('x' * 79 + '\\n'); sys.stdout.write(('y' * 79 + '\\n') * 50_000)"
    assert supervise([task(tmp_path, "a", sys.executable, "-c", write_much)], screen=None) == RunOutcome(0)
    assert (tmp_path / "a.log").stat().st_size == 80 * 50_001


def test_a_failure_record_has_type_message_and_traceback(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    assert read(path) is None
    write_to(path)
    try:
        raise WorldError("Meet the others.", "Nobody \udcff came.", "Wait.")
    except WorldError as error:
        written = write(error)
    assert written.kind == "WorldError"
    assert written.traceback.startswith("Traceback (most recent call last):\n")
    assert written.problems[0].error == "Meet the others."
    found = read(path)
    assert found is not None
    assert (found.kind, found.exit_status, found.problems[0].remedy) == ("WorldError", 1, "Wait.")
    write(ValueError("only the first one counts"))
    again = read(path)
    assert again == found


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (None, 0, "the script exited with status 0"),
        (3, 3, "the script exited with status 3"),
        (-1, 255, "the script exited with status -1"),
        ("sorry", 1, "sorry"),
    ],
)
def test_the_exit_status_of_a_script_is_kept(code: int | str | None, status: int, message: str) -> None:
    record = FailureRecord.of(SystemExit(code))
    assert (record.exit_status, record.message, record.traceback) == (status, message, "")


@pytest.mark.parametrize(("alive", "survived", "expected"), [(1, 0, True), (0, 1, True), (0, 0, False)])
def test_a_process_that_dies_with_its_unit_does_not_end_the_run(alive: bool, survived: bool, expected: bool) -> None:
    """A host dies with all processes of a unit. That it lost one of them arrives after all have been reaped."""
    process = SimpleNamespace(alive=bool(alive), survived=bool(survived), orphan_of=None, kill=lambda: None)
    supervisor: Any = SimpleNamespace(processes=[None, process])
    elastic: Any = SimpleNamespace(read_events=lambda: [{"orphan": 1, "lost": 0}])
    _Supervisor._on_rendezvous_event(supervisor, elastic)
    assert (process.survived, process.orphan_of) == (expected, 0)


def test_the_loopback_interface_has_a_name() -> None:
    assert loopback_name() is not None


def test_a_descriptor_above_1023_can_be_polled() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1500:
        pytest.skip("this shell may not have so many descriptors (ulimit -n)")
    reader, writer = os.pipe()
    os.dup2(reader, 1500)
    os.close(reader)
    with os.fdopen(1500, "rb", buffering=0) as file:
        assert not _is_readable(file, 0.0)
        os.write(writer, b"word")
        assert _is_readable(file, 1.0)
        file.read(4)
        os.close(writer)
        assert _is_readable(file, 1.0)  # its end
