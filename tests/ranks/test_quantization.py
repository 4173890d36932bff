"""Quantization-aware training with torchao: the same bits on any number of processes, in shards, after a resume.

The kill is in tests/cli/test_export_quantized.py. torchao is loaded in the forked processes only: it takes seconds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks.loops import attempt
from unisono.config import CheckpointSettings, ParallelSettings, Settings
from unisono.environment import World
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install 'unisono[quantize]'")

CONFIG = Settings(steps=4, batch=16, virtual_ranks=8, seed=3, checkpoint=CheckpointSettings(every=1))


def sharded(size: int) -> Settings:
    return replace(CONFIG, parallel=ParallelSettings(shard=size))


def points() -> TensorDataset:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))


def prepared(way: str) -> nn.Sequential:
    """Return a network whose linear layers round their weights, and in one way their inputs, too."""
    from torchao import quantization as ao
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    int4: Any = vars(torch)["int4"]
    model = network()
    if way == "int4":
        base = ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=ao.PerGroup(32))
        ao.quantize_(model, QATConfig(base, step="prepare"))
    elif way == "int8":
        weights = IntxFakeQuantizeConfig(torch.int8, "per_channel")
        ao.quantize_(model, QATConfig(weight_config=weights, step="prepare"))
    elif way == "activations":
        base = ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=ao.PerGroup(32))
        ao.quantize_(model, QATConfig(base, step="prepare"))
    elif way == "fixed scales":
        weights = IntxFakeQuantizeConfig(int4, group_size=32, is_dynamic=False)
        ao.quantize_(model, QATConfig(weight_config=weights, step="prepare"))
    return model


def trained(run: Run[Any], way: str) -> Any:
    """Train, and return the fingerprint, the loss, and the promise with its reason."""
    model = run.place(lambda: prepared(way))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)

    def loss(output: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output, y, reduction="sum"), len(y)

    for step in run.steps(points()):
        step.run(model, loss)
        step.update(optimizer)
    found = run_result(run)
    return found["weights_sha256"], found["loss"], found["promise"], found["reason"] * (found["promise"] != "exact")


WAYS = ("float", "int4", "int8", "activations")


def train_all(
    world: World, folder: str, config: Settings, resume: bool = False, ways: tuple[str, ...] = WAYS
) -> dict[str, Any]:
    return {way: attempt(world, Path(folder, way), partial(trained, way=way), config, resume=resume) for way in ways}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one process."""
    (found,) = run_ranks(train_all, 1, str(tmp_path_factory.mktemp("reference")), CONFIG)
    return dict(found)


@pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 5), marks=pytest.mark.slow)], ids=str)
def test_any_number_of_processes(tmp_path: Path, reference: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert [reference[way][2] for way in WAYS] == ["exact"] * 4, reference
    assert len({reference[way][0] for way in WAYS}) == 4, "the weights are not rounded"
    for size in sizes:
        assert run_ranks(train_all, size, str(tmp_path / str(size)), CONFIG) == [reference] * size


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards(tmp_path: Path, reference: dict[str, Any], size: int) -> None:
    assert run_ranks(train_all, size, str(tmp_path), sharded(size)) == [reference] * size


@pytest.mark.parametrize(
    ("config", "size"), [(CONFIG, 3), pytest.param(sharded(2), 4, marks=pytest.mark.slow)], ids=["whole", "sharded"]
)
def test_a_resume_on_another_number_of_processes(
    tmp_path: Path, reference: dict[str, Any], config: Settings, size: int
) -> None:
    (early, _) = run_ranks(train_all, 2, str(tmp_path), replace(config, steps=2))
    assert [early[way][0] != reference[way][0] for way in WAYS] == [True] * 4
    assert run_ranks(train_all, size, str(tmp_path), config, True) == [reference] * size


def test_scales_that_the_first_micro_batch_fixes_lower_the_promise(tmp_path: Path) -> None:
    """They are state that torchao keeps in attributes. Scales that are computed in every call are outputs."""
    (found,) = run_ranks(train_all, 1, str(tmp_path), CONFIG, False, ("fixed scales",))
    assert found["fixed scales"][2] == "tolerance"
    assert "weight_fake_quantizer" in found["fixed scales"][3]


def converted(world: World) -> float:
    """Return how far the outputs of an int4-aware model move when it is converted."""
    from unisono.export.quantization import quantize_linear, without_fake_quantizers

    model, x = prepared("int4").eval(), torch.randn(20, 32)
    with torch.no_grad():
        before: Tensor = model(x)
        without_fake_quantizers(model, "int4")
        unrounded: Tensor = model(x)
        assert quantize_linear(model, "int4", plain=True)["quantized_layers"] == 2
        after: Tensor = model(x)
    assert (unrounded - before).norm() > 0.01 * before.norm()
    return float((after - before).norm() / before.norm())


def test_the_forward_pass_has_the_weights_of_the_converted_model() -> None:
    assert run_ranks(converted, 1)[0] < 1e-6
