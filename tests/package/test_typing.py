"""Type checkers find the types of the installed wheel and of an editable install, and the errors of a script."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.package.builds import build_wheel, copy_of_sources, environment_with, run, tracked_or_skip

SAMPLE = """
    from dataclasses import dataclass
    from typing import assert_type

    import unisono


    @dataclass(frozen=True, kw_only=True)
    class Settings(unisono.Settings):
        lr: float = 1e-3


    def main(run: unisono.Run[Settings]) -> None:
        assert_type(run.settings.lr, float)
        for step in run.steps([1.0, 2.0]):
            assert_type(step.loss, float)
        print(run.settings.rate)  # an error: there is no such field


    unisono.main(main, Settings)
"""
WRONG_LINE = 1 + next(i for i, line in enumerate(textwrap.dedent(SAMPLE).lstrip().splitlines()) if "rate" in line)


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the programs of an environment with the wheel, and of one with an editable install."""
    folder = tmp_path_factory.mktemp("typing")
    source = copy_of_sources(tracked_or_skip(), folder / "source")
    (folder / "wheel").mkdir()
    wheel = build_wheel(source, folder / "wheel")
    return {
        "wheel": environment_with(folder / "with-wheel", wheel),
        "editable": environment_with(folder / "with-editable", "--editable", source),
    }


def errors_of(folder: Path, *command: str | Path) -> str:
    """Run a type checker on the sample, which must fail; return its output."""
    (folder / "sample.py").write_text(textwrap.dedent(SAMPLE).lstrip())
    return run(*command, folder=folder, status=1)


@pytest.mark.slow
@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_pyright_finds_the_types(install: str, environments: dict[str, Path], tmp_path: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not on the path; make package installs it")
    python = environments[install] / "python"
    report = json.loads(errors_of(tmp_path, pyright, "--outputjson", "--pythonpath", python, "sample.py"))
    found = [(each["range"]["start"]["line"] + 1, each["rule"]) for each in report["generalDiagnostics"]]
    assert found == [(WRONG_LINE, "reportAttributeAccessIssue")]


@pytest.mark.slow
@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_mypy_finds_the_types(install: str, environments: dict[str, Path], tmp_path: Path) -> None:
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed: pip install 'unisono[dev]'")
    python = environments[install] / "python"
    options = ("--python-executable", python, "--strict", "--no-error-summary", "--cache-dir", tmp_path / "cache")
    lines = errors_of(tmp_path, sys.executable, "-m", "mypy", *options, "sample.py").splitlines()
    assert lines == [f'sample.py:{WRONG_LINE}: error: "Settings" has no attribute "rate"  [attr-defined]']
