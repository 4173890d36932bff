"""`unisono plan`: a real plan of a small script, and requests that cannot work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.cli.main import main
from unisono.costs.recorded_costs import WARM_UP
from unisono.train.costs.step_costs import MOST_MORE, TIMED_SECONDS

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

END = """
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
        (["--memory", "0"], "Invalid value for --memory: 0"),
        (["--memory", "3 bananas"], "Invalid value for --memory: 3 bananas"),
        (["--steps", "2"], "--steps 2 is out of range."),
        (["--steps", "1"], "--steps 1 is out of range."),
        (["--trials", "0"], "--trials 0 is out of range."),
        (["--run-dir", "x"], "--run-dir cannot be combined with unisono plan."),
    ):
        assert main(["plan", path, *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message", "do"),
    [
        ("--devices h20", "There is no device h20.", "--devices h200"),
        ("--devices h20:8", "There is no device h20.", "--devices h200:8"),
        ("--devices a10:0", "Invalid value for --devices: a10:0", "--devices a10:8"),
        ("--devices this:4", "Invalid value for --devices: this:4", "--devices this --ranks 4"),
        ("--devices a10:2,a10:4", "--devices has a10 twice.", "--devices a10"),
        ("--devices ,", "--devices is empty.", "--devices h200:8"),
        ("--devices none.toml", "Cannot read none.toml.", "--devices h200:8"),
        ("--price a10=0.9", "--price names a device that is not compared: a10", "--devices this,a10:1"),
        ("--devices a10 --price a1=1", "--price names a device that is not compared: a1", "--price a10=1"),
        ("--devices a10 --price a10=cheap", "Invalid value for --price: a10=cheap", "--price a10=3.5"),
        ("--price 3", "Invalid value for --price: 3", "--price this=3.5"),
    ],
)
def test_unfit_devices_are_refused(
    words: str, message: str, do: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", script(tmp_path), *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert do in error.rpartition("Next: ")[2], error


def test_a_device_file_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('[[device]]\nname = "ours"\n', encoding="utf-8")
    assert main(["plan", script(tmp_path), "--devices", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file}: ours has no memory." in error
    assert 'Next: memory = "24GB"' in error


def last(out: str) -> Any:
    """Return the JSON object that --json prints."""
    return json.loads(out.splitlines()[-1])


@pytest.mark.ci
def test_devices_that_are_not_here_are_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('[[device]]\nname = "tiny"\nmemory = "1MB"\nflops = 1e12\n', encoding="utf-8")
    words = ["--devices", f"h200:2,a10,{file}", "--price", "h200=3.6", "--set", "epochs=2", "--set", "batch=16"]
    assert main(["plan", script(tmp_path), *words, "--json"]) == 0
    found = last(capsys.readouterr().out)
    h200, a10, tiny = found["devices"]
    assert [h200["count"], a10["count"], tiny["candidates"]] == [2, 1, []]
    assert {each["processes"] for each in h200["candidates"]} == {1, 2}
    for each in h200["candidates"]:
        assert each["estimated"]
        assert each["seconds"] == pytest.approx(8 * each["step_seconds"])  # two epochs of four steps
        assert each["cost"] == pytest.approx(each["seconds"] / 1000 * each["processes"])
    assert a10["candidates"][0]["cost"] is None
    assert "candidates" not in found  # this machine was not asked for
    assert any(note.startswith("Nothing fits on tiny: the least is 50") for note in found["notes"])
    assert found["next"].startswith("unisono run ")


@pytest.mark.slow
def test_a_script_without_a_step_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "idle.py"
    path.write_text(SCRIPT.replace("for x, y in step:", "break").split("            loss =")[0] + END, encoding="utf-8")
    assert main(["plan", str(path), "--ranks", "1", "--set", "steps=6"]) == 2
    error = capsys.readouterr().err
    assert "idle.py made no step." in error
    assert "Next: for step in run.steps(train_set)" in error


@pytest.mark.ci
@pytest.mark.parametrize("steps", [5, 500])
def test_processes_agree_on_the_number_of_short_steps(tmp_path: Path, steps: int) -> None:
    request = [f"--trace=costs:5:{tmp_path}/costs", "--run-dir", f"{tmp_path}/run", "--set", f"steps={steps}"]
    words = [script(tmp_path), "--ranks", "2", *request, "--set", "epochs=none"]
    assert main(["run", *words]) == 0
    found = [json.loads((tmp_path / "costs" / f"rank-{rank}.json").read_text())["steps"] for rank in range(2)]
    assert len(found[0]) == len(found[1])
    timed = sum(max(step["seconds"] for step in both) for both in list(zip(*found, strict=True))[WARM_UP:])
    if steps == 5:
        assert len(found[0]) == 5, "the run has no more steps"
    else:
        assert len(found[0]) == 5 + MOST_MORE or timed > TIMED_SECONDS / 2


@pytest.mark.slow
def test_virtual_ranks_are_measured_up_to_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "1", "--virtual-ranks", "--set", "steps=6", "--set", "batch=4", "--set", "virtual_ranks=2"]
    assert main(["plan", script(tmp_path), *words, "--json"]) == 0
    found = last(capsys.readouterr().out)
    assert found["virtual_ranks"].keys() == {"1", "2", "4"}
    assert min(found["virtual_ranks"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("needs", ["pass", "loss.item()"], ids=["fake", "real"])
def test_a_plan_lists_what_fits(tmp_path: Path, needs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [script(tmp_path, needs), "--ranks", "2", "--set", "steps=6", "--json", "--offload", "--trials", "2"]
    assert main(["plan", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {each["processes"] for each in found["candidates"]} == {1, 2}
    for each in found["candidates"]:
        assert each["memory"] == sum(each["memory_by_part"].values())
        assert each["step_seconds"] > 0
        parameters = (8 * 64 + 64 + 64 + 1) * 4
        shards = 2 if "shard" in each["placement"] else 1
        assert each["memory_by_part"]["parameters"] == -(-parameters // shards)
    on_host = [each for each in found["candidates"] if "offload" in each["placement"]]
    assert {each["placement"].removesuffix(", recompute") for each in on_host} == {
        "2 shards, offload",
        "2 shards (by step), offload",
    }
    assert all("--set parallel.offload=true" in each["line"] for each in on_host)
    assert found["candidates"][0]["line"] == found["next"]
    first, *others = (each["trials"] for each in found["candidates"])
    assert first >= 1, "the first choice is measured"
    assert first == 1 or max(others) > 1, "placements that are close to each other are measured again"
    assert any("real ones were counted" in note for note in found["notes"]) == (needs != "pass")


@pytest.mark.slow
def test_other_programs_that_use_the_cores_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert main(["plan", script(tmp_path), "--ranks", "2", "--json", "--set", "steps=9", "--trials", "1"]) == 0
    finally:
        for other in others:
            other.kill()
            other.wait()
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(re.match(r"Other programs used \d+\.\d of \d+ cores while steps were timed", note) for note in notes)


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
