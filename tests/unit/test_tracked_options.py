"""Options of optimizers and schedules after a resume with other settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from unisono.scaling import warmup_cosine
from unisono.train.state.tracked_options import TrackedOptions, moved, options_of

BEFORE, AFTER, STEPS, TOTAL = 0.1, 0.02, 7, 20

Build = Callable[[Optimizer, float], Any]

SCHEDULES: dict[str, Build] = {
    "constant": lambda optimizer, lr: schedules.LambdaLR(optimizer, lambda step: 1.0),
    "lambda": lambda optimizer, lr: schedules.LambdaLR(optimizer, lambda step: min(1.0, step / 10)),  # begins at 0
    "steps": lambda optimizer, lr: schedules.StepLR(optimizer, 5, gamma=0.5),
    "cosine": lambda optimizer, lr: schedules.CosineAnnealingLR(optimizer, TOTAL),
    "floor": lambda optimizer, lr: schedules.CosineAnnealingLR(optimizer, TOTAL, eta_min=0.001),
    "share": lambda optimizer, lr: schedules.CosineAnnealingLR(optimizer, TOTAL, eta_min=lr / 10),
    "one cycle": lambda optimizer, lr: schedules.OneCycleLR(optimizer, [lr, 2 * lr], total_steps=TOTAL + 1),
    "cyclic": lambda optimizer, lr: schedules.CyclicLR(optimizer, [lr / 5, lr], [lr, 2 * lr], step_size_up=4),
    "warm-up": lambda optimizer, lr: warmup_cosine(optimizer, warmup=3, total=TOTAL),
    "exponential": lambda optimizer, lr: schedules.ExponentialLR(optimizer, 0.9),
}


def build(schedule: Build, lr: float) -> tuple[Optimizer, Any]:
    """Return an optimizer with two groups, and its schedule, as a script builds them from its settings."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 2 * lr}]
    optimizer = SGD(groups, lr=lr, momentum=0.9)
    return optimizer, schedule(optimizer, lr)


def rates(optimizer: Optimizer, schedule: Any, steps: int) -> list[list[float]]:
    """Return the learning rates of the next steps."""
    found = []
    for _ in range(steps):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def resumed(schedule: Build, *, follows: bool = True) -> tuple[Optimizer, Any, TrackedOptions]:
    """Return the optimizer and the schedule after STEPS steps, then a resume with another learning rate."""
    first, second = TrackedOptions(), TrackedOptions()
    before = dict(zip(("optimizer", "schedule"), build(schedule, BEFORE), strict=True))
    now = dict(zip(("optimizer", "schedule"), build(schedule, AFTER), strict=True))
    for options, things in ((first, before), (second, now)):
        for name, thing in things.items():
            options.note(name, thing)
    rates(before["optimizer"], before["schedule"], STEPS)
    for name, thing in now.items():
        thing.load_state_dict(deepcopy(before[name].state_dict()))
    second.follows = follows
    second.apply(now, json.loads(json.dumps(first.given)))
    second.schedules.set_rates(now.values())
    return now["optimizer"], now["schedule"], second


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_continues_as_if_built_with_the_new_settings(name: str) -> None:
    expected = rates(*build(SCHEDULES[name], AFTER), TOTAL)[STEPS:]
    optimizer, schedule, options = resumed(SCHEDULES[name])
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    found = rates(optimizer, schedule, TOTAL - STEPS)
    assert found == [pytest.approx(each, rel=1e-12) for each in expected]
    assert options.changed


@pytest.mark.parametrize("name", ["cosine", "one cycle"])
def test_without_an_accepted_change_saved_options_stay(name: str) -> None:
    expected = rates(*build(SCHEDULES[name], BEFORE), TOTAL)[STEPS:]
    optimizer, schedule, options = resumed(SCHEDULES[name], follows=False)
    assert rates(optimizer, schedule, TOTAL - STEPS) == expected
    assert options.changed == []


def test_a_rate_lowered_on_a_plateau_keeps_its_proportion() -> None:
    def lowered(optimizer: Optimizer, lr: float) -> Any:
        return schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    first, second = TrackedOptions(), TrackedOptions()
    before, now = build(lowered, BEFORE), build(lowered, AFTER)
    for options, (optimizer, schedule) in ((first, before), (second, now)):
        options.note("optimizer", optimizer)
        options.note("schedule", schedule)
    for loss in (1.0, 1.0):
        before[1].step(loss)
    for of, saved in zip(now, before, strict=True):
        of.load_state_dict(deepcopy(saved.state_dict()))
    second.follows = True
    second.apply({"optimizer": now[0], "schedule": now[1]}, first.given)
    assert [group["lr"] for group in now[0].param_groups] == pytest.approx([AFTER / 2, AFTER])


def test_an_unchanged_option_gets_exactly_the_new_value() -> None:
    """Betas, weight decay and a learning rate without a schedule; one that is a tensor changes in place."""

    def built(lr: float, beta: float, decay: float) -> AdamW:
        weight = torch.nn.Parameter(torch.ones(2))
        return AdamW([weight], lr=torch.tensor(lr, dtype=torch.float64), betas=(beta, 0.99), weight_decay=decay)

    first, second = TrackedOptions(), TrackedOptions()
    before, now = built(0.1, 0.9, 0.0), built(0.3, 0.8, 0.01)
    first.note("optimizer", before)
    second.note("optimizer", now)
    now.load_state_dict(deepcopy(before.state_dict()))
    group = now.param_groups[0]
    rate = group["lr"]
    second.follows = True
    second.apply({"optimizer": now}, first.given)
    assert (float(group["lr"]), group["betas"], group["weight_decay"]) == (0.3, (0.8, 0.99), 0.01)
    assert group["lr"] is rate
    assert [name for name, _, _ in second.changed] == [f"optimizer.{key}" for key in ("lr", "betas", "weight_decay")]


def test_options_that_the_loop_has_changed() -> None:
    assert moved(0.05, 0.1, 0.2, 2.0) == 0.1  # a rate that was halved
    assert moved(0.1, 0.1, 0.3, 3.0000001) == 0.3
    assert moved(0.2, 0.1, 0.3, None) == pytest.approx(0.6)  # a weight decay that was doubled
    assert moved(0.2, 0.0, 0.3, None) == 0.3
    assert moved(0.2, 0.1, 0.1, None) == 0.2
    assert moved([0.9, 0.99], [0.9, 0.999], [0.8, 0.999], None) == [0.8, 0.99]
    assert moved(True, False, False, None) is True
    assert options_of(torch.nn.Linear(1, 1)) is None
