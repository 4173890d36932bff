"""A run that tries other ways to compute its steps has the bits of one that does not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.elastic import ElasticProcesses, die_at
from tests.ranks.loops import attempt, train
from unisono.config import ParallelSettings, PlanSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.parallel.activation_checkpoint import ActivationCheckpoint, apply_activation_checkpoint
from unisono.testing import build_run, close_run, finish_run, run_ranks, run_result
from unisono.train.replan import paired_trial, step_options
from unisono.train.replan.paired_trial import NEW_BLOCKS, PairedTrial
from unisono.train.replan.replanner import WARM_UP
from unisono.train.replan.step_options import ActivationGauge, KeptActivations
from unisono.train.run import Run

FULL = ParallelSettings(activation_checkpoint="full", layer_classes=["Block"])
CONFIG = Settings(steps=70, batch=8, virtual_ranks=4, seed=2, parallel=FULL)
REPLANNED = Settings(steps=70, batch=8, virtual_ranks=4, seed=2, parallel=FULL, plan=PlanSettings(auto=True))
SHARDS = ParallelSettings(activation_checkpoint="full", layer_classes=["Block"], shard=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), *(Block() for _ in range(4)), nn.Linear(16, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def shorten_trials(*, new_seconds: float) -> None:
    """Let trials have few steps, and the new way seem to take this long, where the old one takes 1 second."""
    paired_trial.MOST = 2
    step_options.BUCKETS_MB = (0.001, 0.004)

    def medians(self: PairedTrial) -> list[float]:
        return [new_seconds if block in NEW_BLOCKS else 1.0 for block in range(6)]

    PairedTrial.medians = medians  # type: ignore[method-assign]


def watched(run: Run[Any], new_seconds: float) -> dict[str, Any]:
    shorten_trials(new_seconds=new_seconds)
    *_, fingerprint = train(run, build=net, make=adam)
    return {"fingerprint": fingerprint, "plan": run_result(run).get("plan", [])}


def trained(world: World, folder: str, config: Settings, new_seconds: float = 0.5) -> Any:
    found = attempt(world, Path(folder), partial(watched, new_seconds=new_seconds), config)
    assert isinstance(found, dict), found
    return found


@pytest.mark.ci
@pytest.mark.parametrize("new_seconds", [0.5, 1.0])
def test_the_bits_are_those_of_an_unchanged_run(tmp_path: Path, new_seconds: float) -> None:
    (plain,) = run_ranks(trained, 1, str(tmp_path / "plain"), CONFIG)
    assert not plain["plan"]
    for size in (1, 2, 3):
        for found in run_ranks(trained, size, str(tmp_path / str(size)), REPLANNED, new_seconds):
            assert found["fingerprint"] == plain["fingerprint"]
            assert [each["used"] for each in found["plan"]] == [new_seconds < 1] * (1 if size == 1 else 3)
            assert found["plan"][0]["new"] == "those of 4 of 4 layers are kept"
            assert [each["setting"] for each in found["plan"][1:]] == ["tree.bucket_mb"] * 2 * (size > 1)


@pytest.mark.ci
def test_layers_of_shards_keep_their_activations(tmp_path: Path) -> None:
    plain = Settings(steps=40, batch=8, virtual_ranks=4, seed=2, parallel=SHARDS)
    replanned = Settings(steps=40, batch=8, virtual_ranks=4, seed=2, parallel=SHARDS, plan=PlanSettings(auto=True))
    expected = run_ranks(trained, 2, str(tmp_path / "plain"), plain)
    found = run_ranks(trained, 2, str(tmp_path / "replanned"), replanned)
    assert [each["fingerprint"] for each in found] == [each["fingerprint"] for each in expected]
    assert all(each["plan"][0]["used"] for each in found)


def work(world: World, config: Settings, folder: Path, deaths: dict[int, tuple[str, int]]) -> Any:
    shorten_trials(new_seconds=0.5)
    with join(world) as group:
        if world.number in deaths:
            die_at(*deaths[world.number])
        run = build_run(config, world, group, folder)
        *_, fingerprint = train(run, build=net, make=adam)
        finish_run(run)
        close_run(run)
        return fingerprint, run_result(run)


@pytest.mark.ci
@pytest.mark.parametrize("backwards", [13, 33, 66])
def test_the_trials_begin_again_after_a_death(tmp_path: Path, backwards: int) -> None:
    (plain,) = run_ranks(trained, 1, str(tmp_path / "plain"), CONFIG)
    with ElasticProcesses(work, 3, REPLANNED, tmp_path, {1: ("backward", backwards)}) as processes:
        processes.killed = {1}
        results = processes.results()
    for fingerprint, result in results.values():
        assert fingerprint == plain["fingerprint"]
        (died,) = [each["step"] for each in result["deaths"]]
        later = [each["step"] for each in result["plan"] if each["step"] > died]
        assert all(verdict > died + WARM_UP for verdict in later)
        assert bool(later) == (died + 1 + WARM_UP + 18 < 70)


# -- activations


def checkpointed() -> list[ActivationCheckpoint]:
    model = net()
    apply_activation_checkpoint(model, "full", ["Block"])
    return [part.forward for part in model.children() if isinstance(part.forward, ActivationCheckpoint)]


def test_a_gauge_counts_what_backward_needs() -> None:
    layer = checkpointed()[0]
    gauge = ActivationGauge(layer)
    x = torch.randn(10, 16, requires_grad=True)
    y = layer.module(x)
    gauge.close()
    # inputs of GELU, dropout (and its mask) and the second matrix product; x and weights are no activations
    assert 2 * 10 * 64 * 4 <= gauge.bytes <= 4 * 10 * 64 * 4
    assert layer.recomputes
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(("free", "kept"), [(0, 0), (1.5, 1), (3.0, 3), (100.0, 4)])
def test_as_many_of_the_last_layers_are_kept_as_there_is_memory_for(free: float, kept: int) -> None:
    layers = checkpointed()
    x = torch.randn(10, 16, requires_grad=True)
    gauge = ActivationGauge(layers[0])
    layers[0].module(x)
    gauge.close()
    option = KeptActivations(layers, "full", lambda: int(free * gauge.bytes))
    option.observe()
    layers[-1].module(x)
    proposals = list(option.propose(lambda values: list(values)))
    assert len(proposals) == bool(kept)
    for proposal in proposals:
        proposal.switch(True)
        assert [layer.recomputes for layer in layers] == [True] * (4 - kept) + [False] * kept
        proposal.switch(False)
    assert all(layer.recomputes for layer in layers)


def test_a_layer_that_did_not_run_is_not_kept() -> None:
    option = KeptActivations(checkpointed(), "full", lambda: 1 << 40)
    option.observe()
    assert not list(option.propose(lambda values: list(values)))
    assert all(layer.recomputes for layer in option.layers)


def test_kept_activations_give_the_same_gradient() -> None:
    layers = checkpointed()
    grads = []
    for recomputes in (True, False):
        layers[0].recomputes = recomputes
        torch.manual_seed(3)
        x = torch.linspace(0, 1, 160).view(10, 16).requires_grad_()
        F.mse_loss(layers[0].module(x), torch.zeros(10, 16)).backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.equal(*grads)
