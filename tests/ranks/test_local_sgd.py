"""Local SGD, post-local SGD and DiLoCo, compared with loops by hand in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.ranks.loops import attempt
from unisono.config import CheckpointSettings, LocalSGDSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.mesh import build_sites
from unisono.environment import World
from unisono.local_sgd.site_loop import LocalSGDLoop
from unisono.local_sgd.site_transport import SiteTransport, chunk_of
from unisono.plan.batch_order import BatchOrder
from unisono.testing import finish_run, run_ranks, run_result
from unisono.train.run import Run

At = Callable[[Run[Settings], Any, nn.Module], Any]

LENGTH, WIDTH = 96, 6


def points() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(LENGTH, WIDTH, generator=g)
    return x, (x @ torch.randn(WIDTH, 3, generator=g)).tanh()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.Linear(30, 3))


def build_with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 3))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - y).square().sum()
    return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def settings(steps: int = 13, **local: Any) -> Settings:
    return Settings(
        steps=steps,
        batch=24,
        virtual_ranks=12,
        seed=4,
        exchange="local_sgd",
        local_sgd=LocalSGDSettings(**{"sync_every": 4, **local}),
    )


def train(run: Run[Settings], *, at: At | None = None, rich: bool = False, thaw: int = 0) -> dict[str, Any]:
    """Train with local SGD.

    at    is called after every update
    thaw  the first layer is trained from this step on
    rich  use batch norm, and an average of the weights, which belong to a site until all sites are united
    """
    model = run.place(build_with_norm if rich else build)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if rich else model
    run.track(model=model, optimizer=optimizer, schedule=schedule, **({"average": average} if rich else {}))
    initial_weights = [p.tolist() for p in model.parameters()]
    losses, results = [], []
    for step in run.steps(torch.utils.data.TensorDataset(*points())):
        next(model.children()).requires_grad_(step.number >= thaw)
        for x, y in step:
            step.backward(loss_of(model, x, y), weight=len(y))
        step.update(optimizer, schedule)
        if isinstance(average, AveragedModel):
            average.update_parameters(model)
        losses.append(step.loss)
        if at is not None:
            results.append(at(run, step, model))
    finish_run(run)
    return {
        "initial": initial_weights,
        "weights": [p.tolist() for p in model.parameters()],
        "losses": losses,
        "results": results,
        "result": run_result(run),
    }


def train_by_hand(initial_weights: list[Any], config: Settings) -> list[torch.Tensor]:
    """Train the sites one after the other in plain torch, and return the mean of their weights."""
    local, order = (
        config.local_sgd,
        BatchOrder(length=LENGTH, batch=config.batch, virtual_ranks=config.virtual_ranks, seed=config.seed),
    )
    x, y = points()
    models = [build() for _ in range(local.sites)]
    for model in models:
        for p, b in zip(model.parameters(), initial_weights, strict=True):
            p.data.copy_(torch.tensor(b))
    inner = [adamw(model) for model in models]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30) for optimizer in inner]
    anchor = [nn.Parameter(torch.tensor(b)) for b in initial_weights]
    outer = torch.optim.SGD(anchor, lr=local.outer_lr, momentum=local.outer_momentum, nesterov=True)
    if local.outer_optimizer == "average":
        outer = torch.optim.SGD(anchor, lr=1.0)
    share = config.virtual_ranks // local.sites
    for number in range(config.steps or 0):
        parts = [
            [i for v in range(s * share, (s + 1) * share) for part in order.micro_batches(number, v) for i in part]
            for s in range(local.sites)
        ]
        if number < local.warmup_steps:
            parts = [list(chain(*parts))] * local.sites
        for model, optimizer, schedule, samples in zip(models, inner, schedules, parts, strict=True):
            optimizer.zero_grad()
            (loss_of(model, x[samples], y[samples]) / len(samples)).backward()
            optimizer.step()
            schedule.step()
        done = number + 1
        if done == local.warmup_steps:
            for a, p in zip(anchor, models[0].parameters(), strict=True):
                a.data.copy_(p.detach())
        if done > local.warmup_steps and (done - local.warmup_steps) % local.sync_every == 0:
            for a, *ps in zip(anchor, *[model.parameters() for model in models], strict=True):
                a.grad = sum(((a - p).detach() for p in ps), torch.zeros_like(a)) / local.sites
            outer.step()
            for a, *ps in zip(anchor, *[model.parameters() for model in models], strict=True):
                for p in ps:
                    p.data.copy_(a.detach())
    return [torch.stack([p.detach() for p in ps]).mean(0) for ps in zip(*[m.parameters() for m in models], strict=True)]


def train_run(
    world: World, folder: Path, config: Settings, loop_options: dict[str, Any] | None = None, again: bool = False
) -> Any:
    return attempt(world, folder, partial(train, **(loop_options or {})), config, resume=again)


@pytest.mark.parametrize(
    "config",
    [
        settings(outer_optimizer="average"),
        settings(),
        settings(warmup_steps=5, outer_lr=0.5, outer_momentum=0.8),
        settings(sites=3, sync_every=3),
        settings(sync_every=1, outer_optimizer="average"),
    ],
    ids=["average", "nesterov", "post-local", "three sites", "every step"],
)
def test_outer_step_matches_a_loop_by_hand(config: Settings, tmp_path: Path) -> None:
    ranks = run_ranks(train_run, config.local_sgd.sites, tmp_path, config)
    expected = train_by_hand(ranks[0]["initial"], config)
    for rank in ranks:
        for ours, theirs in zip(rank["weights"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=1e-6)
    assert len({rank["result"]["weights_sha256"] for rank in ranks}) == 1
    assert len({rank["result"]["loss"] for rank in ranks}) == 1
    assert ranks[0]["result"]["promise"] == "depends on the number of sites"


def test_bits_do_not_depend_on_the_processes_of_a_site(tmp_path: Path) -> None:
    for number, config in enumerate([settings(), settings(bits=4, num_fragments=2, sync_delay=1, warmup_steps=2)]):
        found = [
            (rank["result"]["weights_sha256"], rank["losses"])
            for size in (2, 4, 6)
            for site in [run_ranks(train_run, size, tmp_path / f"{number}-{size}", config)]
            for rank in (site[0], site[-1])
        ]
        assert len({weights for weights, _ in found}) == 1
        first, last = [losses for _, losses in found[::2]], [losses for _, losses in found[1::2]]
        assert first == [first[0]] * 3
        assert last == [last[0]] * 3
        assert first[0][5] != last[0][5]  # each site has its own value


def quantization_errors(world: World, feedback: bool) -> list[float]:
    """Send a row twenty times in 4 bits; return the error of the received mean, and half a quantization step."""
    with join(world) as group:
        number, mesh, across = build_sites(2, group)
        rows = [torch.randn(1000, generator=torch.Generator().manual_seed(site)) for site in range(2)]
        between = SiteTransport(mesh.world, across)
        left = [torch.zeros_like(chunk_of(rows[number], mesh.world))] if feedback else []
        result = torch.zeros(1000)
        for _ in range(20):
            result += between.send([], [rows[number]], 4, left).means([torch.float32])[0] / 20
        off = (result - (rows[0] + rows[1]) / 2).abs().max().item()
        return [off, max(row.abs().max().item() for row in rows) / 14, number, mesh.world.size]


def test_quantization_error_is_fed_back() -> None:
    for off, half_a_scale, _, _ in run_ranks(quantization_errors, 4, True):
        assert off < 1.2 * half_a_scale / 20
    ranks = run_ranks(quantization_errors, 4, False)
    assert [rank[2:] for rank in ranks] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    for off, half_a_scale, _, _ in ranks:
        assert half_a_scale / 4 < off < half_a_scale


# -- checkpoints, stops and ends

STREAMING = settings(14, bits=4, num_fragments=2, sync_delay=1, warmup_steps=2)


def stop_on_last_rank(run: Run[Settings], step: Any, model: nn.Module) -> None:
    """Stop on one process of the last site, between two synchronizations."""
    if step.number == 4 and run.rank == run.size - 1:
        run.stop()


@pytest.mark.ci
@pytest.mark.parametrize(("config", "stopped_after"), [(settings(14), 8), (STREAMING, 7)], ids=["plain", "streaming"])
def test_stop_waits_for_synchronization_and_resume_is_bit_identical(
    config: Settings, stopped_after: int, tmp_path: Path
) -> None:
    """Resume on other processes, with batch norm and a weight average, although optimizer states differ by site."""
    rich = {"rich": True}
    (undisturbed, *_) = run_ranks(train_run, 2, tmp_path / "whole", config, rich)
    for size, later in ((2, 4), (4, 2)):
        folder = tmp_path / f"{size}"
        ranks = run_ranks(train_run, size, folder, config, {"at": stop_on_last_rank, **rich})
        assert {rank["result"]["steps"] for rank in ranks} == {stopped_after}
        assert len({rank["result"]["weights_sha256"] for rank in ranks}) == 1
        ranks = run_ranks(train_run, later, folder, config, rich, True)
        assert {rank["result"]["weights_sha256"] for rank in ranks} == {undisturbed["result"]["weights_sha256"]}
        assert ranks[0]["losses"] == undisturbed["losses"][stopped_after:]


@pytest.mark.parametrize(("config", "last_sync"), [(settings(14), 8), (STREAMING, 7)], ids=["plain", "streaming"])
def test_end_between_synchronizations_does_not_change_a_longer_run(
    config: Settings, last_sync: int, tmp_path: Path
) -> None:
    """The final weights are the mean of the sites; a resumed run continues from each site's own weights."""
    (undisturbed, *_) = run_ranks(train_run, 2, tmp_path / "whole", config)
    shorter = replace(config, steps=9, checkpoint=CheckpointSettings(every=3))
    ranks = run_ranks(train_run, 2, tmp_path / "parts", shorter)
    assert len({rank["result"]["weights_sha256"] for rank in ranks}) == 1
    saved = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").glob("step-*"))
    assert saved == [
        f"step-0000000{last_sync}",
        "step-00000009",
    ]  # due after 6 steps, and written after a synchronization
    ranks = run_ranks(train_run, 2, tmp_path / "parts", config, None, True)
    assert ranks[0]["result"]["weights_sha256"] == undisturbed["result"]["weights_sha256"]
    (ended, _) = run_ranks(train_run, 2, tmp_path / "parts", config, None, True)  # no step is left
    assert ended["result"]["weights_sha256"] == undisturbed["result"]["weights_sha256"]


