"""Wrong requests: what was asked, what is true, what to type; all at once, status 2, and nothing is started or left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import unisono
from tests.cli.command import Command
from unisono.cli.main import main
from unisono.cli.request import Request
from unisono.cli.rundir import choose_run_dir, newest_run
from unisono.errors import Problem, SettingsError

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

Ask = Callable[..., list[Problem]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """The problems of a wrong request, made in an empty folder with train.py; afterwards nothing else is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def ask(*words: str) -> list[Problem]:
        before = sorted(tmp_path.rglob("*"))
        status = main([*words, "--json"])
        told = capsys.readouterr()
        error = json.loads(told.out.splitlines()[-1])["error"]
        assert (status, error["exit_status"]) == (2, 2)
        assert sorted(tmp_path.rglob("*")) == before
        problems = [Problem(**problem) for problem in error["problems"]]
        assert all(all(part for part in problem) for problem in problems)
        assert told.err == "\n".join(str(problem) for problem in problems) + "\n"
        return problems

    return ask


@pytest.mark.parametrize(
    ("words", "asked", "true", "do"),
    [
        (
            "run txt",
            "unisono run txt",
            "There is no such recipe and no such file. Recipes: text.",
            "unisono run text",
        ),
        (
            "run trian.py",
            "unisono run trian.py",
            "There is no such recipe and no such file. Recipes: text.",
            "unisono run train.py",
        ),
        ("run .", "unisono run .", "It is a folder, not a script.", "unisono run train.py"),
        ("run train.py --ranks 0", "--ranks 0", "A run needs at least one process.", "--ranks 1"),
        (
            "run train.py --ranks 9",
            "9 processes",
            "8 virtual ranks: 1 to 8 processes.",
            "unisono run train.py --ranks 8, or (other bits): unisono run train.py --ranks 9 --set virtual_ranks=9",
        ),
        (
            "run train.py --set lrr=1",
            "--set lrr=1",
            "There is no setting lrr; the nearest is lr.",
            "--set lr=1",
        ),
        (
            "run train.py --accept-change seed",
            "--accept-change seed",
            "Only a resumed run has something to differ from.",
            "--accept-change seed --resume",
        ),
        (
            "run train.py --batch 64 --ranks 2",
            "unisono run train.py --batch 64 --ranks 2 --json",
            "There is no flag --batch, but a setting batch, and settings are given with --set.",
            "unisono run train.py --set batch=64 --ranks 2 --json",
        ),
        (
            "run train.py --micro-batch=4",
            "unisono run train.py --micro-batch=4 --json",
            "There is no flag --micro-batch, but a setting micro_batch, and settings are given with --set.",
            "unisono run train.py --set micro_batch=4 --json",
        ),
        (
            "run train.py --rank 2",
            "unisono run train.py --rank 2 --json",
            "There is no flag --rank; the nearest is --ranks.",
            "unisono run train.py --ranks 2 --json",
        ),
        (
            "run train.py --xyzzy",
            "unisono run train.py --xyzzy --json",
            "There is no flag --xyzzy.",
            "unisono run --help",
        ),
        (
            "run train.py --ranks two",
            "unisono run train.py --ranks two --json",
            'Invalid value for --ranks: unable to convert "two" into int.',
            "unisono run --help",
        ),
        (
            "run",
            "unisono run --json",
            'Command "run" parameter TARGET requires an argument.',
            "unisono run --help",
        ),
        (
            "rnu train.py",
            "unisono rnu train.py --json",
            'Unknown command "rnu". Did you mean "run"? Available commands: run, copy, fingerprint, doctor.',
            "unisono --help",
        ),
        ("copy txt", "unisono copy txt", "There is no such recipe. There are text.", "unisono copy text"),
        (
            "fingerprint nowhere",
            "unisono fingerprint nowhere",
            "There is no such folder.",
            "unisono fingerprint runs/NAME-TIME",
        ),
    ],
)
def test_a_wrong_request_is_answered_with_the_line_to_type(
    ask: Ask, words: str, asked: str, true: str, do: str
) -> None:
    assert ask(*words.split()) == [Problem(asked, true, do)]


