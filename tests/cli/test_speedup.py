"""`unisono speedup`: what it measures, what it advises, and scripts and options that fail."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command, last_json, start
from unisono.cli.main import main
from unisono.cli.request.run_options import RunRequest
from unisono.cli.speedup.speed_options import ScriptSurvey, options
from unisono.cli.speedup.speed_rows import SpeedRow, TimedTrial
from unisono.cli.speedup.speed_trials import SpeedTrials
from unisono.config import CommandLine
from unisono.launcher.failure_record import FailureRecord
from unisono.launcher.supervisor import RunOutcome
from unisono.launcher.worker_process import WorkerFailure

LINE = CommandLine(("unisono", "speedup", "script.py"))
RUN_LINE = CommandLine(("unisono", "run", "script.py"))

SCRIPT = """
import torch, unisono
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 16, 3), nn.Linear(16, 4)

    def forward(self, x):
        x = self.enter(x).flatten(2).transpose(1, 2)[:, None].contiguous()
        return self.leave(F.scaled_dot_product_attention(x, x, x)[:, 0].mean(1))

def main(run):
    data = torch.utils.data.TensorDataset(torch.randn(50, 3, 6, 6), torch.arange(50) % 4)
    model = run.place(Net)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), len(y))
        step.update(optimizer)

if __name__ == "__main__":
    unisono.main(main)
