"""`unisono check`: what is wrong is found, in its place and with its cause; what is right is let through."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command
from tests.cli.wrong_scripts import EMPTY, SCRIPT, WRONG
from unisono import env
from unisono.cli.check import Check
from unisono.cli.main import main
from unisono.cli.request import Request
from unisono.env import World
from unisono.launch.supervise import Outcome
from unisono.settings import Line
from unisono.testing import run_ranks


def run_script(world: World, script: str, arguments: Sequence[str]) -> None:
    """As launch/child.py does."""
    env.assign(replace(world, launcher="unisono", folder=str(Path(script).parent)))
    sys.argv = [script, *arguments]
    sys.stdout = sys.stderr
    runpy.run_path(script, run_name="__main__")


def start(script: Path, arguments: Sequence[str], *, ranks: int, logs: Path, **_: Any) -> Outcome:
    """The processes of a run, without waiting for torch to be loaded each time."""
    run_ranks(run_script, ranks, str(script), list(arguments))
    return Outcome(exit_status=0)


def check(folder: Path, script: str, capsys: pytest.CaptureFixture[str], *sets: str) -> tuple[int, dict[str, Any]]:
    path = folder / "script.py"
    path.write_text(script)
    request = Request(sets=("steps=9", *sets), json=True)
    line = Line(("unisono", "check", "script.py"))
    status = Check(path, 1, 1, request, line, folder / "check", start=start).run()
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def text_of(changes: Mapping[str, str]) -> str:
    return SCRIPT.format(**{**EMPTY, **changes})


HASHED = "the order of a set"  # forked processes have one hash of a text; see below


@pytest.mark.parametrize("name", [name for name in WRONG if name != HASHED])
def test_what_is_wrong_is_convicted(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    wrong = WRONG[name]
    sets = ["exchange=allreduce"] if wrong.cause == "exchange" else []
    status, told = check(tmp_path, text_of(wrong.changes), capsys, *sets)
    assert (status, told["placement_proof"], told["cause"]) == (1, False, wrong.cause), told
    assert told["first"]["what"].startswith(wrong.what), told
    assert (told["first"]["step"], told["first"]["virtual_rank"]) == (wrong.step, wrong.virtual_rank), told


def test_the_line_that_asks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = text_of(WRONG["a loss divided by the number of processes"].changes)
    _, told = check(tmp_path, script, capsys)
    line = next(i for i, text in enumerate(script.splitlines(), 1) if "run.size" in text)
    assert f"run.size at {tmp_path / 'script.py'}:{line}," in told["said"]


def test_what_is_right_is_let_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With randomness everywhere, and questions that change nothing."""
    fine = {
        "fetch": "x = x + torch.rand(3) + np.random.rand() + random.random()",
        "forward": "x = torch.nn.functional.dropout(x, 0.3)",
        "loss": "loss = loss * (1 + torch.rand(()))",
        "after": "run.is_main and run.rank == 0 and run.print('here')",
    }
    status, told = check(tmp_path, text_of(fine), capsys)
    assert (status, told["placement_proof"]) == (0, True), told
    assert [run["said"] for run in told["runs"][1:]] == ["the same"] * 4


@pytest.mark.slow
def test_every_process_has_its_own_order_of_a_set(command: Command) -> None:
    """With real commands: every text has another hash in every Python that is started."""
    (command.folder / "sets.py").write_text(text_of(WRONG[HASHED].changes))
    told = command.run("check", "sets.py", "--steps", "1", "--set", "steps=9")
    assert told.status == 1, told.err
    assert "Not placement-proof. What differs first, with 1 process, again: the samples in step 0" in told.out
    assert "Next: sort it: sorted(set(words))." in told.out
    assert not (command.folder / "runs").exists()


def test_what_fails_on_two_processes_is_told_in_its_own_words(command: Command) -> None:
    (command.folder / "fails.py").write_text(text_of({"before": "assert run.size == 1, 'I am alone'"}))
    told = command.run("check", "fails.py", "--set", "steps=9", "--json")
    assert told.status == 1, told.err
    assert json.loads(told.out.splitlines()[-1])["said"] == "I am alone"


@pytest.mark.parametrize(
    ("words", "said", "do"),
    [
        (["script.py", "--steps", "0"], "At least one step", "unisono check script.py --steps 3"),
        (["script.py", "--resume"], "begins every run at step 0", "unisono check script.py"),
        (["nothing.py"], "no such file", "unisono check --help"),
        ([], "needs the name of a recipe, or the path of a script", "unisono check text"),
        (["script.py", "--set", "stepz=4"], "There is no setting stepz", "unisono check script.py --set steps=4"),
    ],
)
def test_wrong_requests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
    do: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(text_of({}))
    assert main(["check", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert f"Next: {do}\n" in told
