"""The chain of the audit log: which changes of the file show, and which do not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.cli.main import main
from unisono.security.audit_trail import NOTHING, AuditTrail, hash_of, leave_reason, read_trail, take_reason

SEAL = {"lines": 6, "sha256": ""}


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """Return the lines of a record of six events, written in two starts."""
    first = AuditTrail(tmp_path / "audit.jsonl", pytest.fail)
    for number in range(4):
        first("join", process=number, host="a")
    second = AuditTrail(tmp_path / "audit.jsonl", pytest.fail)
    second("loss", process=2, reason="died -9")
    second("stop", signal="SIGTERM")
    assert second.seal["lines"] == 6
    SEAL["sha256"] = second.seal["sha256"]
    return (tmp_path / "audit.jsonl").read_bytes().splitlines()


def forged(lines: list[bytes], place: int, **facts: Any) -> bytes:
    """Return an entry that follows the line before `place`, as a forger writes it."""
    before = hash_of(lines[place - 1]) if place else NOTHING
    return json.dumps({"n": place, "t": 0, "event": "join", **facts, "before": before}).encode()


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a removed line": (lambda a: [*a[:2], *a[3:]], 3),
    "the first line removed": (lambda a: a[1:], 1),
    "a changed line": (lambda a: [*a[:2], a[2].replace(b'"host": "a"', b'"host": "b"'), *a[3:]], 4),
    "two lines in another order": (lambda a: [a[0], a[2], a[1], *a[3:]], 2),
    "a line written twice": (lambda a: [*a[:3], a[2], *a[3:]], 4),
    "an added line with a wrong hash": (lambda a: [*a, a[5].replace(b'"n": 5', b'"n": 6')], 7),
    "an inserted line that follows the one before": (lambda a: [*a[:3], forged(a, 3), *a[3:]], 5),
    "a replaced line that follows the one before": (lambda a: [*a[:3], forged(a, 3), *a[4:]], 5),
    "a line that is no JSON": (lambda a: [*a[:3], b"\xff{", *a[4:]], 4),
    "a line that is cut off": (lambda a: [*a[:3], a[3][:-9], *a[4:]], 4),
    "an empty line": (lambda a: [*a[:3], b"", *a[3:]], 4),
    "the last line changed": (lambda a: [*a[:5], a[5].replace(b"SIGTERM", b"SIGINT")], 6),
    "the last line cut off": (lambda a: a[:5], 6),
    "all lines cut off": (lambda a: [], 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_with_its_line(lines: list[bytes], name: str) -> None:
    change, line = CHANGES[name]
    assert not read_trail(b"\n".join([*lines, b""]), SEAL).flaws
    changed = change(list(lines))
    flaws = read_trail(b"\n".join([*changed, b""]) if changed else b"", SEAL).flaws
    assert line in {flaw.line for flaw in flaws}, flaws


def test_without_the_number_in_the_result_a_cut_off_end_does_not_show(lines: list[bytes]) -> None:
    """The limit that the documentation states."""
    assert not read_trail(b"\n".join([*lines[:4], b""])).flaws


def test_a_line_that_a_crash_cut_off_is_named_and_the_chain_continues(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    AuditTrail(path, pytest.fail)("begin")
    (flaw,) = read_trail(path.read_bytes()).flaws
    assert flaw.line == 6
    assert len(path.read_bytes().splitlines()) == 7


def test_threads_write_one_chain(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path / "audit.jsonl", pytest.fail)

    def write() -> None:
        for _ in range(20):
            trail("join")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_trail((tmp_path / "audit.jsonl").read_bytes(), trail.seal)
    assert (len(found.entries), found.flaws) == (80, [])


def test_a_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    AuditTrail(tmp_path / "missing" / "audit.jsonl", said.append)("join")
    assert said == [
        f"Cannot write {tmp_path}/missing/audit.jsonl: No such file or directory. The event join is not recorded."
    ]


def test_a_reason_is_taken_once_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    leave_reason(tmp_path, reason="the live page", address="192.0.2.7")
    found = take_reason(tmp_path)
    assert (found["by_reason"], found["by_address"]) == ("the live page", "192.0.2.7")
    assert take_reason(tmp_path) == {}
    (tmp_path / ".stop-reason").write_bytes(b"[" * 5000)
    assert take_reason(tmp_path) == {}


def test_the_command_prints_the_entries_and_names_a_changed_line(
    tmp_path: Path, lines: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit-log", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[4].endswith("loss      process 2, reason died -9")
    assert printed[-1].startswith("6 lines, and each follows the one before. No result.json states how many")
    (tmp_path / "result.json").write_text(json.dumps({"audit": SEAL}))
    assert main(["audit-log", str(tmp_path)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("so none is cut off.")
    (tmp_path / "audit.jsonl").write_bytes(b"\n".join([*lines[:2], *lines[3:], b""]))
    assert main(["audit-log", str(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "The audit log was changed."
    assert error[1].startswith("  Line 3 does not follow the line before")
    assert main(["audit-log", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["flaws"][0]["line"] == 3


def test_a_run_without_a_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit-log", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"There is no audit log in {tmp_path}.\n")
