"""`unisono convert` as a command: files, the difference, notes, the check."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.refused_requests import RequestProblems
from tests.convert.conversions import SCRIPTS
from unisono.cli.conversion import convert_command
from unisono.cli.main import main

needs_libcst = pytest.mark.skipif(find_spec("libcst") is None, reason="needs libcst: pip install 'unisono[convert]'")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddp.py").write_text((SCRIPTS / "ddp_torchrun.py").read_text())
    return tmp_path


@needs_libcst
def test_a_script_is_converted_beside_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "ddp.py").read_text()
    assert main(["convert", "ddp.py", "--no-check"]) == 0
    screen, code = capsys.readouterr().out, (folder / "ddp_unisono.py").read_text()
    assert (folder / "ddp.py").read_text() == before
    assert "unisono.main(main, Settings)" in code
    assert screen.startswith("--- ddp.py\n+++ ddp_unisono.py\n@@ ")
    assert "\nWritten to ddp_unisono.py.\n1 note to read" in screen
    number = next(i for i, line in enumerate(code.splitlines(), 1) if "# unisono: " in line)
    assert f"  ddp_unisono.py:{number}: this is the batch of one process." in screen
    assert screen.endswith("Not checked. Next: unisono check ddp_unisono.py\n")


@needs_libcst
def test_an_existing_file_is_overwritten_only_with_force(folder: Path, request_problems: RequestProblems) -> None:
    (folder / "ddp_unisono.py").write_text("mine")
    (problem,) = request_problems("convert", "ddp.py", "--no-check")
    assert problem.error == "ddp_unisono.py exists."
    assert problem.remedy == "unisono convert ddp.py --force, or: unisono convert ddp.py ddp_unisono_2.py"
    assert (folder / "ddp_unisono.py").read_text() == "mine"
    assert main(["convert", "ddp.py", "--no-check", "--force"]) == 0
    assert (folder / "ddp_unisono.py").read_text() != "mine"


@needs_libcst
def test_the_script_itself_is_never_overwritten(folder: Path, request_problems: RequestProblems) -> None:
    (problem,) = request_problems("convert", "ddp.py", "ddp.py", "--force")
    assert problem.error == "ddp.py exists."
    assert "--force" not in problem.remedy


@needs_libcst
def test_nothing_is_written_for_a_script_that_is_refused(folder: Path, request_problems: RequestProblems) -> None:
    source = (folder / "ddp.py").read_text()
    (folder / "ddp.py").write_text(source.replace("            scheduler.step()\n", "            break\n"))
    (problem,) = request_problems("convert", "ddp.py")
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "scheduler.step()" in text)
    assert problem.error == f"Line {line}: the loop over batches is left before its end."
    assert [path.name for path in folder.glob("*.py") if "unisono" in path.name] == []


@needs_libcst
def test_the_result_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "ddp.py", "new.py", "--ranks", "2", "--no-check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["notes"]) == ("new.py", [])
    assert "batch: int = 32" in (folder / "new.py").read_text()


def test_a_missing_package_is_named(
    folder: Path, request_problems: RequestProblems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_command, "find_spec", lambda name: None)
    (problem,) = request_problems("convert", "ddp.py")
    assert (problem.error, problem.remedy) == (
        "unisono convert needs the package libcst.",
        "pip install 'unisono[convert]'",
    )


def test_a_missing_script_is_named(folder: Path, request_problems: RequestProblems) -> None:
    (problem,) = request_problems("convert", "dpp.py")
    assert problem.error == "Cannot read dpp.py."
    assert problem.remedy == "unisono convert ddp.py"


@needs_libcst
@pytest.mark.slow
def test_the_converted_script_is_checked(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """This starts real processes, as a user would."""
    assert main(["convert", "ddp.py", "--ranks", "2"]) == 0
    assert "Placement-proof: the same bits in 3 steps." in capfd.readouterr().out
