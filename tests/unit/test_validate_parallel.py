"""Checks of the settings of parallelism: conflicts and missing devices are refused with a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.test_config import Settings
from unisono.config import CommandLine, ParallelSettings
from unisono.config.mesh_shape import MeshShape
from unisono.config.validate import check
from unisono.parallel.one_process.data_parallel_threads import restore_forward, seed_other_devices
from unisono.parallel.one_process.devices import device_problems, devices_of
from unisono.parallel.parallelize import promise_of_parallel

LINE = CommandLine(("unisono", "run", "text"))


@pytest.mark.parametrize(
    ("parallel", "error", "do"),
    [
        (
            {"model_parallel_devices": 2, "data_parallel_devices": 3},
            "parallel.model_parallel_devices = 2 cannot be combined with parallel.data_parallel_devices = 3.",
            "--set parallel.data_parallel_devices=1, or: unisono run text --set parallel.model_parallel_devices=1",
        ),
        (
            {"model_parallel_devices": 2, "shard": 2},
            "parallel.model_parallel_devices = 2 cannot be combined with parallel.shard = 2.",
            "--set parallel.model_parallel_devices=1, or: unisono run text --set parallel.shard=1",
        ),
        (
            {"data_parallel_devices": 2, "activation_checkpoint": "full"},
            "parallel.data_parallel_devices = 2 cannot be combined with parallel.activation_checkpoint = full.",
            "unisono run text --set parallel.data_parallel_devices=1 --ranks 2, or: unisono run text --set "
            "parallel.activation_checkpoint=none",
        ),
        (
            {"data_parallel_devices": 2, "compile": True},
            "parallel.data_parallel_devices = 2 cannot be combined with parallel.compile = true.",
            "parallel.compile=false",
        ),
        (
            {"devices": ["cpu", "cpu"]},
            "parallel.devices = ['cpu', 'cpu'] has no effect.",
            "--set parallel.model_parallel_devices=2, or: ",
        ),
        (
            {"devices": ["cpu"], "model_parallel_devices": 2},
            "parallel.devices = ['cpu'] has the wrong length.",
            "--set parallel.model_parallel_devices=1, or: ",
        ),
        (
            {"replicate_shards": True},
            "parallel.replicate_shards = true has no effect with parallel.shard = 1.",
            "--ranks 2 --set parallel.shard=2, or: unisono run text --set parallel.replicate_shards=false",
        ),
        (
            {"model_parallel_devices": 0},
            "parallel.model_parallel_devices = 0 is out of range.",
            "--set parallel.model_parallel_devices=1",
        ),
        (
            {"param_dtype": "bf16", "data_parallel_devices": 2},
            "parallel.param_dtype = bf16 cannot be combined with parallel.data_parallel_devices = 2.",
            "--set parallel.data_parallel_devices=1, or: unisono run text --set parallel.param_dtype=fp32 --set "
            "precision=bf16",
        ),
        (
            {"param_dtype": "bf16", "pipeline": 2},
            "parallel.param_dtype = bf16 cannot be combined with parallel.pipeline = 2.",
            "--set parallel.pipeline=1, or: unisono run text --set parallel.param_dtype=fp32 --set precision=bf16",
        ),
    ],
)
def test_conflicting_settings_are_refused(parallel: dict[str, Any], error: str, do: str) -> None:
    processes = parallel.get("shard", 1) * parallel.get("pipeline", 1)
    (problem,) = check(Settings(steps=1, parallel=ParallelSettings(**parallel)), processes, LINE)
    assert problem.error == error
    assert do in problem.remedy


def test_two_half_precisions_conflict() -> None:
    config = Settings(steps=1, precision="fp16", parallel=ParallelSettings(param_dtype="bf16"))
    (problem,) = check(config, 1, LINE)
    assert problem.error == "parallel.param_dtype = bf16 cannot be combined with precision = fp16."
    assert "--set precision=bf16, or: unisono run text --set parallel.param_dtype=fp32" in problem.remedy


def test_compatible_settings_are_accepted() -> None:
    assert check(Settings(steps=1, parallel=ParallelSettings(shard=2, replicate_shards=True)), 4, LINE) == []
    for parallel in (
        {"model_parallel_devices": 2},
        {"data_parallel_devices": 2},
        {"activation_checkpoint": "selective", "compile": True},
    ):
        assert check(Settings(steps=1, parallel=ParallelSettings(**parallel)), 1, LINE) == []


only_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has more than a CPU")


@only_cpu
@pytest.mark.parametrize(
    ("parallel", "true", "do"),
    [
        (
            {"model_parallel_devices": 2},
            "This machine has 0 accelerators, and its CPU is one device",
            "unisono run text --set parallel.model_parallel_devices=1 --set parallel.shard=2 --ranks 2",
        ),
        ({"model_parallel_devices": 2}, "0 accelerators", '--set parallel.devices=["cpu","cpu"]'),
        (
            {"data_parallel_devices": 3},
            "This machine has 0 accelerators",
            "--set parallel.data_parallel_devices=1 --ranks 3",
        ),
        ({"data_parallel_devices": 2, "devices": ["cpu", "cpu"]}, "needs a second accelerator", "--ranks 2"),
        (
            {"model_parallel_devices": 2, "devices": ["cpu", "cuda:0"]},
            "This run computes on cpu, and cuda has other bits",
            "--ranks 2",
        ),
        ({"model_parallel_devices": 2, "devices": ["cpu", "gpu"]}, "torch has no device 'gpu'", "--ranks 2"),
    ],
)
def test_missing_devices_are_refused(parallel: dict[str, Any], true: str, do: str) -> None:
    (problem,) = device_problems(ParallelSettings(**parallel), 1, LINE)
    assert true in problem.facts
    assert do in problem.remedy.replace('\'parallel.devices=["cpu","cpu"]\'', 'parallel.devices=["cpu","cpu"]')


@only_cpu
def test_the_cpu_may_be_named_as_several_devices() -> None:
    parallel = ParallelSettings(model_parallel_devices=2, devices=["cpu:0", "cpu:1"])
    assert device_problems(parallel, 3, LINE) == []
    assert devices_of(parallel, torch.device("cpu")) == [torch.device("cpu")] * 2


def test_the_first_devices_are_used_by_default() -> None:
    cuda = torch.device("cuda", 0)
    assert devices_of(ParallelSettings(model_parallel_devices=2), cuda) == [cuda, torch.device("cuda", 1)]
    assert devices_of(ParallelSettings(data_parallel_devices=2), cuda) == [cuda, torch.device("cuda", 1)]


def test_data_parallel_threads_weaken_the_promise() -> None:
    exchange = ("exact", "a tree")
    assert promise_of_parallel(exchange, ParallelSettings(model_parallel_devices=2), MeshShape(), []) == exchange
    assert promise_of_parallel(exchange, ParallelSettings(data_parallel_devices=2), MeshShape(), [])[0] == "tolerance"


def test_a_replica_in_a_thread_has_its_own_forward() -> None:
    """A replica of DataParallel inherits a replaced forward method and the hooks of the model."""
    model = nn.Linear(3, 2)
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("hook"))
    model.forward = lambda *_: seen.append("the original")  # type: ignore[method-assign,assignment]
    copied = model._replicate_for_data_parallel()
    copied.weight, copied.bias = torch.ones(2, 3), torch.zeros(2)
    restore_forward(copied, "cpu", True, torch.bfloat16)
    out = copied(torch.ones(1, 3))
    assert (out.tolist(), out.dtype, seen) == ([[3.0, 3.0]], torch.bfloat16, [])
    model(torch.ones(1, 3))
    assert seen == ["the original", "hook"]


def test_generators_of_other_devices_follow_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on the second device depends on the micro-batch alone, not on what the device computed before."""
    states: dict[int, Any] = {0: torch.tensor([3, 4], dtype=torch.uint8), 1: 0, 2: 0}
    current = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    fake = SimpleNamespace(
        get_rng_state=lambda device: states[device.index],
        device=on,
        manual_seed=lambda seed: states.update({current[0]: seed}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    devices = [torch.device("cuda", n) for n in range(3)]
    seed_other_devices(devices)
    first = [states[1], states[2]]
    states.update({1: 7, 2: 7})
    seed_other_devices(devices)
    assert [states[1], states[2]] == first
    assert len({*first, 0}) == 3
    states[0] = torch.tensor([3, 5], dtype=torch.uint8)
    seed_other_devices(devices)
    assert states[1] not in first