@pytest.mark.parametrize("config", [settings(14, sync_every=4, sync_delay=2), STREAMING], ids=["one fragment", "two"])
def test_unfrozen_parameter_joins_the_next_synchronization(config: Settings, tmp_path: Path) -> None:
    (undisturbed, *_) = run_ranks(train_run, 2, tmp_path / "whole", config, {"thaw": 4})
    assert undisturbed["result"]["steps"] == 14
    ranks = run_ranks(train_run, 4, tmp_path / "parts", replace(config, steps=9), {"thaw": 4})
    assert {rank["result"]["steps"] for rank in ranks} == {9}
    ranks = run_ranks(train_run, 2, tmp_path / "parts", config, {"thaw": 4}, True)
    assert ranks[0]["result"]["weights_sha256"] == undisturbed["result"]["weights_sha256"]


def test_another_exchange_resumes_from_the_model_only(tmp_path: Path) -> None:
    run_ranks(train_run, 2, tmp_path, settings(8))
    (tree,) = run_ranks(
        train_run, 1, tmp_path, replace(settings(10), exchange="tree", local_sgd=LocalSGDSettings()), None, True
    )
    assert tree["result"]["steps"] == 10
    ranks = run_ranks(train_run, 3, tmp_path, settings(16, sites=3), None, True)
    assert {rank["result"]["steps"] for rank in ranks} == {16}
    assert len({rank["result"]["weights_sha256"] for rank in ranks}) == 1


