"""The gradient noise scale agrees with its definition, and does not depend on the number of processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.loops import attempt
from unisono.config import BalanceSettings, CompressSettings, LoaderSettings, ParallelSettings, Settings
from unisono.environment import World
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run
from unisono.train.state.noise_average import DECAY, NoiseScale

CONFIG = Settings(steps=4, batch=64, virtual_ranks=16, micro_batch=1, noise_scale_every=2)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def samples() -> torch.utils.data.TensorDataset:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(192, 6, generator=random)
    y = (x[:, :3] + torch.randn(192, 3, generator=random)).argmax(1)
    return torch.utils.data.TensorDataset(x, y, torch.rand(192, generator=random) + 0.5)


def train(run: Run[Any], *, weighted: bool = False) -> dict[str, Any]:
    """Train, and return the noise scale after each step, and what a step's definition needs."""
    model = run.place(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    scales, batches = [], []
    alone = run.context.group.size == 1
    for step in run.steps(samples()):
        before = [p.detach().numpy().copy() for p in model.parameters()] if alone else []
        rows = []
        for x, y, w in step:
            losses = F.cross_entropy(model(x), y, reduction="none")
            step.backward((losses * w).sum() if weighted else losses.sum(), w.sum() if weighted else len(y))
            rows.append([t.numpy() for t in (x, y, w if weighted else torch.ones(len(w)))])
        scales.append(step.noise_scale)
        batches.append((before, rows))
        step.update(optimizer)
    found = {"scales": scales, "fingerprint": run.context.state.fingerprint(), "last": run_result(run)["noise_scale"]}
    return found | ({"batches": batches} if alone else {})


def trained(world: World, folder: str, config: Settings, resume: bool = False, **options: Any) -> Any:
    found = attempt(world, Path(folder), partial(train, **options), config, resume=resume)
    assert isinstance(found, dict), found
    return found


def definition(batches: Any) -> tuple[float, float]:
    """Return S in samples and the square of the gradient, from the separate gradients of all micro-batches."""
    before, rows = batches
    model = net().double()
    for p, value in zip(model.parameters(), before, strict=True):
        p.data.copy_(torch.from_numpy(value))
    grads, weights = [], []
    for x, y, w in ([torch.from_numpy(t) for t in row] for row in rows):
        loss = (F.cross_entropy(model(x.double()), y, reduction="none") * w.double()).sum() / w.double().sum()
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        weights.append(w.double().sum())
    g, w = torch.stack(grads), torch.stack(weights)
    mean = (g * w[:, None]).sum(0) / w.sum()
    noise = float((w * (g - mean).square().sum(1)).sum() / (len(w) - 1))
    count = sum(len(x) for x, *_ in rows)
    return noise * count / float(w.sum()), float(mean.square().sum()) - noise / float(w.sum())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("micro_batch", [1, None])
def test_it_agrees_with_separate_gradients(tmp_path: Path, micro_batch: int | None, weighted: bool) -> None:
    (found,) = run_ranks(
        partial(trained, weighted=weighted), 1, str(tmp_path), replace(CONFIG, micro_batch=micro_batch)
    )
    (noise, signal), (later_noise, later_signal) = (definition(found["batches"][step]) for step in (1, 3))
    first = noise / signal
    second = (DECAY * noise + later_noise) / (DECAY * signal + later_signal)
    assert len(found["batches"][0][1]) == (64 if micro_batch else 16)
    assert found["scales"] == [None, *[pytest.approx(first, rel=1e-5)] * 2, pytest.approx(second, rel=1e-5)]
    assert found["last"] == found["scales"][-1]


def test_any_number_of_processes_and_a_resume(tmp_path: Path) -> None:
    (one,) = run_ranks(trained, 1, str(tmp_path / "1"), CONFIG)
    del one["batches"]
    (without,) = run_ranks(partial(trained_without), 1, str(tmp_path / "0"), CONFIG)
    assert without == one["fingerprint"], "measuring changes the weights"
    for size, config in (
        (2, CONFIG),
        (3, CONFIG),
        (2, replace(CONFIG, parallel=ParallelSettings(shard=2, reshard="step"))),
    ):
        assert run_ranks(trained, size, str(tmp_path / f"{size} {config.parallel.shard}"), config) == [one] * size
    run_ranks(trained, 2, str(tmp_path / "half"), replace(CONFIG, steps=2))
    for found in run_ranks(trained, 3, str(tmp_path / "half"), CONFIG, True):
        assert found == {**one, "scales": one["scales"][2:]}


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    [
        {"exchange": "ddp"},
        {"exchange": "allreduce"},
        {"exchange": "wide"},
        {"compress": CompressSettings(kind="fp16")},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"loader": LoaderSettings(workers=1), "balance": BalanceSettings(work_stealing=True)},
    ],
    ids=["ddp", "allreduce", "wide", "compressed", "bf16", "fp16", "work stealing"],
)
def test_other_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    (one,) = run_ranks(trained, 1, str(tmp_path / "1"), replace(CONFIG, steps=2))
    for found in run_ranks(trained, 2, str(tmp_path / "2"), replace(CONFIG, steps=2, **changes)):
        assert found["scales"] == [None, pytest.approx(one["scales"][1], rel=0.05)]


def trained_without(world: World, folder: str, config: Settings) -> Any:
    def body(run: Run[Any]) -> Any:
        model = run.place(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(samples()):
            for x, y, _ in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), len(y))
            assert step.noise_scale is None
            step.update(optimizer)
        return run.context.state.fingerprint()

    return attempt(world, Path(folder), body, replace(config, noise_scale_every=0))


def test_noise_that_hides_the_gradient_has_no_scale() -> None:
    scale = NoiseScale()
    scale.add(3.0, -1.0)
    assert scale.value is None
    scale.add(3.0, 4.0)
    assert scale.value == pytest.approx(3.0 / ((4.0 - DECAY) / (1 + DECAY)))
    again = NoiseScale()
    again.load_state_dict(scale.state_dict())
    assert again.value == scale.value
