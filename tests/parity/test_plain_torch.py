"""Compare loops by hand with ours, with the same samples in the same micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.training import Points, Sentences, TinyGPT, padded, tensors
from unisono.config import Settings
from unisono.data.rng import seed_everything
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.plan.batch_order import BatchOrder
from unisono.plan.rng_keys import INIT, ROUND, STEP, micro_batch_key, mix
from unisono.testing import build_run, close_run, run_ranks

STEPS = 20


def build(kind: str, dropout: float) -> nn.Module:
    if kind == "gpt":
        return TinyGPT(dropout=dropout)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 5))


def data_of(kind: str) -> tuple[Any, Any]:
    if kind == "gpt":
        return Sentences(53), padded
    return (tensors(53) if kind == "tensors" else Points(53)), torch.utils.data.default_collate


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    out = model(x).flatten(0, -2)
    return F.cross_entropy(out, y.flatten(), reduction="sum", ignore_index=-100), int((y != -100).sum())


def ours(world: World, kind: str, dropout: float, virtual_ranks: int, optimizer: str, folder: str) -> dict[str, Any]:
    with join(world) as group:
        config = Settings(steps=STEPS, batch=virtual_ranks * 4, virtual_ranks=virtual_ranks, seed=1)
        run = build_run(config, world, group, Path(folder))
        model = run.place(lambda: build(kind, dropout))
        stepper = make_optimizer(optimizer, model)
        run.track(model=model, optimizer=stepper)
        data, collate = data_of(kind)
        for step in run.steps(data, collate_fn=collate):
            for x, y in step:
                step.backward(*loss_of(model, x, y))
            step.update(stepper)
        close_run(run)
        return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


def make_optimizer(optimizer: str, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=0.01, fused=optimizer == "fused adamw")


def fetch(order: BatchOrder, kind: str, step: int, virtual_rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data, collate = data_of(kind)
    batches = []
    for place, samples in order.places(step, (virtual_rank, virtual_rank + 1)):
        if kind == "mlp":  # the other data sets use no random numbers
            seed_everything(micro_batch_key(mix(order.seed, ROUND), *place[:3]))
        batches.append(collate([data[i] for i in samples]))
    return batches


def by_hand(world: World, kind: str, dropout: float, optimizer: str) -> dict[str, Any]:
    """Train on one process with V = 1: sum of the losses, backward, gradients divided by the weight."""
    seed_everything(mix(1, INIT, 0))
    model = build(kind, dropout)
    stepper = make_optimizer(optimizer, model)
    order = BatchOrder(length=53, batch=4, virtual_ranks=1, seed=1)
    seed_everything(mix(mix(1, STEP), 0))  # once, because dropout draws from one stream
    for step in range(STEPS):
        stream = torch.get_rng_state()
        batches = fetch(order, kind, step, 0)
        torch.set_rng_state(stream)  # fetching has random numbers of its own, as in a loader worker
        for x, y in batches:
            loss, weight = loss_of(model, x, y)
            loss.backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= weight
        stepper.step()
        stepper.zero_grad()
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


def with_ddp(world: World, kind: str) -> dict[str, Any]:
    """Train with V = W. The loss is scaled so that DDP's mean over processes is the mean over all items."""
    with join(world):
        seed_everything(mix(1, INIT, 0))
        model = build(kind, 0.0)
        parallel = DistributedDataParallel(model, find_unused_parameters=kind == "gpt")
        stepper = make_optimizer("sgd", model)
        order = BatchOrder(length=53, batch=world.size * 4, virtual_ranks=world.size, seed=1)
        for step in range(STEPS):
            x, y = fetch(order, kind, step, world.rank)[0]
            loss, weight = loss_of(parallel, x, y)
            total = torch.tensor(float(weight))
            dist.all_reduce(total)
            (loss * world.size / total).backward()
            stepper.step()
            stepper.zero_grad()
        del parallel, loss  # otherwise the reducer outlives the group, and its destructor sometimes hangs
        return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw", "sgd"])
@pytest.mark.parametrize("kind", ["mlp", "gpt", "tensors"])
def test_one_virtual_rank_is_bit_identical_to_a_loop_by_hand(tmp_path: Path, kind: str, optimizer: str) -> None:
    (result,) = run_ranks(ours, 1, kind, 0.2, 1, optimizer, str(tmp_path))
    (plain,) = run_ranks(by_hand, 1, kind, 0.2, optimizer)
    for name, value in plain.items():
        assert (result[name] == value).all(), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_one_virtual_rank_per_process_matches_ddp(tmp_path: Path, kind: str, size: int) -> None:
    # With SGD: the key bias of attention has a gradient of zero plus rounding, which Adam would turn into a full step.
    result = run_ranks(ours, size, kind, 0.0, size, "sgd", str(tmp_path))[0]
    expected = run_ranks(with_ddp, size, kind)[0]
    for name, value in expected.items():
        difference = abs(result[name] - value).max() / max(abs(value).max(), 1e-12)
        assert difference < 1e-6, (name, difference)
