"""`unisono check`: it finds mistakes with their place and cause, and correct scripts pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command, last_json, start
from tests.cli.refused_requests import RequestProblems
from tests.cli.wrong_scripts import WRONG, text_of
from unisono.cli.commands.check import CountCheck
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine


def check(folder: Path, script: str, capsys: pytest.CaptureFixture[str], *sets: str) -> tuple[int, dict[str, Any]]:
    path = folder / "script.py"
    path.write_text(script)
    request = RunRequest(sets=("steps=9", *sets), json=True)
    line = CommandLine(("unisono", "check", "script.py"))
    trials = CountCheck(
        script=path, threads=1, steps=1, request=request, line=line, folder=folder / "check", start=start
    )
    return trials.run(), last_json(capsys.readouterr().out)


HASHED = "the order of a set"  # forked processes share the hash seed; tested below with real commands


@pytest.mark.ci
@pytest.mark.parametrize("name", [name for name in WRONG if name != HASHED])
def test_each_mistake_is_found_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    wrong = WRONG[name]
    sets = ["exchange=allreduce"] if wrong.cause == "exchange" else []
    status, found = check(tmp_path, text_of(wrong.changes), capsys, *sets)
    assert (status, found["placement_proof"], found["cause"]) == (1, False, wrong.cause), found
    assert found["first"]["what"].startswith(wrong.what), found
    assert (found["first"]["step"], found["first"]["virtual_rank"]) == (wrong.step, wrong.virtual_rank), found


def test_the_line_that_reads_the_size_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = text_of(WRONG["a loss divided by the number of processes"].changes)
    _, found = check(tmp_path, script, capsys)
    line = next(i for i, text in enumerate(script.splitlines(), 1) if "run.size" in text)
    assert f"run.size at {tmp_path / 'script.py'}:{line}." in found["message"]


def test_correct_scripts_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random numbers in every part, and reads of the rank that do not affect the result."""
    fine = {
        "fetch": "x = x + torch.rand(3) + np.random.rand() + random.random()",
        "forward": "x = torch.nn.functional.dropout(x, 0.3)",
        "loss": "loss = loss * (1 + torch.rand(()))",
        "after": "run.is_main and run.rank == 0 and run.print('here')",
    }
    status, found = check(tmp_path, text_of(fine), capsys)
    assert (status, found["placement_proof"]) == (0, True), found
    assert [run["message"] for run in found["runs"][1:]] == ["equal"] * 4


@pytest.mark.ci
@pytest.mark.parametrize("steps", [1, 3])
def test_an_unchecked_end_of_an_epoch_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    path = tmp_path / "script.py"
    path.write_text(text_of({}))
    line = CommandLine(("unisono", "check", "script.py"))
    request = RunRequest(sets=("steps=9", "batch=15", "virtual_ranks=2"))
    folder = tmp_path / "check"
    assert (
        CountCheck(script=path, threads=1, steps=steps, request=request, line=line, folder=folder, start=start).run()
        == 0
    )
    text = capsys.readouterr().out
    unseen = "The end of an epoch, after 2 steps, was not checked.\n"
    unseen += "  Next: unisono check script.py --steps 3\n"
    assert text.endswith(unseen) == (steps == 1), text


@pytest.mark.slow
def test_the_order_of_a_set_differs_between_processes(command: Command) -> None:
    """Every new Python process has its own hash seed, so the test needs real commands."""
    (command.folder / "sets.py").write_text(text_of(WRONG[HASHED].changes))
    ended = command.run("check", "sets.py", "--steps", "1", "--set", "steps=9")
    assert ended.status == 1, ended.err
    assert (
        "The result depends on the placement. First difference, with 1 process, again: the samples in step 0"
        in ended.out
    )
    assert "Next: sort it: sorted(set(words))." in ended.out
    assert not (command.folder / "runs").exists()


@pytest.mark.slow
def test_a_failure_on_two_processes_is_reported(command: Command) -> None:
    (command.folder / "fails.py").write_text(text_of({"before": "assert run.size == 1, 'I am alone'"}))
    ended = command.run("check", "fails.py", "--set", "steps=9", "--json")
    assert ended.status == 1, ended.err
    assert last_json(ended.out)["message"] == "I am alone"


@pytest.mark.parametrize(
    ("words", "message", "do"),
    [
        (["train.py", "--steps", "0"], "At least one step", "unisono check train.py --steps 3"),
        (["train.py", "--resume"], "Every run starts at step 0", "unisono check train.py"),
        (["nothing.py"], "There is no recipe or script nothing.py.", "unisono check --help"),
        ([], "needs the name of a recipe, or the path of a script", "unisono check text"),
        (["train.py", "--set", "stepz=4"], "There is no setting stepz", "unisono check train.py --set steps=4"),
    ],
)
def test_wrong_requests(request_problems: RequestProblems, words: list[str], message: str, do: str) -> None:
    (problem,) = request_problems("check", *words)
    assert message in str(problem)
    assert problem.remedy.removesuffix(" --json") == do