# -- evaluation between two synchronizations


def error(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - y).square().sum(), len(y)


def compare_evaluation(run: Run[Settings], step: Any, model: nn.Module) -> Any:
    """Return the metric of run.evaluate, and the metric of the mean weights by hand."""
    if step.number != 5:
        return None
    data = torch.utils.data.TensorDataset(*points())
    found = run.evaluate(model, data, error)["error"]
    assert isinstance(run.context.loop, LocalSGDLoop)
    by_rank = run.context.loop.sites.across.all_gather_object([p.tolist() for p in model.parameters()])
    mean = build()
    for p, *values in zip(mean.parameters(), *by_rank, strict=True):
        p.data.copy_(torch.tensor(values).mean(0))
    x, y = points()
    unlike = by_rank[0] != by_rank[1]
    return unlike, found, (mean(x) - y).square().sum().item() / len(y)


def test_evaluation_uses_the_mean_of_sites_and_does_not_change_them(tmp_path: Path) -> None:
    (untold, *_) = run_ranks(train_run, 2, tmp_path / "untold", STREAMING)
    ranks = run_ranks(train_run, 4, tmp_path / "run", STREAMING, {"at": compare_evaluation})
    for rank in ranks:
        unlike, found, expected_metric = rank["results"][5]
        assert unlike
        assert found == pytest.approx(expected_metric, rel=1e-5)
    assert ranks[0]["result"]["weights_sha256"] == untold["result"]["weights_sha256"]