"""

EVERYTHING = {
    "device": "cpu",
    "convolutions": 1,
    "float8_layers": 1,
    "attention_calls": 2,
    "optimizers": [{"name": "AdamW", "foreach": True, "fused": True, "compiled": True}],
}


class Machine:
    """A stand-in for the launcher: each trial gets the recordings of a machine whose times are known.

    Args:
        factors: By a setting, the factor by which it changes the time of a step.
        failing: The settings with which a run fails.
        stop_at: The number of the trial that the user stops.
        lowered: The settings that lower the promise.
    """

    def __init__(
        self,
        factors: Mapping[str, float],
        failing: Sequence[str] = (),
        stop_at: int = 0,
        lowered: Sequence[str] = (),
        facts: Mapping[str, Any] = EVERYTHING,
    ) -> None:
        self.factors, self.failing, self.stop_at, self.lowered, self.facts = factors, failing, stop_at, lowered, facts
        self.trials: list[set[str]] = []
        self.checked: list[bool] = []

    def start(self, script: Path, arguments: Sequence[str], *, ranks: int, **_: Any) -> RunOutcome:
        """Act as local_launch.run."""
        assert script.name == "script.py"
        given = dict(word[2:].split("=", 1) for word in arguments if not word.startswith("--set="))
        sets = {word.removeprefix("--set=") for word in arguments if word.startswith("--set=")}
        self.trials.append(sets & {*self.factors, *self.failing, *self.lowered})
        self.checked.append("promise.check=false" not in sets)
        if len(self.trials) == self.stop_at:
            return RunOutcome(exit_status=0, stopped=True)
        if sets & set(self.failing):
            record = FailureRecord(0.0, "LoopError", "It does not fit.", "LoopError: It does not fit.", 1)
            return RunOutcome(1, WorkerFailure(0, 1, 0.0, record, 0, 1, Path("rank-0.log")))
        noise = 1.0 + 0.01 * (len(self.trials) % 3)
        step = 0.1 * noise
        for each in sets & self.factors.keys():
            step *= self.factors[each]
        _kind, steps, _mode, folder = given["trace"].split(":", 3)
        run_dir = Path(given["run-dir"])
        (run_dir / "notes").mkdir()
        (run_dir / "settings.toml").write_text("virtual_ranks = 8\n")
        first = 5.0 if any("compile" in each for each in sets) else 0.5
        content = {"seconds": [first, *[step] * (int(steps) - 1)], "memory": 10**8, **self.facts}
        for rank in range(ranks):
            (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(content))
        promise = "tolerance" if sets & set(self.lowered) else "exact"
        result = {
            "promise": promise,
            "reason": "one reason",
            "weights_sha256": "b" if sets & self.factors.keys() else "a",
        }
        (run_dir / "result.json").write_text(json.dumps(result))
        return RunOutcome(exit_status=0)


def compare(folder: Path, machine: Machine, *only: str, json_: bool = False, ranks: int = 1) -> int:
    """Compare options on this machine."""
    (folder / "script.py").write_text("import unisono\n")
    return SpeedTrials(
        script=folder / "script.py",
        threads=1,
        steps=8,
        request=RunRequest(sets=("steps=9",), json=json_),
        line=LINE,
        folder=folder / "trials",
        start=machine.start,
        ranks=ranks,
        rounds=3,
        only=only,
        run_line=RUN_LINE,
    ).run()


def test_options_that_are_clearly_faster_are_combined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(
        {
            "speed.optimizer=fused": 0.9,
            "speed.channels_last=true": 0.8,
            "speed.attention=math": 1.5,
            "precision=bf16": 0.5,
        }
    )
    only = ("fused-optimizer", "channels-last", "math-attention", "bf16", "cuda-graphs")
    assert compare(tmp_path, machine, *only) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0].strip() for line in lines]
    first = ["option", "as it is", "as it is, again"]
    assert names[:8] == [*first, "bf16", "together", "channels-last", "fused-optimizer", "math-attention"]
    assert "together: speed.channels_last=true, speed.optimizer=fused." in lines
    assert "bf16 computes with fewer digits: compare the losses of longer runs first." in lines
    assert "cuda-graphs      not tried: CUDA graphs need an NVIDIA GPU, and processes compute on cpu." in lines
    assert lines[-2].startswith("together was clearly faster: 0.7")
    assert lines[-2].endswith("of the step time, other bits, promise stays exact.")
    assert lines[-1] == "  Next: unisono run script.py --set speed.channels_last=true --set speed.optimizer=fused"
    assert set(map(frozenset, machine.trials)) == {
        frozenset(),
        *(frozenset({each}) for each in machine.factors),
        frozenset({"speed.channels_last=true", "speed.optimizer=fused"}),
    }
    assert sum(machine.checked) == 1 + 5 + 1  # the survey, and the first trial of each; the others are timed


def test_rounds_differ_in_their_order_and_noise_is_no_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine({"speed.optimizer=fused": 0.995, "speed.attention=math": 1.0})
    assert compare(tmp_path, machine, "fused-optimizer", "math-attention") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "No option with as many digits and the same promise was clearly faster."
    )
    timed = [trial for trial, is_checked in zip(machine.trials, machine.checked, strict=True) if not is_checked]
    rounds = [timed[i : i + 4] for i in range(0, 12, 4)]
    assert all(sorted(map(sorted, one)) == sorted(map(sorted, rounds[0])) for one in rounds)
    assert rounds[0] != rounds[1] != rounds[2]


def test_an_option_that_lowers_the_promise_is_not_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine({"speed.optimizer=fused": 0.5}, lowered=["speed.optimizer=fused"])
    assert compare(tmp_path, machine, "fused-optimizer", json_=True, ranks=2) == 0
    found = last_json(capsys.readouterr().out)
    (row,) = found["options"]
    assert (row["bits"], row["promise"], row["pays"]) == ("promise lowered to: tolerance", "tolerance", True)
    assert found["next"] == "unisono run script.py"
    assert (found["ranks"], found["rounds"], found["steps"]) == (2, 3, 8)
    assert row["memory"] == 10**8
    assert compare(tmp_path, machine, "fused-optimizer") == 0
    assert "fused-optimizer lowers the promise to tolerance: one reason." in capsys.readouterr().out


def test_the_time_to_compile_is_paid_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine({"speed.compile_model=true": 0.5, "parallel.compile=true": 1.2})
    assert compare(tmp_path, machine, "compile-model", "compile-layers", json_=True) == 0
    model, layers = sorted(last_json(capsys.readouterr().out)["options"], key=lambda row: row["ratio"])
    assert model["compile_seconds"] == pytest.approx(4.55, abs=0.1)
    assert model["pays_after_steps"] == pytest.approx(4.55 / 0.05, rel=0.1)
    assert layers["pays_after_steps"] is None


def test_an_option_that_fails_is_named_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine({"speed.channels_last=true": 0.5}, failing=["speed.optimizer=fused"])
    assert compare(tmp_path, machine, "fused-optimizer", "channels-last") == 0
    out = capsys.readouterr().out
    assert "fused-optimizer  fails: It does not fit." in out
    assert out.splitlines()[-1] == "  Next: unisono run script.py --set speed.channels_last=true"
    assert machine.trials.count({"speed.optimizer=fused"}) == 1


def test_a_script_that_fails_as_it_is_ends_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, Machine({}, failing=["steps=9"]), "fused-optimizer", ranks=2) == 1
    assert capsys.readouterr().out.startswith("The script fails on 2 processes.\n\nLoopError: It does not fit.")


@pytest.mark.parametrize("json_", [False, True])
def test_a_stop_prints_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], json_: bool) -> None:
    machine = Machine({"speed.optimizer=fused": 0.5}, stop_at=8)
    assert compare(tmp_path, machine, "fused-optimizer", json_=json_) == 1
    printed = capsys.readouterr()
    assert "Stopped before the comparison was complete.\n  Next: unisono speedup script.py" in printed.err
    if json_:
        assert last_json(printed.out)["options"][0]["ratio"] == pytest.approx(0.5, abs=0.02)
    else:
        assert [line.split("  ")[0] for line in printed.out.splitlines()][1:4] == [
            "as it is",
            "as it is, again",
            "fused-optimizer",
        ]


def test_options_that_a_script_cannot_use_have_reasons() -> None:
    adafactor = {"name": "Adafactor", "foreach": True, "fused": False, "compiled": True}
    survey = ScriptSurvey("cpu", 0, 0, 0, [adafactor], {"precision": "bf16", "threads": 2})
    reasons = {option.name: survey.why_not(option) for option in options(2)}
    assert {name for name, reason in reasons.items() if not reason} == {
        *("compile-layers", "compile-model", "compiled-optimizer", "foreach-optimizer")
    }
    assert reasons["fused-optimizer"] == "torch has no fused step of Adafactor."
    assert reasons["bf16"] == reasons["threads"] == "It is set already."
    able = ScriptSurvey("cuda", 1, 1, 1, [])
    assert not any(map(able.why_not, options(2)))


def test_options_are_settings_and_refused_together_where_they_conflict(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    trials = SpeedTrials(
        script=tmp_path / "script.py",
        threads=1,
        steps=8,
        request=RunRequest(sets=("steps=9", "parallel.shard=2")),
        line=LINE,
        folder=tmp_path,
        ranks=2,
        rounds=1,
        run_line=RUN_LINE,
    )
    misfits = {option.name: trials._misfit(option) for option in options(2)}
    assert "within the forward pass of the model" in misfits["compile-model"]
    assert "round an element differently" in misfits["compiled-optimizer"]
    assert misfits["cudnn-attention"] == "The CPU has the back ends math and flash."
    assert not any(misfits[name] for name in ("fused-optimizer", "channels-last", "math-attention", "bf16"))


def test_without_a_complete_round_a_row_has_no_ratio() -> None:
    option = next(options(1))
    trial = TimedTrial([1.0, 1.0, 1.0, 0.1, 0.2, 0.3], 1, "a", "exact", "")
    row = SpeedRow(option, first=trial)
    assert (row.ratio, trial.step, round(trial.excess, 3)) == (None, 0.2, 2.4)
    base = SpeedRow(option, first=replace(trial, weights=None))
    assert row.bits(base) == "promise stays exact"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("nosuch", "There is no"),
        ("text --steps 3", "--steps 3 is out of range."),
        ("text --rounds 0", "--rounds 0 is out of range."),
        ("text --only fused", "There is no option fused."),
        ("text --resume", "--resume cannot be combined with unisono speedup."),
        ("text --ranks 0", "--ranks 0 is out of range."),
    ],
)
def test_wrong_requests(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speedup", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.ci
def test_a_script_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes on 2 ranks: the survey, the bits and the promise."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("{optimizer}", "AdamW"))
    trials = SpeedTrials(
        script=tmp_path / "script.py",
        threads=1,
        steps=5,
        request=RunRequest(sets=("steps=9", "batch=16"), json=True),
        line=LINE,
        folder=tmp_path / "trials",
        start=start,
        ranks=2,
        rounds=1,
        only=("fused-optimizer", "flash-attention", "channels-last", "float8-tensorwise"),
        run_line=RUN_LINE,
    )
    assert trials.run() == 0
    rows = {row["option"]: row for row in last_json(capsys.readouterr().out)["options"]}
    assert rows["fused-optimizer"]["bits"] in ("other bits, promise stays exact", "same bits")  # by processor
    assert rows["flash-attention"]["bits"] == "same bits"
    assert rows["channels-last"]["promise"] == "exact"
    assert rows["channels-last"]["memory"] > 10**7
    assert rows["float8-tensorwise"]["not_tried"] == "The model has no linear layer whose sizes are multiples of 16."


@pytest.mark.slow
def test_a_failing_option_and_an_interrupt_with_real_commands(command: Command) -> None:
    """torch's compiled step of this optimizer is refused; a pipe gets the table without control characters."""
    text = SCRIPT.replace("{optimizer}", "AdamW").replace("def main(run):", "def main(run):\n    failing(run)")
    failing = """
def failing(run):
    say("begun")
    if run.settings.speed.attention == "math":
        raise RuntimeError("not this one")
    if run.settings.speed.channels_last:
        time.sleep(600)
"""
    command.script(failing + text)
    words = ["speedup", "script.py", "--set", "steps=9", "--rounds", "1", "--steps", "4"]
    ended = command.run(*words, "--only", "math-attention", "--only", "flash-attention", times=3)
    assert ended.status == 0, ended.err
    assert "math-attention   fails: not this one" in ended.out
    assert "same bits" in ended.out
    assert "\x1b" not in ended.out
    with command.listening():
        running = command.start(*words, "--only", "channels-last")
        command.wait_for("begun 0")
        running.send_signal(signal.SIGINT)
        ended = command.end(running)
    assert ended.status == 1
    assert "Stopped before the comparison was complete." in ended.err
    command.wait_until_gone()
