"""Scripts with a mistake, on two processes: one message, last on the screen, status 1, nobody hangs."""

from __future__ import annotations

import pytest

from tests.cli.command import Command

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
    "no data": ({"length": "0"}, "It has length 0"),
    "a mean": ({"reduce": "mean"}, 'use reduction="sum"'),
    "no graph": ({"body": "step.backward(loss.detach(), len(x))"}, "a loss without a graph"),
    "not a number": ({"body": "step.backward(loss * float('nan'), len(x))"}, "has a loss of nan"),
    "no weight": ({"body": "step.backward(loss, 0)"}, "total weight"),
    "break": ({"body": "break"}, "was left with break"),
    "no update": ({"after": "pass"}, "ended without an update"),
    "a worker that dies": ({"fetch": "os._exit(3)"}, "It died without a word"),
}


SHARP = ("not a number", "break", "a worker that dies")
"""Told by the loop, by its end, and of another process. tests/ranks/test_contract.py has them all."""


@pytest.mark.parametrize("mistake", [m if m in SHARP else pytest.param(m, marks=pytest.mark.slow) for m in MISTAKES])
def test_a_mistake_is_told_last_and_ends_everybody(command: Command, mistake: str) -> None:
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
def test_without_a_mistake_it_runs(command: Command) -> None:
    command.script(SCRIPT.format(**GOOD))
    assert command.run("run", "script.py", "--ranks", "2", "--set", "steps=3", "--set", "batch=8").status == 0
