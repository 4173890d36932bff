"""Wrong requests: all errors with facts and commands, status 2, and no process or file remains."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import unisono
from tests.cli.command import dry_run
from tests.cli.refused_requests import SCRIPT, RequestProblems
from tools import reference_tables
from unisono.cli.main import main
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.settings_help import settings_table
from unisono.cli.request.target import recipes
from unisono.errors import Problem
from unisono.launcher import local_launch

KNOWN = f"The recipes are {', '.join(recipes())}."


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "error", "true", "do"),
    [
        (
            "run txt",
            "There is no recipe or script txt.",
            KNOWN,
            "unisono run text --json",
        ),
        (
            "run trian.py",
            "There is no recipe or script trian.py.",
            KNOWN,
            "unisono run train.py --json",
        ),
        (
            "run nope.py",
            "There is no recipe or script nope.py.",
            KNOWN,
            "unisono run --help",
        ),
        ("run .", ". is a folder.", "A target is a recipe or a script.", "unisono run train.py --json"),
        (
            "run train.py --ranks 0",
            "--ranks 0 is out of range.",
            "A run needs at least one process.",
            "unisono run train.py --ranks 1 --json",
        ),
        (
            "run train.py --ranks 9",
            "9 processes are more than virtual_ranks.",
            "Each of the 8 virtual ranks runs on one: 1 to 8 processes.",
            "unisono run train.py --ranks 8 --json, or (other bits): "
            "unisono run train.py --ranks 9 --json --set virtual_ranks=9",
        ),
        (
            "run train.py --fault 'Explode step=2'",
            "Invalid value for --fault: Explode step=2",
            "There is no fault Explode; there are FailAt, HangAt, SlowAt, BitFlip, TornFile, FullDisk, LostPackets.",
            "unisono run train.py --json --fault 'FailAt step=2 phase=backward'",
        ),
        (
            "run text --ranks 3 --set parallel.tensor=3",
            "The text recipe cannot have parallel.tensor=3 with model.heads=4.",
            "Each process computes whole heads, and 4 is not a multiple of 3.",
            "--set parallel.tensor=2, or change the model: --set model.heads=6 --set model.width=132",
        ),
        (
            "run text --ranks 8 --set parallel.pipeline=8",
            "The text recipe cannot have parallel.pipeline=8 with model.depth=4.",
            "The model has only 7 layers to divide: embedding, 4 blocks, norm and head.",
            "--set parallel.pipeline=7, or: --set model.depth=5",
        ),
        (
            "run image --ranks 2 --set parallel.pipeline=2",
            "The image recipe cannot have parallel.pipeline=2 with model.norm=batch.",
            "Batch norm updates its running statistics in the order of micro-batches, and a pipeline computes several "
            "at once.",
            "--set model.norm=group, or: --set parallel.pipeline=1",
        ),
        (
            "run train.py --set exchange=server",
            "exchange = server does not fit 1 process.",
            "1 server and at least 1 worker make 2.",
            "unisono run train.py --set exchange=server --json --ranks 2",
        ),
        (
            "run train.py --ranks 3 --set exchange=server --set server.staleness=-1",
            "server.staleness = -1 is out of range.",
            "It must be at least 0.",
            "unisono run train.py --ranks 3 --set exchange=server --set server.staleness=0 --json",
        ),
        (
            "run text --ranks 3 --set parallel.replicate_shards=true",
            "parallel.replicate_shards = true has no effect with parallel.shard = 1.",
            "It copies each shard to another process, and with parallel.shard = 1 there are no shards. "
            "All 3 replicas are copies of each other.",
            "unisono run text --ranks 3 --set parallel.replicate_shards=true --json --set parallel.shard=3, or: "
            "unisono run text --ranks 3 --set parallel.replicate_shards=false --json",
        ),
        (
            "run train.py --set lrr=1",
            "There is no setting lrr.",
            "The nearest name is lr.",
            "unisono run train.py --set lr=1 --json",
        ),
        (
            "run train.py --accept-change seed",
            "--accept-change has no effect without --resume.",
            "Only a resumed run can differ from an earlier one.",
            "unisono run train.py --accept-change seed --json --resume",
        ),
        (
            "copy txt",
            "There is no recipe txt.",
            KNOWN,
            "unisono copy text",
        ),
        (
            "fingerprint nowhere",
            "There is no folder nowhere.",
            "The argument is a run directory, or a checkpoint.",
            "unisono fingerprint runs/NAME-TIME",
        ),
        (
            "fingerprint .",
            "There is no checkpoint in ..",
            "The argument is a run directory, or a checkpoint.",
            "unisono fingerprint runs/NAME-TIME",
        ),
    ],
)
def test_a_wrong_request_is_answered_with_a_command(
    request_problems: RequestProblems, words: str, error: str, true: str, do: str
) -> None:
    assert request_problems(*shlex.split(words)) == [Problem(error, true, do)]


def test_all_problems_are_reported_together(request_problems: RequestProblems, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    problems = request_problems(
        "run", "train.py", "--ranks=0", "--run-dir=out", "--set=lr=x", "--set=wdith=3", "--accept-change=seed"
    )
    assert [problem.error for problem in problems] == [
        "--ranks 0 is out of range.",
        "Invalid value: lr = x",
        "There is no setting wdith.",
        "--accept-change has no effect without --resume.",
        "out already contains a run.",
    ]


def test_a_missing_script_does_not_hide_other_problems(request_problems: RequestProblems, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problems = request_problems(
        "run", "trian.py", "--ranks=0", "--set=batch=0", "--settings=none.toml", "--run-dir=file"
    )
    errors = [
        "There is no recipe or script trian.py.",
        "--ranks 0 is out of range.",
        "Cannot read the settings file none.toml.",
        "batch = 0 is out of range.",
        "file is a file.",
    ]
    assert [problem.error for problem in problems] == errors
    assert len(request_problems("run", "trian.py", "--resume")) == 1


def test_without_unisono_main_only_the_settings_of_every_run_are_checked(
    request_problems: RequestProblems, tmp_path: Path
) -> None:
    (tmp_path / "other.py").write_text("raise SystemExit('it was started')")
    (tmp_path / "some.toml").write_text("threads = 0\nwidth = 3\n")
    problems = request_problems(
        "run", "other.py", "--ranks=3", "--set=width=1", "--set=batch=0", "--settings=some.toml"
    )
    assert [problem.error for problem in problems] == ["batch = 0 is out of range.", "threads = 0 is out of range."]
    (problem,) = request_problems(
        "run", "other.py", "--set=virtual_ranks=3", "--set=batch=2"
    )  # the default batch of the script is unknown here
    assert problem.error == "virtual_ranks = 3 is more than the batch has samples."
    (problem,) = request_problems("run", "other.py", "--ranks=3", "--set=virtual_ranks=2")
    assert problem.facts == "Each of the 2 virtual ranks runs on one: 1 to 2 processes."
    (problem,) = request_problems("run", "other.py", "--settings=none.toml")
    assert problem.facts == "There is no such file."


def test_a_script_parses_the_flags_that_the_command_passes() -> None:
    request = RunRequest(
        sets=("batch=3", "data=--odd"),
        settings_file=Path("a b.toml"),
        resume=True,
        accept_change=("seed", "torch"),
        json=True,
        own=("--own", "--", "x"),
    )
    arguments = request.arguments(Path("runs/x"))
    parsed = RunRequest.parse(arguments, unisono.Settings, "train.py")
    assert parsed == RunRequest(**{**vars(request), "run_dir": Path("runs/x")})
    assert RunRequest.parse([], unisono.Settings, "train.py") == RunRequest()


@dataclass(frozen=True, kw_only=True)
class Small(unisono.Settings):
    """A small script."""

    steps: int | None = 10
    lr: float = 3e-4
    norm: Literal["batch", "group"] = "group"  # of convolutions
    head: Literal["one", "two"] = "one"  # one of them, or two


def test_the_help_of_a_script_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        RunRequest.parse(["--help"], Small, "train.py")
    assert left.value.code == 0
    screen = capsys.readouterr().out
    assert "A small script." in screen
    assert "--set KEY=VALUE" in screen
    assert re.search(r"  lr +0\.0003 +a number\n", screen)


def test_the_help_of_run_shows_the_settings_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_launch, "dry_run", dry_run)
    (tmp_path / "train.py").write_text(SCRIPT.replace("lr: float = 3e-4", "lr: float = 3e-4  # the highest"))
    for words in (["train.py", "--help"], ["--ranks", "2", "train.py", "-h"]):
        assert main(["run", *words]) == 0
        text = capsys.readouterr().out
        assert "Train a recipe or a script." in text
        assert re.search(r"  lr +0\.0003 +the highest\n", text)
    assert main(["run", "image", "--help"]) == 0
    assert "your own data set: a folder with four idx files" in " ".join(capsys.readouterr().out.split())
    assert main(["run", "--help"]) == 0
    assert "Settings with their defaults" not in capsys.readouterr().out


def test_an_unknown_setting_without_a_near_name_lists_the_scripts_settings(
    request_problems: RequestProblems, tmp_path: Path
) -> None:
    (problem,) = request_problems("run", "train.py", "--set", "zzzzzz=1")
    assert problem.error == "There is no setting zzzzzz."
    true = r"There are steps, lr, and \d\d of every run: unisono run train\.py --help"
    assert re.fullmatch(true, problem.facts)
    (tmp_path / "plain.py").write_text("import unisono\nunisono.main(print)\n")
    (problem,) = request_problems("check", "plain.py", "--set=zzzzzz=1", "--set=steps=2")
    assert re.fullmatch(r"There are \d\d of every run: unisono run plain\.py --help", problem.facts)


def test_a_scripts_own_settings_come_first_with_their_choices() -> None:
    lines = settings_table(Small).splitlines()[1:]
    names = [line.split()[0] for line in lines if line[2] != " "]
    assert names[:4] == ["steps", "lr", "norm", "head"]
    text = " ".join(" ".join(lines).split())
    assert "of convolutions (batch, group)" in text
    assert lines[names.index("head") + 1].endswith("one of them, or two")
    assert "fp32, bf16, fp16" in text
    assert all(len(line) < 80 for line in lines)


def test_the_reference_has_all_settings_and_commands() -> None:
    assert "| `batch` |" in reference_tables.settings_table()
    assert "## unisono run" in reference_tables.commands()


def test_the_proposed_command_corrects_all_wrong_settings(request_problems: RequestProblems) -> None:
    problems = request_problems(
        "run", "train.py", "--set", "batch=big", "--set", "lr=2", "--set", "stepz=4", "--set", "zzzzzz=1"
    )
    assert [problem.error for problem in problems] == [
        "Invalid value: batch = big",
        "There is no setting stepz.",
        "There is no setting zzzzzz.",
    ]
    line = "unisono run train.py --set batch=32 --set lr=2 --set steps=4 --json"
    assert [problem.remedy for problem in problems] == [line, line, f"{line} (without it)"]


def test_the_proposed_command_corrects_problems_of_all_kinds(request_problems: RequestProblems) -> None:
    problems = request_problems("run", "train.py", "--ranks", "0", "--set", "lr=abc", "--set", "batch=0")
    assert [problem.error for problem in problems] == [
        "--ranks 0 is out of range.",
        "Invalid value: lr = abc",
        "batch = 0 is out of range.",
    ]
    line = "unisono run train.py --ranks 1 --set lr=0.0003 --set batch=32 --json"
    assert [problem.remedy for problem in problems] == [line] * 3


def test_copy_writes_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["copy", "text"]) == 0
    assert (tmp_path / "text.py").read_text() == (Path(unisono.__file__).parent / "recipes" / "text.py").read_text()
    (tmp_path / "folder").mkdir()
    assert main(["copy", "text", "folder"]) == 0
    capsys.readouterr()
    assert main(["copy", "text", "mine.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "mine.py"}
    assert {p.name for p in tmp_path.rglob("*.py")} == {"text.py", "mine.py"}


def test_copy_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text("mine")
    assert main(["copy", "text"]) == 2
    assert capsys.readouterr().err == (
        "text.py exists.\n  Existing files are not overwritten.\n  Next: unisono copy text my_text.py\n"
    )
    assert (tmp_path / "text.py").read_text() == "mine"
    assert main(["copy", "text", "nowhere/text.py"]) == 2
    assert "Cannot write nowhere/text.py.\n  No such file or directory." in capsys.readouterr().err


def test_help_is_grouped_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Train" in text
    assert text.index("Train") < text.index("Verify") < text.index("Inspect")
    assert "unisono run text --ranks 2 " in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{unisono.__version__}\n"


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["nothing"], 2)])
def test_python_m_unisono_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["unisono", *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("unisono", run_name="__main__")
    screen = capsys.readouterr()
    assert left.value.code == status
    assert screen.out == ("" if status else f"{unisono.__version__}\n")
    assert screen.err.startswith("There is no command nothing.\n  The commands are run," if status else "")


def test_the_help_of_each_verb_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("run", "copy", "fingerprint", "doctor"):
        assert main([verb, "--help"]) == 0
        examples = capsys.readouterr().out.partition("Examples:")[2].split("\n")
        typed = [line.strip() for line in examples if line.strip().startswith("unisono ")]
        assert typed
        assert all(line.startswith(f"unisono {verb}") for line in typed)
