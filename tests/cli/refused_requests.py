"""A fixture that makes a wrong request in an empty folder and returns the problems that the command reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import dry_run, last_json, start_quietly
from unisono.cli.main import main
from unisono.errors import Problem
from unisono.launcher import local_launch

SCRIPT = """
from dataclasses import dataclass
import unisono

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    '''A small script.'''
    steps: int | None = 10
    lr: float = 3e-4

if __name__ == "__main__":
    unisono.main(print, Settings)
"""

RequestProblems = Callable[..., list[Problem]]


@pytest.fixture
def request_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RequestProblems:
    """Return the problems of a wrong request in a folder that contains only train.py; it must stay unchanged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_launch, "dry_run", dry_run)
    monkeypatch.setattr(local_launch, "run", start_quietly)
    (tmp_path / "train.py").write_text(SCRIPT)

    def request_problems(*words: str) -> list[Problem]:
        before = sorted(tmp_path.rglob("*"))
        status = main([*words, "--json"])
        screen = capsys.readouterr()
        error = last_json(screen.out)["error"]
        assert (status, error["exit_status"]) == (2, 2)
        assert sorted(tmp_path.rglob("*")) == before
        problems = [Problem(**problem) for problem in error["problems"]]
        assert all(all(part for part in problem) for problem in problems)
        assert screen.err == "\n".join(str(problem) for problem in problems) + "\n"
        return problems

    return request_problems
