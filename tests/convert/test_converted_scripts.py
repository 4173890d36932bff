"""Converted scripts train to the loss of the script, and pass `unisono check`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.command import start
from tests.convert.conversions import CASES, Case, printed_by_run, printed_by_script
from unisono.cli.commands.check import CountCheck
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine

pytest.importorskip("libcst", reason="needs libcst: pip install 'unisono[convert]'")

TOLERANCE = 1e-6


def converted(case: Case, folder: Path) -> Path:
    """Write the converted script, and return its path."""
    from unisono.convert.script_conversion import convert

    path = folder / f"{case.name}_unisono.py"
    path.write_text(convert(case.source, f"{case.name}.py", path.name, case.processes).code, encoding="utf-8")
    return path


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_converted_script_trains_to_the_same_loss(case: Case, tmp_path: Path) -> None:
    """The samples have the order of the script. The greatest relative difference is 1e-6."""
    if case.peer and find_spec(case.peer) is None:
        pytest.skip(f"{case.peer} is not installed; the conversion and the check are tested without it")
    (tmp_path / "run").mkdir()
    (tmp_path / "script").mkdir()
    before = printed_by_script(case, tmp_path / "script")
    after = printed_by_run(converted(case, tmp_path), tmp_path / "run", case)
    print(f"{case.name}: loss {before:.9f} before, {after:.9f} after")
    assert after == pytest.approx(before, rel=TOLERANCE)


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_converted_script_passes_the_check(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = converted(case, tmp_path)
    line = CommandLine(("unisono", "check", script.name))
    request = RunRequest(json=True)
    (tmp_path / "check").mkdir()
    trials = CountCheck(
        script=script, threads=1, steps=2, request=request, line=line, folder=tmp_path / "check", start=start
    )
    status = trials.run()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status, found["placement_proof"]) == (0, True), found
