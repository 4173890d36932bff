"""Scripts with a mistake on two processes: one message at the end of the output, status 1, and no hang."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.refused_requests import SCRIPT as PLAIN
from tests.cli.refused_requests import RequestProblems
from unisono.cli.request.target import problems_of_train
from unisono.errors import Problem

SCRIPT = """
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return {length}
    def __getitem__(self, i):
        {fetch}
        return torch.ones(4) * i

def main(run):
    model = run.place(lambda: torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr={lr})
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Data()):
        for x in step:
            loss = model(x).pow(2).{reduce}()
            {body}
        {after}

unisono.main(main, unisono.Settings)
"""

GOOD = {
    "length": "20",
    "fetch": "pass",
    "lr": "0.001",
    "reduce": "sum",
    "body": "step.backward(loss, len(x))",
    "after": "step.update(optimizer)",
}

MISTAKES = {
    "no data": ({"length": "0"}, " is 0."),
    "a mean": ({"reduce": "mean"}, 'use reduction="sum"'),
    "no graph": ({"body": "step.backward(loss.detach(), len(x))"}, "a loss without a graph"),
    "not a number": ({"body": "step.backward(loss * float('nan'), len(x))"}, "has a loss of nan"),
    "no weight": ({"body": "step.backward(loss, 0)"}, "total weight"),
    "break": ({"body": "break"}, "was left with break"),
    "no update": ({"after": "pass"}, "ended without an update"),
    "a worker that dies": (
        {"fetch": "os._exit(3) if torch.utils.data.get_worker_info() else None"},
        "A loader worker died 4 times in a row",
    ),
}


QUICK = ("not a number", "a worker that dies")
"""Detected in the loop, and in a loader worker. tests/ranks/test_loop_contract.py covers the rest."""


@pytest.mark.ci
@pytest.mark.parametrize("mistake", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MISTAKES])
def test_a_mistake_ends_all_processes_with_one_message(command: Command, mistake: str) -> None:
    changes, words = MISTAKES[mistake]
    command.script(SCRIPT.format(**{**GOOD, **changes}))
    workers = "1" if "fetch" in changes else "0"
    ended = command.run(
        "run", "script.py", "--ranks", "2", "--set", "steps=3", "--set", "batch=8", "--set", f"loader.workers={workers}"
    )
    assert ended.status == 1
    assert words in ended.err
    assert ended.last.lstrip().startswith("Next: ")
    files = {line.split('"')[1] for line in ended.err.splitlines() if line.startswith('  File "')}
    assert files == {"script.py"} or "worker" in mistake, "only lines that the user can change"


@pytest.mark.slow
def test_the_script_without_a_mistake_runs(command: Command) -> None:
    command.script(SCRIPT.format(**GOOD))
    assert command.run("run", "script.py", "--ranks", "2", "--set", "steps=3", "--set", "batch=8").status == 0


def no_run_parameter(shown: str, script: str = "script.py") -> Problem:
    """Return the problem of a main function that does not take a run."""
    facts = f"{script} passes {shown}, and unisono.main(main) calls main(run)."
    return Problem("The function for unisono.main does not take a run.", facts, f"Write in {script}: def main(run):")


@pytest.mark.parametrize("shown", ["main()", "main(run, config)", "main(run, *, lr)"])
def test_a_main_without_a_run_parameter_is_refused(
    request_problems: RequestProblems, tmp_path: Path, shown: str
) -> None:
    text = PLAIN.replace("if __name__", f"def {shown}:\n    pass\n\nif __name__").replace("main(print", "main(main")
    (tmp_path / "mine.py").write_text(text)
    assert request_problems("run", "mine.py", "--ranks", "2") == [no_run_parameter(shown, "mine.py")]


@pytest.mark.parametrize(
    ("more", "function"),
    [
        ("main(run)", "pass"),
        ("main(run, lr=1, *, more=2)", "pass"),
        ("main(*all)", "pass"),
        ("main()", "main = print"),
    ],
)
def test_a_main_that_can_take_a_run_is_not_refused(
    request_problems: RequestProblems, tmp_path: Path, more: str, function: str
) -> None:
    text = PLAIN.replace("if __name__", f"def {more}:\n    pass\n\n{function}\n\nif __name__")
    (tmp_path / "mine.py").write_text(text.replace("main(print", "main(main"))
    assert [problem.error for problem in request_problems("run", "mine.py", "--ranks", "0")] == [
        "--ranks 0 is out of range."
    ]


@pytest.mark.parametrize(
    ("train", "shown"),
    [
        (lambda: None, "<lambda>()"),
        (lambda run, more: None, "<lambda>(run, more)"),
        (None, "None"),
        ("main", "'main'"),
        (print, ""),
        (partial(lambda run, more: None, more=2), ""),
        (max, ""),
    ],
)
def test_problems_of_train_checks_any_callable(train: object, shown: str) -> None:
    assert problems_of_train(Path("script.py"), train) == ([no_run_parameter(shown)] if shown else [])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "found"),
    [("unisono.Settings(steps=2)", "an object of Settings"), ("dict", "class dict"), ("3", "an object of int")],
)
def test_plain_python_refuses_settings_that_are_no_class_of_settings(
    command: Command, settings: str, found: str
) -> None:
    command.script(
        SCRIPT.format(**GOOD).replace("unisono.main(main, unisono.Settings)", f"unisono.main(main, {settings})")
    )
    ended = command.end(command.start_python("script.py"))
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("unisono.main needs a class of settings.\n")
    assert f"must be a subclass of unisono.Settings; it is {found}.\n" in ended.err


def test_plain_python_refuses_a_main_without_a_run_parameter(command: Command) -> None:
    command.script("""
        def same(function):
            return function

        @same
        def main():
            pass

        unisono.main(main)
        """)
    ended = command.end(command.start_python("script.py", "--run-dir", "out", "--set", "steps=1"))
    assert (ended.status, ended.out, ended.err) == (2, "", f"{no_run_parameter('main()')}\n")
    assert not (command.folder / "out").exists()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("given", "true"),
    [
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT are not set."),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            "Rank 2 of 2 is impossible with local rank 0 of 1 on this host.",
        ),
    ],
)
def test_inconsistent_launcher_variables_are_reported(
    command: Command, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], true: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (command.folder / "script.py").write_text("import unisono\nunisono.main(lambda run: None)\n")
    ended = command.end(command.start_python("script.py", "--set", "steps=1"))
    assert (ended.status, ended.out) == (1, "")
    error, facts, _ = ended.err.splitlines()
    assert error.startswith("Invalid torchrun variables: ")
    assert facts == f"  {true}"
    assert ended.last.startswith("  Next: env -u RANK -u WORLD_SIZE python script.py --set steps=1 (one process), or ")


def test_a_process_that_waits_for_missing_peers_prints_a_message(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    command.script("""
        import unisono.distributed.init

        unisono.distributed.init.SLOW_START_SECONDS = 0.5
        unisono.main(lambda run: None)
        """)
    waiting = command.start_python("script.py", "--set", "steps=1")
    assert waiting.stderr is not None
    text = f"Process 0 of 2 waits for the others at 127.0.0.1:{port}: have all of them been started?"
    assert any(text in line for line in waiting.stderr)
    assert waiting.poll() is None
