"""Fused optimizers, and parameters in bfloat16, have the bits of one process under parallel.shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import SETTINGS, Loop, attempt, train
from unisono.config import ParallelSettings
from unisono.environment import World
from unisono.testing import run_promise, run_ranks
from unisono.train.optimization import sharded_step
from unisono.train.run import Run
from unisono.train.step import Step

HALF = torch.bfloat16


def odd() -> nn.Module:
    """Build a model with sizes that are not multiples of a register's."""
    return nn.Sequential(nn.Linear(3, 19), nn.LayerNorm(19), nn.ReLU(), nn.Linear(19, 11))


def half() -> nn.Module:
    return odd().to(HALF)


def whole(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    dtype = next(model.parameters()).dtype
    step.backward((model(x.to(dtype)).float() - x.sum(1, keepdim=True)).pow(2).sum(), weight=len(i))


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def adagrad(model: nn.Module) -> Any:
    return torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def hooked(seen: list[Any]) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        optimizer = sgd(model)
        held = [id(p) for p in model.parameters()]
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda o, *_: seen.append([id(p) for p in o.param_groups[0]["params"]] == held))
        return optimizer

    return make


def loop(build: Any, make: Any, *, locally: bool = True) -> Loop:
    def body(run: Run[Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if not locally:
                patch.setattr(sharded_step, "steps_locally", lambda optimizer: False)
            return train(run, whole, build=build, make=make)[-1], run_promise(run)

    return body


def look(run: Run[Any]) -> Any:
    seen: list[Any] = []
    return train(run, whole, build=half, make=hooked(seen))[-1], set(seen)


def stored_transposed() -> nn.Module:
    first = nn.Linear(3, 19)
    first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
    return nn.Sequential(first, nn.Linear(19, 11))


CASES: dict[str, tuple[Loop, Any]] = {
    **{f"adamw {g}": (loop(odd, adamw), g) for g in ("layer", "step")},
    **{f"bf16 {g}": (loop(half, sgd), g) for g in ("layer", "step")},
    "adagrad": (loop(odd, adagrad), "step"),
    "hooks": (look, "layer"),
    "off": (loop(half, sgd, locally=False), "layer"),
    "transposed": (loop(stored_transposed, adamw), "layer"),
}


def all_of_them(world: World, folder: Path) -> dict[str, Any]:
    told = {}
    for name, (body, gather) in CASES.items():
        config = replace(SETTINGS, parallel=ParallelSettings(shard=world.size, reshard=gather))
        told[name] = attempt(world, folder / name, body, config)
    return told


def test_shards_step_as_whole_parameters_do(tmp_path: Path) -> None:
    (truth,) = run_ranks(all_of_them, 1, tmp_path / "1")
    for came in run_ranks(all_of_them, 2, tmp_path / "2"):
        for name in ("adamw layer", "adamw step", "bf16 layer", "bf16 step", "adagrad"):
            assert came[name] == truth[name], name
            assert came[name][1][0] == "exact"
        assert came["hooks"] == truth["hooks"], "hooks see the parameters themselves"
        assert truth["hooks"][1] == {True}
        assert came["off"][0] != truth["off"][0]
        for name, optimizer in (("off", "SGD"), ("transposed", "AdamW")):
            assert came[name][1][0] == "tolerance", name
            assert f"{optimizer} rounds the last elements of a tensor otherwise" in came[name][1][1]


def fused_sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def refused(world: World, folder: Path) -> Any:
    return attempt(world, folder, lambda run: train(run, whole, build=half, make=fused_sgd))


def test_a_fused_kernel_that_updates_nothing_is_refused(tmp_path: Path) -> None:
    (told,) = run_ranks(refused, 1, tmp_path)
    assert "leaves most elements of bfloat16 and float16 parameters as they are" in told
    assert "fused=False" in told
