"""`unisono plan`: a real plan of a small script, and requests that cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.cli.main import main

SCRIPT = """
import torch, unisono
from torch import nn

def main(run):
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = run.place(lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            NEEDS_VALUES
            step.backward(loss, weight=len(x))
        step.update(optimizer)

if __name__ == "__main__":
    unisono.main(main)
"""


def script(tmp_path: Path, needs: str = "pass") -> str:
    """Write a script, and return its path. `needs`: a statement of the loop."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("NEEDS_VALUES", needs), encoding="utf-8")
    return str(path)


def test_unfit_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    for words, message in (
        (["--memory", "much"], "Invalid value for --memory: much"),
        (["--steps", "2"], "--steps 2 is out of range."),
        (["--run-dir", "x"], "--run-dir cannot be combined with unisono plan."),
    ):
        assert main(["plan", path, *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("needs", ["pass", "loss.item()"], ids=["fake", "real"])
def test_a_plan_lists_what_fits(tmp_path: Path, needs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [script(tmp_path, needs), "--ranks", "2", "--set", "steps=6", "--json"]
    assert main(["plan", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {each["processes"] for each in found["candidates"]} == {1, 2}
    for each in found["candidates"]:
        assert each["memory"] == sum(each["memory_by_part"].values())
        assert each["step_seconds"] > 0
        parameters = (8 * 64 + 64 + 64 + 1) * 4
        shards = 2 if "shard" in each["placement"] else 1
        assert each["memory_by_part"]["parameters"] == -(-parameters // shards)
    assert found["candidates"][0]["line"] == found["next"]
    assert any("real ones were counted" in note for note in found["notes"]) == (needs != "pass")


@pytest.mark.slow
def test_too_little_memory_names_the_least(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", script(tmp_path), "--memory", "1MB", "--set", "steps=6", "--ranks", "1"]) == 2
    message = capsys.readouterr().err
    assert "No placement fits in --memory 1 MB." in message
    assert "The least that a process needs is" in message


@pytest.mark.slow
def test_more_processes_than_virtual_ranks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", script(tmp_path), "--ranks", "9", "--set", "steps=6"]) == 2
    assert "virtual" in capsys.readouterr().err
