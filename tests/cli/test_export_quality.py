"""`unisono export`: the evaluation of the script, with the model and with the exported program."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.command import Command, last_json

SCRIPT = """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
import unisono


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 12
    kind: str = "after"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(4, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.leave = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.leave(torch.relu(self.norm(self.enter(x))))

    def classify(self, x):
        return self(x)


def accuracy(output, x, y):
    return {"accuracy": ((output.argmax(1) == y).sum(), len(y)),
            "valid_loss": (F.cross_entropy(output, y, reduction="sum"), len(y))}


def main(run):
    def samples(count, seed):
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())

    kind, valid = run.settings.kind, samples(37, 1)
    model, other = run.place(Net), run.place(Net)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=run.total_steps)
    run.track(model=model, other=other, optimizer=optimizer, schedule=schedule)
    for step in run.steps(samples(64, 0)):
        for x, y in step:
            step.backward(F.cross_entropy(model(x) + other(x), y, reduction="sum"), len(y))
        step.update(optimizer, schedule)
        if kind == "epochs" and step.ends_epoch:
            run.log(run.evaluate(model, valid, accuracy))
    run.evaluate(other, valid, accuracy)
    forward = {"closure": lambda _, batch: model(batch[0]),
               "method": lambda model, batch: model.classify(batch[0])}.get(kind)
    if kind == "raises":
        raise RuntimeError("no data for the evaluation")
    if kind == "others":
        return
    run.log(run.evaluate(model, iter(list(valid)) if kind == "iterator" else valid, accuracy, forward=forward))
    Path(__file__).with_name("ended").write_text(str(run.total_steps))


if __name__ == "__main__":
    unisono.main(main, Settings)
"""


def exported(command: Command, kind: str, *words: str, ranks: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, export, and return the result of the run and the report of the export."""
    command.script(SCRIPT)
    command.train("out", f"--set=kind={kind}", ranks=ranks)
    (command.folder / "ended").unlink(missing_ok=True)
    ended = command.run(
        "export", "out", "model.pt2", "--format", "torch", "--model", "model", *words, "--json", times=3
    )
    assert ended.status == 0, ended.err
    return json.loads((command.folder / "out" / "result.json").read_text()), last_json(ended.out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["after", "epochs", "iterator"])
def test_the_evaluation_of_the_script_measures_the_program(command: Command, kind: str) -> None:
    result, report = exported(command, kind)
    original = report["quality"]["original"]
    assert original == {name: result[name] for name in ("accuracy", "valid_loss")}, "not the weights of the checkpoint"
    assert report["quality"]["exported"] == pytest.approx(original, rel=1e-5)
    assert "not_evaluated" not in report
    assert not (command.folder / "ended").exists(), "code after the evaluation was executed"
    assert f"| `accuracy` | {original['accuracy']:.6g} |" in (command.folder / "model.pt2.md").read_text()


@pytest.mark.slow
def test_a_quantized_program_has_another_quality(command: Command) -> None:
    pytest.importorskip("torchao", reason="needs torchao: pip install 'unisono[quantize]'")
    result, report = exported(command, "after", "--quantize", "int8")
    original, found = report["quality"]["original"], report["quality"]["exported"]
    assert original["valid_loss"] == result["valid_loss"]
    assert 1e-7 < abs(found["valid_loss"] / original["valid_loss"] - 1) < 0.05


REASONS = {
    "closure": "does not call the model that it is given",
    "method": "AttributeError: 'ProgramCall' object has no attribute 'classify'",
    "raises": "no data for the evaluation",
    "others": "run.evaluate is not called with this model",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REASONS)
def test_a_program_that_was_not_evaluated_is_exported_with_the_reason(command: Command, kind: str) -> None:
    if kind == "raises":  # only while it is exported
        text = SCRIPT.replace('if kind == "raises":', 'if kind == "raises" and "out" not in str(run.dir):')
        command.script(text)
        command.train("out", "--set=kind=raises")
        ended = command.run("export", "out", "model.pt2", "--format", "torch", "--model", "model", "--json", times=3)
        assert ended.status == 0, ended.err
        report = last_json(ended.out)
    else:
        _, report = exported(command, kind)
    assert REASONS[kind] in report["not_evaluated"]
    assert "exported" not in report["quality"]
    assert (command.folder / "model.pt2").is_file()


@pytest.mark.slow
def test_no_evaluation_was_requested(command: Command) -> None:
    _, report = exported(command, "after", "--no-evaluate")
    assert "quality" not in report
    assert not (command.folder / "ended").exists()
