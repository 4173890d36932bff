"""Mixed precision: the same bits under any placement, and those of an autocast loop by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, attempt, loss_of, sgd
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run

CONFIG = replace(SETTINGS, steps=12, batch=8, virtual_ranks=4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))


class WithSpike(Numbers):
    """One sample exceeds the range of fp16."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x, i = super().__getitem__(i)
        return x * (1e6 if i == 7 else 1.0), i


def trained(run: Run[Any], data: Any, stop_after: int | None = None) -> dict[str, Any]:
    model = run.place(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    skipped, losses, dtypes = [], [], set()
    for step in run.steps(data):
        for x, i in step:
            out = model(x)
            with run.precision():
                dtypes |= {out.dtype, model[0](x).dtype}  # type: ignore[index]
            step.backward((out - x.sum(1, keepdim=True).clamp(-9, 9)).pow(2).sum(), weight=len(i))
        step.update(optimizer, schedule, clip=1.0)
        skipped.append(step.skipped)
        losses.append(str(step.loss))
        if step.number + 1 == stop_after:
            run.stop()
    return {
        "skipped": skipped,
        "losses": losses,
        "dtypes": sorted(map(str, dtypes)),
        "state": run.context.state.fingerprint(),
        "lr": optimizer.param_groups[0]["lr"],
        "scale": run.context.scale.value,
    }


def run_it(
    world: World, folder: str, precision: Any, data: Any, stop_after: int | None = None, resume: bool = False
) -> Any:
    config = replace(CONFIG, precision=precision)
    return attempt(world, Path(folder), partial(trained, data=data, stop_after=stop_after), config, resume=resume)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_any_number_of_processes_gives_the_same_bits(tmp_path: Path, precision: str) -> None:
    """With fp16 and a spike on one process, all processes skip the step, and the schedule waits."""
    data = WithSpike(23) if precision == "fp16" else Numbers(23)
    runs = [told for n in (1, 2, 3, 4) for told in run_ranks(run_it, n, str(tmp_path / str(n)), precision, data)]
    first = runs[0]
    assert isinstance(first, dict), first
    assert all(told == first for told in runs[1:])
    assert "torch.float32" in first["dtypes"]
    assert len(first["dtypes"]) == 2
    if precision == "fp16":
        assert 1 <= sum(first["skipped"]) < 12
        assert first["scale"] == 2.0**16 / 2 ** sum(first["skipped"])
        assert first["lr"] == 1e-3 * 0.5 ** ((12 - sum(first["skipped"])) // 3)
    else:
        assert not any(first["skipped"])


def test_the_scale_is_saved_with_the_run(tmp_path: Path) -> None:
    (whole,) = run_ranks(run_it, 1, str(tmp_path / "whole"), "fp16", WithSpike(23))
    (half,) = run_ranks(run_it, 1, str(tmp_path / "half"), "fp16", WithSpike(23), 5)
    assert half["scale"] < 2.0**16
    for told in run_ranks(run_it, 2, str(tmp_path / "half"), "fp16", WithSpike(23), None, True):
        assert told["state"] == whole["state"]
        assert told["scale"] == whole["scale"]


def hopeless(run: Run[Any]) -> Any:
    model = run.place(net)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    steps = 0
    for step in run.steps(Numbers()):
        for x, i in step:
            step.backward(loss_of(model, x * 1e9), weight=len(i))
        step.update(optimizer)
        steps += 1
    return steps


def test_a_loss_that_no_scale_makes_finite_is_refused(tmp_path: Path) -> None:
    for told in run_ranks(attempt, 2, tmp_path, hopeless, replace(CONFIG, precision="fp16", steps=100)):
        assert "Step 16 has a loss of" in told  # 16 halvings from 2^16 to 1
        assert "virtual rank 0 of 4" in told


def by_hand(model: nn.Module, batches: list[Any], precision: str) -> tuple[dict[str, torch.Tensor], float]:
    """Run the loop of torch's documentation, with sums.

    https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    for x, i in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
        loss = (out.float() - x.sum(1, keepdim=True).clamp(-9, 9)).pow(2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= len(i)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model.state_dict(), scaler.get_scale()


def beside(run: Run[Any], data: Any, precision: str) -> Any:
    model = run.place(net)
    twin = net()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    batches = []
    for step in run.steps(data):
        for x, i in step:
            batches.append((x, i))
            step.backward((model(x) - x.sum(1, keepdim=True).clamp(-9, 9)).pow(2).sum(), weight=len(i))
        step.update(optimizer, clip=1.0)
    theirs, scale = by_hand(twin, batches, precision)
    same = {name: torch.equal(value, theirs[name]) for name, value in model.state_dict().items()}
    return all(same.values()), run.context.scale.value == scale


@pytest.mark.parametrize(("precision", "data"), [("bf16", Numbers(23)), ("fp16", WithSpike(23))])
def test_with_one_virtual_rank_it_is_the_loop_by_hand(tmp_path: Path, precision: Any, data: Any) -> None:
    config = replace(CONFIG, precision=precision, virtual_ranks=1)
    assert run_ranks(attempt, 1, tmp_path, partial(beside, data=data, precision=precision), config) == [(True, True)]


def placed(run: Run[Any]) -> Any:
    model = run.place(net)
    copy: Callable[..., Any] = deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    x = torch.ones(2, 3)
    return {
        "signature": list(inspect.signature(model.forward).parameters),
        "the copy is its own": bool(copy(x).abs().sum() > 0) and model(x).abs().sum().item() == 0,
        "out": str(copy(x).dtype),
        "state": sorted(model.state_dict()) == sorted(net().state_dict()),
    }


def test_a_placed_model_keeps_its_class_and_names(tmp_path: Path) -> None:
    (told,) = run_ranks(attempt, 1, tmp_path, placed, replace(CONFIG, precision="bf16"))
    assert told == {"signature": ["input"], "the copy is its own": True, "out": "torch.float32", "state": True}