def test_more_words_are_the_scripts_and_come_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py", "--ranks", "2", "more", "words"]) == 2
    assert "Next: unisono run train.py --ranks 2 -- more words" in capsys.readouterr().err
    assert main(["doctor", "--", "more"]) == 2
    assert "Only `unisono run` hands arguments on to a script." in capsys.readouterr().err


def test_everything_that_is_wrong_is_told_at_once(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    problems = ask(
        "run", "train.py", "--ranks=0", "--run-dir=out", "--set=lr=x", "--set=wdith=3", "--accept-change=seed"
    )
    assert [problem.asked for problem in problems] == [
        "--ranks 0",
        "--accept-change seed",
        "--set lr=x",
        "--set wdith=3",
        "--run-dir out",
    ]


def test_a_script_that_is_not_understood_has_its_base_settings_checked(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("raise SystemExit('it was started')")
    (tmp_path / "some.toml").write_text("threads = 0\nwidth = 3\n")
    problems = ask("run", "other.py", "--ranks=3", "--set=width=1", "--set=batch=0", "--settings=some.toml")
    assert [problem.asked for problem in problems] == ["batch = 0", "threads = 0"]
    (problem,) = ask("run", "other.py", "--ranks=3", "--set=virtual_ranks=2")
    assert problem.true == "2 virtual ranks: 1 to 2 processes."
    (problem,) = ask("run", "other.py", "--settings=none.toml")
    assert problem.true == "There is no such file."


def test_a_folder_with_a_run_is_not_used_again(ask: Ask, tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / "out" / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    do = "unisono run train.py --run-dir out --resume, or choose another --run-dir."
    true = "It holds a run already: 2 checkpoints, the newest step-00000020."
    assert ask("run", "train.py", "--run-dir=out") == [Problem("--run-dir out", true, do)]


def test_a_folder_that_cannot_be_used_is_named(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = ask("run", "train.py", "--run-dir=file")
    assert problem == Problem("--run-dir file", "It is a file.", "unisono run train.py --run-dir file-run")
    (problem,) = ask("run", "train.py", "--run-dir=file/out")
    assert problem.true == f"It cannot be written: {tmp_path / 'file'} is not a folder."
    (problem,) = ask("run", "train.py", "--run-dir=/proc/nothing")  # even root cannot make a folder there
    assert problem.asked == "Keep the run in /proc/nothing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    (problem,) = ask("run", "train.py", "--run-dir=closed/out")
    assert problem.true == f"It cannot be written: Permission denied in {tmp_path / 'closed'}."


def test_nothing_to_resume_is_told(ask: Ask, tmp_path: Path) -> None:
    do = "unisono run train.py (from the start), or unisono run train.py --resume --run-dir DIR"
    true = f"There is no run train-* in {tmp_path / 'runs'}."
    assert ask("run", "train.py", "--resume") == [Problem("--resume", true, do)]
    (problem,) = ask("run", "train.py", "--resume", "--run-dir=out")
    assert problem == Problem(
        "--resume --run-dir out",
        "There is no such folder.",
        "Check the path, or start it: unisono run train.py --run-dir out",
    )


def test_run_directories_are_named_by_time_and_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20261121-120000")
    made = [choose_run_dir("text", None, resume=False, command="unisono run text") for _ in range(11)]
    assert [str(path) for path in made[:2]] == ["runs/text-20261121-120000", "runs/text-20261121-120000-2"]
    Path("runs/text-more-20271121-120000").mkdir()  # another script's
    Path("runs/text-20251121-120000").mkdir()
    assert newest_run("text") == made[-1] == Path("runs/text-20261121-120000-11")
    assert choose_run_dir("text", None, resume=True, command="unisono run text") == made[-1]
    assert choose_run_dir("text", Path("a/b"), resume=False, command="unisono run text") == Path("a/b")
    assert Path("a/b").is_dir()


def test_the_newest_run_is_resumed_with_what_it_was_given(command: Command) -> None:
    command.script("print(*sys.argv[1:])")
    first = command.run("run", "script.py", "--set", "batch=64", "--set", "steps=5", "--accept-change", "x", "--resume")
    assert first.status == 2
    first = command.run("run", "script.py", "--set", "batch=64")
    (run_dir,) = (command.folder / "runs").iterdir()
    assert first.out == f"--set=batch=64 --run-dir=runs/{run_dir.name}\n"
    again = command.run("run", "script.py", "--resume", "--accept-change", "seed", "--json")
    assert again.out.splitlines()[0] == f"--resume --accept-change=seed --json --run-dir=runs/{run_dir.name}"
    assert (run_dir / "log" / "rank-0.log").read_text().count("\n") == 2


def test_a_resume_keeps_the_runs_values_below_its_own(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        'batch = 64  # --set\nclip = "none"  # mine.toml\nname = "a b"  # --set\n'
        "lr = 0.1  # --set\nseed = 3  # script\n"
    )
    newer = tmp_path / "newer.toml"
    newer.write_text("lr = 0.2\n")
    request = Request(sets=("batch=32",), resume=True, settings_file=newer)
    assert request.sets_after(tmp_path) == ("batch=64", "clip=none", "name=a b", "batch=32")
    assert Request(sets=("batch=32",)).sets_after(tmp_path) == ("batch=32",)
    assert Request(sets=("batch=32",), resume=True).sets_after(tmp_path / "none") == ("batch=32",)


def test_a_script_reads_the_flags_that_the_command_hands_on() -> None:
    request = Request(
        sets=("batch=3", "data=--odd"),
        settings_file=Path("a b.toml"),
        resume=True,
        accept_change=("seed", "torch"),
        json=True,
        own=("--own", "--", "x"),
    )
    arguments = request.arguments(Path("runs/x"))
    parsed = Request.parse(arguments, unisono.Settings, "train.py")
    assert parsed == Request(**{**vars(request), "run_dir": Path("runs/x")})
    assert Request.parse([], unisono.Settings, "train.py") == Request()


def test_a_scripts_own_command_line_refuses_what_it_does_not_know() -> None:
    with pytest.raises(SettingsError) as caught:
        Request.parse(["--learning-rate", "3"], unisono.Settings, "train.py")
    assert caught.value.problems == (
        Problem("python train.py --learning-rate 3", "There is no flag --learning-rate.", "python train.py --help"),
    )
    with pytest.raises(SettingsError) as caught:
        Request.parse(["--batch", "3"], unisono.Settings, "train.py")
    assert caught.value.problems[0].do == "python train.py --set batch=3"


def test_a_scripts_help_shows_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    cls = unisono.settings.settings_of(path)
    assert cls is not None
    with pytest.raises(SystemExit) as left:
        Request.parse(["--help"], cls, "train.py")
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert "A small script." in told
    assert "--set KEY=VALUE" in told
    assert "  lr               0.0003 a number\n" in told


def test_a_recipe_is_copied_to_own(
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


def test_what_cannot_be_copied_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text("mine")
    assert main(["copy", "text"]) == 2
    assert capsys.readouterr().err == (
        "unisono copy text\n"
        "  text.py is there already, and nothing is overwritten.\n"
        "  Next: unisono copy text my_text.py\n"
    )
    assert (tmp_path / "text.py").read_text() == "mine"
    assert main(["copy", "text", "nowhere/text.py"]) == 2
    assert "nowhere/text.py cannot be written: No such file or directory." in capsys.readouterr().err


def test_help_is_grouped_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "Train" in told
    assert "Look" in told
    assert "unisono run text --ranks 2 " in told
    assert all(len(line) <= 80 for line in told.splitlines())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{unisono.__version__}\n"
