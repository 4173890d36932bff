"""Norms and sums that a script computes from shards are those of one process."""

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
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.parallel.fsdp.sharded_reductions import reduce_whole
from unisono.testing import run_ranks
from unisono.train.modules import models
from unisono.train.run import Run
from unisono.train.step import Step

After = Callable[[Step, Any], Any]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 19), nn.ReLU(), nn.Linear(19, 11))


def whole(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward((model(x) - x.sum(1, keepdim=True)).pow(2).sum(), weight=len(i))


def params_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clipped(step: Step, optimizer: Any) -> list[float]:
    """Change a gradient by its norm in four ways, and compute two norms of weights."""
    params = params_of(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
    told = [float(norm), float(torch.nn.utils.clip_grad_norm_(params, 0.05, norm_type=1.0, foreach=False))]
    torch.nn.utils.clip_grad_value_(params, 0.02)
    by_hand = sum(p.grad.pow(2).sum().item() for p in params if p.grad is not None) ** 0.5
    for p in params:
        assert p.grad is not None
        p.grad.mul_(1.0 / (1.0 + by_hand + float(p.grad.abs().mean())))
    step.update(optimizer)
    with torch.no_grad():
        return [*told, by_hand, *(p.norm().item() for p in params), *(p.abs().max().item() for p in params)]


def layer_by_layer(step: Step, optimizer: Any) -> None:
    """Run a step of LARS by hand, which scales a gradient by the norm of its weights."""
    with torch.no_grad():
        for p in params_of(optimizer):
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.01 * float(p.norm()) / (float(p.grad.norm()) + 1e-3))
            p.grad.zero_()
    step.update(optimizer)


def loop(after: After, *, gathers: bool = True) -> Loop:
    def body(run: Run[Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if not gathers:
                patch.setattr(models, "reduce_whole", lambda shard: lambda: None)
            return train(run, whole, after, build=wide, make=adam)

    return body


def adam(model: nn.Module) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


CASES: dict[str, tuple[Loop, Any]] = {
    "clipped layer": (loop(clipped), "layer"),
    "clipped step": (loop(clipped), "step"),
    "layer by layer": (loop(layer_by_layer), "layer"),
    "off": (loop(clipped, gathers=False), "layer"),
}


def all_of_them(world: World, folder: Path) -> dict[str, Any]:
    told = {}
    for name, (body, gather) in CASES.items():
        config = replace(SETTINGS, parallel=ParallelSettings(shard=world.size, reshard=gather))
        told[name] = attempt(world, folder / name, body, config)
    return told


def test_reductions_of_shards_have_the_bits_of_one_process(tmp_path: Path) -> None:
    (truth,) = run_ranks(all_of_them, 1, tmp_path / "1")
    for came in run_ranks(all_of_them, 2, tmp_path / "2"):
        assert [name for name in truth if came[name] != truth[name]] == ["off"]


def elsewhere(world: World) -> Any:
    """Reduce along another axis, rows, tensors that need a gradient, and after the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(15.0).view(5, 3)
    with join(world) as group:
        mesh, other = (init_device_mesh("cpu", (world.size,), mesh_dim_names=(name,)) for name in ("shard", "tensor"))
        end = reduce_whole(group)
        rows = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        along: Any = distribute_tensor(whole, other, [Shard(0)]).sum()
        scaled: Any = rows / rows.norm(dim=1, keepdim=True)
        (rows.pow(2).sum() / 2).backward()
        gradient: Any = rows.grad
        end()
        left: Any = rows.detach().sum()
        same = torch.equal(scaled.full_tensor(), whole / whole.norm(dim=1, keepdim=True))
        return (
            along.placements[0].is_partial(),
            left.placements != (Replicate(),),
            same,
            gradient.full_tensor().tolist(),
        )


def test_other_axes_rows_and_gradients_of_reductions() -> None:
    for along, left, same, gradient in run_ranks(elsewhere, 2):
        assert along, "DTensor's own"
        assert left, "DTensor's own again"
        assert same
        assert gradient == torch.arange(15.0).view(5, 3).tolist()
