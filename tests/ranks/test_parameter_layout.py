"""Checkpoints hold requires_grad and the groups of optimizers; all processes must have the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, attempt, loss_of
from unisono.config import Settings
from unisono.environment import World
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run
from unisono.train.state.parameter_layout import ParameterLayout

CONFIG = replace(SETTINGS, steps=7)
UNFREEZES = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).tanh())
        return out


def unfreeze_body(run: Run[Any], *, groups: bool) -> Any:
    """Unfreeze the body in a step before the resume; with `groups`, add it to the optimizer then."""
    model = run.place(Net)
    model.body.requires_grad_(False)
    params = model.head.parameters() if groups else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Numbers()):
        if step.number == UNFREEZES:
            model.body.requires_grad_(True)
            if groups:
                optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.01})
        for x, i in step:
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)
    return (
        run.context.state.fingerprint(),
        [len(group["params"]) for group in optimizer.param_groups],
        run_promise(run)[0],
    )


def stop_and_resume(world: World, folder: str, config: Settings, groups: bool, enabled: bool) -> Any:
    ParameterLayout.enabled = enabled

    def loop(run: Run[Any]) -> Any:
        return unfreeze_body(run, groups=groups)

    whole = attempt(world, Path(folder) / "whole", loop, config)
    attempt(world, Path(folder) / "parts", loop, replace(config, steps=5))
    return whole, attempt(world, Path(folder) / "parts", loop, config, resume=True)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("virtual_ranks", [1, 4])
def test_resume_restores_requires_grad(tmp_path: Path, groups: bool, virtual_ranks: int) -> None:
    config = replace(CONFIG, virtual_ranks=virtual_ranks)
    whole, again = run_ranks(stop_and_resume, 1, str(tmp_path), config, groups, True)[0]
    assert whole[2] == "exact", whole
    assert again == whole


def test_resume_restores_requires_grad_of_shards(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=replace(CONFIG.parallel, shard=2))
    for groups in (False, True):
        for whole, again in run_ranks(stop_and_resume, 2, str(tmp_path / str(groups)), config, groups, True):
            assert again == whole


def test_bits_differ_without_restoring_requires_grad(tmp_path: Path) -> None:
    whole, again = run_ranks(stop_and_resume, 1, str(tmp_path), CONFIG, False, False)[0]
    assert again[0] != whole[0]


# -- a script that has changed


def resume_with_groups(world: World, folder: str, first: list[str], second: list[str]) -> Any:
    def loop(names: list[str]) -> Callable[[Run[Any]], Any]:
        def body(run: Run[Any]) -> Any:
            model = run.place(Net)
            groups = [{"params": list(model.get_submodule(name).parameters())} for name in names]
            optimizer = torch.optim.AdamW(groups, lr=0.05)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(Numbers()):
                for x, i in step:
                    step.backward(loss_of(model, x), weight=len(i))
                step.update(optimizer)
            return "done"

        return body

    assert attempt(world, Path(folder), loop(first), replace(CONFIG, steps=2)) == "done"
    return attempt(world, Path(folder), loop(second), CONFIG, resume=True)


def test_other_groups_are_refused(tmp_path: Path) -> None:
    swapped = run_ranks(resume_with_groups, 1, str(tmp_path / "a"), ["body", "head"], ["head", "body"])[0]
    assert "same parameters in another order: body.weight where the optimizer now has head.weight" in swapped
    fewer = run_ranks(resume_with_groups, 1, str(tmp_path / "b"), ["body"], ["body", "head"])[0]
    assert "its group 1 had 0 parameters when it was saved, and has 2 now" in fewer
    other = run_ranks(resume_with_groups, 1, str(tmp_path / "c"), ["body"], ["head"])[0]
    assert "its group 0 had 2 parameters when it was saved, and has 2 now (body.weight is not among them)" in other


def resume_with_other_freezing(world: World, folder: str) -> Any:
    def loop(frozen: bool) -> Callable[[Run[Any]], Any]:
        def body(run: Run[Any]) -> Any:
            model = run.place(Net)
            model.body.requires_grad_(not frozen)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(Numbers()):
                for x, i in step:
                    step.backward(loss_of(model, x), weight=len(i))
                step.update(optimizer)
            return model.body.weight.requires_grad, run_promise(run)

        return body

    attempt(world, Path(folder), loop(True), replace(CONFIG, steps=2))
    return attempt(world, Path(folder), loop(False), CONFIG, resume=True)


def test_script_can_change_requires_grad_at_a_resume(tmp_path: Path) -> None:
    trains, (promise, reason) = run_ranks(resume_with_other_freezing, 1, str(tmp_path))[0]
    assert trains
    assert promise == "exact until step 2"
    assert "requires_grad of body.weight from False to True" in reason


# -- several processes


def differ_on_one_rank(world: World, folder: str, what: str) -> Any:
    def loop(run: Run[Any]) -> Any:
        names = ["a", "b", "c"] if run.rank == 0 or what != "order" else ["b", "a", "c"]
        model = run.place(lambda: nn.ModuleDict({name: nn.Linear(3, 2) for name in names}))
        if run.rank == 1 and what == "frozen":
            model["b"].requires_grad_(False)
        run.track(model=model)
        run.steps(Numbers())

    return attempt(world, Path(folder), loop, CONFIG)


def test_another_order_of_parameters_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(differ_on_one_rank, 2, str(tmp_path / "a"), "order"):
        assert "have another order on each: a.weight is (2, 3) float32 on rank 0, and b.weight" in message
        assert "sorted(names)" in message
    for message in run_ranks(differ_on_one_rank, 2, str(tmp_path / "b"), "frozen"):
        assert (
            "are others on each: b.weight is (2, 3) float32 on rank 0, and b.weight is (2, 3) float32, not" in message
        )