# -- errors


def raise_on_one(run: Run[Settings], step: Any, model: nn.Module) -> None:
    if step.number == 5 and run.rank == 3:
        raise ValueError("site 1 is broken")


def test_failed_site_is_reported_at_the_next_synchronization(tmp_path: Path) -> None:
    before = time.monotonic()
    *others, broken = run_ranks(train_run, 4, tmp_path, settings(), {"at": raise_on_one})
    assert broken == "ValueError: site 1 is broken\n"
    assert all("PeerLostError" in other for other in others), others
    assert "A meeting of the sites" in others[0]
    assert time.monotonic() - before < 40


def evaluate_on_one(run: Run[Settings], step: Any, model: nn.Module) -> None:
    if step.number == 5 and run.rank == 1:
        run.evaluate(model, torch.utils.data.TensorDataset(*points()), error)


def test_collective_on_only_one_site_raises_on_all(tmp_path: Path) -> None:
    ranks = run_ranks(train_run, 2, tmp_path, settings(), {"at": evaluate_on_one})
    assert "Site 0 reached a step, which all 2 sites do together" in ranks[0]
    assert "Site 1 reached run.evaluate" in ranks[1]
    for rank in ranks:
        assert "site 0 at a step and site 1 at run.evaluate" in rank


def set_infinite(run: Run[Settings], step: Any, model: nn.Module) -> None:
    if step.number == 3 and run.rank == 1:
        with torch.no_grad():
            next(model.parameters()).fill_(float("inf"))


def test_site_of_infinite_weights_is_named(tmp_path: Path) -> None:
    for rank in run_ranks(train_run, 2, tmp_path, settings(), {"at": set_infinite}):
        assert "after step 3: weights are not finite.\n  Site 1 of 2 has weights that are not finite." in rank


def test_more_fragments_than_parameters_are_refused(tmp_path: Path) -> None:
    for rank in run_ranks(train_run, 2, tmp_path, settings(sync_every=9, num_fragments=5)):
        assert "It has 4 parameters that train.\n  Next: --set local_sgd.num_fragments=4" in rank


def test_epoch_with_an_empty_last_step_of_a_site_is_refused(tmp_path: Path) -> None:
    for rank in run_ranks(train_run, 2, tmp_path, replace(settings(), batch=19)):  # 96 = 5 * 19 + 1
        assert "The last step of every epoch of 96 samples has 1 of them" in rank
        assert "--set batch=18" in rank
