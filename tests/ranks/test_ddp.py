"""torch's DistributedDataParallel as the exchange, with the contract of our loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.pairs import every_pair
from tests.ranks.test_same_bits import results
from tests.ranks.test_several_passes import CONFIG, alternating
from tests.ranks.training import MLP, Points, settings
from unisono.config import DdpSettings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import LoopError
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "static"), every_pair(["mlp", "gpt"], [False, True]))
def test_it_agrees_with_the_tree_to_rounding(tmp_path: Path, kind: str, static: bool) -> None:
    """Some processes are idle in an epoch's last step; gpt has tied, frozen and unused parameters."""
    tree = results(tmp_path, 1, kind, settings(), length=53)[0]
    config = settings(exchange="ddp", ddp=DdpSettings(static_graph=static, bucket_mb=0.01))
    for size in (1, 2, 8):
        for run in results(tmp_path, size, kind, config, length=53):
            assert run["losses"] == pytest.approx(tree["losses"], rel=1e-4)
            assert run["norms"] == pytest.approx(tree["norms"], rel=1e-3)
            assert run["unused"] is None
            assert run["result"]["promise"] == "tolerance"
            assert "exchange=ddp" in run["result"]["reason"]


def test_micro_batches_and_scaled_losses(tmp_path: Path) -> None:
    for changes in ({"micro_batch": 1}, {"precision": "fp16"}):
        tree = results(tmp_path, 1, "mlp", settings(**changes))[0]
        for run in results(tmp_path, 2, "mlp", settings(exchange="ddp", **changes)):
            assert run["losses"] == pytest.approx(tree["losses"], rel=1e-3)


def alternate(world: World, config: Any, folder: str) -> Any:
    with join(world) as group:
        run = build_run(config, world, group, Path(folder) / f"{config.exchange}-{world.size}")
        found = alternating(run)
        close_run(run)
        return found[:-1]  # losses, norms and sums, without the fingerprint


def test_several_passes_and_optimizers(tmp_path: Path) -> None:
    config = replace(CONFIG, virtual_ranks=3)
    (tree,) = run_ranks(alternate, 1, config, str(tmp_path))
    for found in run_ranks(alternate, 2, replace(config, exchange="ddp"), str(tmp_path)):
        assert found == pytest.approx(tree, rel=1e-3, abs=1e-4)


# -- hooks of the user


class HookState:
    """Record the gradients that pass through a hook."""

    def __init__(self) -> None:
        self.norms: list[float] = []


def noting_hook(state: HookState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    state.norms.append(float(bucket.buffer().norm()))
    assert dist.group.WORLD is not None
    return fp16_compress_hook(dist.group.WORLD, bucket)


def train_with_hook(world: World, config: Any, folder: str, kind: str) -> Any:
    with join(world) as group:
        run: Run[Any] = build_run(config, world, group, Path(folder) / f"{kind}-{world.size}")
        model = run.place(MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        saw = HookState()
        match kind:
            case "fp16":
                run.register_comm_hook(saw, noting_hook)
            case "powersgd":
                state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0)
                run.register_comm_hook(state, powerSGD_hook)
        losses = []
        for step in run.steps(Points(96)):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            if kind == "fp16" and world.size > 1:
                # it received a mean, not a sum over the batch
                assert step.grad_norm is not None
                assert 0.3 < saw.norms[-1] / step.grad_norm < 3
            step.update(optimizer)
            losses.append(step.loss)
        close_run(run)
        return losses


@pytest.mark.parametrize(("kind", "off"), [("fp16", 1e-3), ("powersgd", 0.15)])
def test_hooks_of_torch(tmp_path: Path, kind: str, off: float) -> None:
    config = settings(exchange="ddp")
    (tree,) = run_ranks(train_with_hook, 1, settings(), str(tmp_path), "none")
    for losses in run_ranks(train_with_hook, 2, config, str(tmp_path), kind):
        assert losses == pytest.approx(tree, rel=off)
        assert losses != tree


def test_a_hook_that_would_not_be_called_is_refused(tmp_path: Path) -> None:
    def ask(world: World) -> str:
        with join(world) as group, pytest.raises(LoopError) as found:
            build_run(settings(), world, group, tmp_path).register_comm_hook(None, fp16_compress_hook)
        return str(found.value)

    found = ask(World())
    assert "exchange=tree" in found
    assert "--set exchange=ddp" in found


# -- comparison with a loop by hand


def train_by_hand(world: World, config: Any) -> list[float]:
    """Train as DistributedDataParallel's documentation advises; micro-batches are equal, so means may be averaged."""
    with join(world):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(12, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        points = Points(config.batch * config.steps)
        half = config.batch // 2
        for step in range(config.steps):
            rows = slice(step * config.batch + world.rank * half, step * config.batch + (world.rank + 1) * half)
            F.cross_entropy(model(points.x[rows]), points.y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [x for p in model.parameters() for x in p.detach().flatten().tolist()]
        del model, optimizer  # before its process group
        return weights


def train_with_unisono(world: World, config: Any, folder: str) -> list[float]:
    with join(world) as group:
        run: Run[Any] = build_run(config, world, group, Path(folder))
        torch.manual_seed(1)
        model = run.place(nn.Linear(12, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        points = Points(config.batch * config.steps)
        for step in run.steps(torch.utils.data.TensorDataset(points.x, points.y), shuffle=False):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.update(optimizer)
        close_run(run)
        return [x for p in model.parameters() for x in p.detach().flatten().tolist()]


def test_it_agrees_with_a_loop_by_hand(tmp_path: Path) -> None:
    config = settings(exchange="ddp", virtual_ranks=2, steps=5)
    theirs = run_ranks(train_by_hand, 2, config)[0]
    for ours in run_ranks(train_with_unisono, 2, config, str(tmp_path)):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def error_of_changed_gradient(world: World, config: Any, folder: str) -> str:
    with join(world) as group:
        run: Run[Any] = build_run(config, world, group, Path(folder))
        model = run.place(MLP)
        run.track(model=model)
        for step in run.steps(Points(16)):
            try:
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad.clamp_(-1, 1)
            except LoopError as error:
                return str(error)
        return "nothing was said"


def test_a_gradient_that_is_changed_between_two_micro_batches_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(error_of_changed_gradient, 2, settings(exchange="ddp", steps=1), str(tmp_path)):
        assert "changed between two micro-batches" in found
