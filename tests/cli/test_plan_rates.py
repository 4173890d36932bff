"""`unisono plan --lr`: the same curve on any number of processes, what it suggests, and requests that cannot work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import last_json, start_quietly
from unisono.cli.main import main
from unisono.cli.planning.rate_trial import RateTrial
from unisono.cli.request.run_options import RunRequest
from unisono.errors import SettingsError

SCRIPT = """
from dataclasses import dataclass
import torch, unisono
from torch import nn

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64
    virtual_ranks: int = 4
    steps: int | None = 8
    dropout: float = 0.05
    peak: float = 0.05
    groups: int = 1
    optimizer: bool = True
    optimizers: int = 1

class Idle:
    def step(self): pass
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def main(run):
    settings = run.settings
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    y = x @ torch.arange(8.0).reshape(8, 1) / 4
    layers = lambda: (nn.Linear(8, 32), nn.ReLU(), nn.Dropout(settings.dropout), nn.Linear(32, 1))
    model = run.place(lambda: nn.Sequential(*layers()))
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[3].parameters()], "lr": settings.peak / 5}]
    groups = groups if settings.groups == 2 else model.parameters()
    optimizer = torch.optim.SGD(groups, lr=settings.peak, momentum=0.9) if settings.optimizer else Idle()
    if settings.optimizers == 2:
        optimizer = torch.optim.SGD(model[0].parameters(), lr=settings.peak, momentum=0.9)
        second = torch.optim.AdamW(model[3].parameters(), lr=settings.peak / 5)
        run.track(second=second)
    schedule = []
    if settings.optimizer:
        schedule = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    run.track(model=model, optimizer=optimizer, **({"schedule": schedule[0]} if schedule else {}))
    for step in run.steps(torch.utils.data.TensorDataset(x, y)):
        for a, b in step:
            step.backward(nn.functional.mse_loss(model(a), b, reduction="sum"), weight=len(a))
        step.update(optimizer, *([second] if settings.optimizers == 2 else []), *schedule)
        if settings.optimizer:
            rates = [group["lr"] for group in optimizer.param_groups]
            assert rates[0] == schedule[0].get_last_lr()[0], "the schedule finds the rates that it has set"

if __name__ == "__main__":
    unisono.main(main, Settings)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def trial(script: Path, folder: Path, *sets: str, ranks: int = 1, steps: int = 30) -> RateTrial:
    """Return a range test whose processes are forked."""
    request = RunRequest(sets=sets, json=True)
    return RateTrial(
        script=script,
        threads=1,
        steps=steps,
        request=request,
        line=request.line("unisono", "plan", str(script), "--lr"),
        folder=folder,
        start=start_quietly,
        ranks=ranks,
        first=1e-5,
        last=100.0,
        page=folder / "page.html",
        run_line=replace(request, json=False).line("unisono", "run", str(script)),
    )


@pytest.mark.ci
def test_the_curve_is_the_same_on_any_number_of_processes(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for ranks in (1, 2):
        assert trial(script, tmp_path / str(ranks), "groups=2", ranks=ranks).run() == 0
        found.append(last_json(capsys.readouterr().out))
        assert {len(found[-1][name]) for name in ("rates", "losses", "smoothed")} == {len(found[0]["losses"])}
    one, two = found
    for name in ("rates", "losses", "smoothed", "suggestion", "steepest", "minimum", "ended", "start", "setting"):
        assert two[name] == one[name], name
    assert one["ended"] in ("diverged", "not finite")
    assert len(one["losses"]) < 30
    assert one["start"] > min(one["smoothed"])
    assert one["rates"][0] < one["suggestion"] < one["minimum"]
    assert (one["groups"], one["optimizers"]) == (2, ["SGD"])
    assert one["setting"] == "peak", "dropout has the same value, and the optimizer does not follow it"
    assert one["value"] == pytest.approx(one["suggestion"])
    assert one["next"] == f"unisono run {script} --set groups=2 --set peak={one['value']:.3g}"
    between = f"peak=log({one['value']:.3g},{one['minimum']:.3g})"
    assert one["search"] == f"unisono tune {script} --set groups=2 --search '{between}'"
    page = (tmp_path / "1" / "page.html").read_text(encoding="utf-8")
    assert '"kind":"rates"' in page
    assert one["next"] in page


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sets", "placement", "optimizers"),
    [
        (["optimizers=2"], [], ["SGD", "AdamW"]),
        (["precision=fp16"], [], ["SGD"]),
        (["precision=fp16", "optimizers=2"], ["parallel.shard=2"], ["SGD", "AdamW"]),
    ],
    ids=["two optimizers", "fp16", "shards"],
)
def test_optimizers_scaled_losses_and_shards_have_one_curve(
    script: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sets: list[str],
    placement: list[str],
    optimizers: list[str],
) -> None:
    found = []
    for ranks in (1, 2):
        more = placement if ranks == 2 else []
        assert trial(script, tmp_path / str(ranks), *sets, *more, ranks=ranks).run() == 0
        found.append(last_json(capsys.readouterr().out))
    one, two = found
    for name in ("rates", "losses", "smoothed", "suggestion", "minimum", "ended", "setting", "optimizers"):
        assert two[name] == one[name], name
    assert one["optimizers"] == optimizers
    assert one["rates"][0] < one["suggestion"] < one["minimum"]


def test_a_script_without_a_learning_rate_is_named(script: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"train.py has no learning rate to test."):
        trial(script, tmp_path / "none", "optimizer=false").run()


@pytest.mark.parametrize("exchange", ["local_sgd", "server"])
def test_exchanges_without_one_model_are_named(script: Path, tmp_path: Path, exchange: str) -> None:
    with pytest.raises(SettingsError, match=f"The range test is not possible with exchange={exchange}"):
        trial(script, tmp_path / "other", f"exchange={exchange}", ranks=2).run()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "--lr-steps", "5"], "--lr-steps 5 is out of range."),
        (["--lr", "--lr-from", "1", "--lr-to", "0.1"], "--lr-from 1 --lr-to 0.1 is no range of rates."),
        (["--lr", "--lr-from", "0"], "--lr-from 0 --lr-to 10 is no range of rates."),
        (["--lr", "--lr-to", "inf"], "--lr-from 1e-07 --lr-to inf is no range of rates."),
        (["--lr", "--memory", "1GB"], "--memory has no effect with --lr."),
        (["--lr", "--page", "no/where.html"], "Cannot write no/where.html."),
        (["--lr-steps", "50"], "--lr-steps has no effect without --lr."),
        (["--lr", "--run-dir", "x"], "--run-dir cannot be combined with unisono plan."),
    ],
)
def test_unfit_requests_are_refused(
    script: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(script), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_a_curve_and_a_line(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", str(script), "--lr", "--lr-from", "1e-5", "--lr-to", "100", "--lr-steps", "40"]
    assert main([*words, "--ranks", "2"]) == 0
    screen = capsys.readouterr().out
    assert "steepest descent" in screen
    assert re.search(rf"  Next: unisono run {script} --ranks 2 --set peak=\S+$", screen, re.M)
    assert (tmp_path / "runs" / "train-lr.html").is_file()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["train-lr.html"], "no run directory is left"
