"""Other kernels for the same computation: the same bits on any number of processes, for each setting of `speed`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks.loops import attempt
from unisono.config import ParallelSettings, Settings, SpeedSettings
from unisono.environment import World
from unisono.parallel.speed import float8_linear
from unisono.parallel.speed.attention_backend import name_missing_backend
from unisono.testing import run_ranks, run_result
from unisono.train.optimization import step_kernels
from unisono.train.run import Run

CONFIG = Settings(steps=5, batch=24, virtual_ranks=8, seed=3)
SHARDED = ParallelSettings(shard=2)


class Network(nn.Module):
    """A convolution, batch norm, attention, linear layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.qkv = nn.Linear(16, 48)
        self.leave = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.enter(x))).flatten(2).transpose(1, 2)
        q, k, v = (part[:, None] for part in self.qkv(features).chunk(3, 2))
        out: Tensor = self.leave(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))
        return out


def images(length: int = 43) -> TensorDataset:
    """Return images. The last batch of an epoch has 19 of them, and virtual ranks have 2 or 3."""
    x = torch.randn(length, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def loss_of(output: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, y, reduction="sum"), len(y)


def train(run: Run[Any], build: Callable[[], nn.Module] = Network) -> Any:
    """Train with a schedule, and return the fingerprint, the loss and the promise."""
    model = run.place(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(images()):
        step.run(model, loss_of)
        step.update(optimizer, schedule)
    found = run_result(run)
    return found["weights_sha256"], found["loss"], found["promise"]


PLAIN = SpeedSettings()
EAGER = {
    "plain": PLAIN,
    "foreach": replace(PLAIN, optimizer="foreach"),
    "fused": replace(PLAIN, optimizer="fused"),
    "channels_last": replace(PLAIN, channels_last=True),
    "math": replace(PLAIN, attention="math"),
    "flash": replace(PLAIN, attention="flash"),
    "all": SpeedSettings(optimizer="fused", channels_last=True, attention="math"),
}
COMPILED = {
    "plain": PLAIN,
    "model": replace(PLAIN, compile_model=True),
    "step": replace(PLAIN, optimizer="compiled"),
}
"""Compiling takes seconds and more."""

SECONDS = 400.0
"""Enough to compile on a busy machine."""

FLOAT8 = {"plain": PLAIN, "emulated": replace(PLAIN, float8="emulated")}


def train_all(
    world: World,
    folder: str,
    ways: dict[str, SpeedSettings],
    config: Settings = CONFIG,
    resume: bool = False,
    verified: bool = False,
) -> dict[str, Any]:
    return {
        name: attempt(world, Path(folder, name), train, replace(config, speed=speed), resume=resume, verified=verified)
        for name, speed in ways.items()
    }


def assert_same(tmp_path: Path, ways: dict[str, SpeedSettings], sizes: tuple[int, ...], config: Settings) -> Any:
    """Check that all processes of runs on these sizes have the same results. Return those of one process."""
    whole = replace(config, parallel=ParallelSettings())
    (reference,) = run_ranks(train_all, 1, str(tmp_path / "1"), ways, whole, seconds=SECONDS)
    for name, found in reference.items():
        assert isinstance(found, tuple), found
        assert found[2] == "exact", (name, found)
    for size in sizes:
        folder = str(tmp_path / f"{size}-{config.parallel.shard}")
        for rank, found in enumerate(run_ranks(train_all, size, folder, ways, config, False, True, seconds=SECONDS)):
            assert found == reference, (size, rank)
    return reference


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((5, 8), marks=pytest.mark.slow)], ids=str)
def test_any_number_of_processes(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    found = assert_same(tmp_path, EAGER, sizes, CONFIG)
    bits = {name: each[0] for name, each in found.items()}
    assert bits["foreach"] == bits["flash"] == bits["plain"]  # what torch chooses by itself on the CPU
    assert len({bits[name] for name in ("plain", "fused", "math", "all")}) == 4


@pytest.mark.ci
def test_shards(tmp_path: Path) -> None:
    ways = {name: EAGER[name] for name in ("plain", "foreach", "fused", "channels_last", "math")}
    assert_same(tmp_path, ways, (2,), replace(CONFIG, parallel=SHARDED))


HALF = replace(CONFIG, steps=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sizes", [(2,), (3, 5)], ids=str)
def test_compiled_code_and_a_resume(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Compile models and optimizers on several processes, and in a process that continues after step 3."""
    bits = assert_same(tmp_path, COMPILED, sizes, CONFIG)
    assert len({found[0] for found in bits.values()}) == 3
    assert abs(bits["step"][1] - bits["plain"][1]) < 1e-4  # a compiled model draws other numbers for dropout
    folder = str(tmp_path / "resumed")
    run_ranks(train_all, sizes[-1], folder, COMPILED, HALF, seconds=SECONDS)
    for found in run_ranks(train_all, 2, folder, COMPILED, CONFIG, True, seconds=SECONDS):
        assert found == bits


def test_a_resume_keeps_the_bits(tmp_path: Path) -> None:
    ways = {name: EAGER[name] for name in ("fused", "channels_last", "math")}
    (reference,) = run_ranks(train_all, 1, str(tmp_path / "whole"), ways, CONFIG)
    folder = str(tmp_path / "resumed")
    run_ranks(train_all, 2, folder, ways, replace(HALF, parallel=SHARDED))
    for found in run_ranks(train_all, 3, folder, ways, CONFIG, True):
        assert found == reference


def test_a_checkpoint_has_the_options_of_the_script(tmp_path: Path) -> None:
    """After half of a run with fused kernels, the script's own ones continue, and not those of the checkpoint."""
    folder = str(tmp_path / "run")
    plain = {"run": PLAIN}
    ended = {}
    for name, first in (("fused", {"run": EAGER["fused"]}), ("plain", plain)):
        run_ranks(train_all, 1, f"{folder}-{name}", first, HALF)
        (ended[name],) = run_ranks(implementations, 1, f"{folder}-{name}/run", PLAIN, 4)
    assert ended == {"fused": [(None, None)], "plain": [(None, None)]}
    assert run_ranks(implementations, 1, f"{folder}-plain/run", EAGER["fused"], 5) == [[(False, True)]]


def implementations(world: World, folder: str, speed: SpeedSettings, steps: int) -> Any:
    """Resume a run, and return the options (foreach, fused) of its optimizer after a step."""

    def loop(run: Run[Any]) -> Any:
        model = run.place(Network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        for step in run.steps(images()):
            step.run(model, loss_of)
            step.update(optimizer, schedule)
        return [(group["foreach"], group["fused"]) for group in optimizer.param_groups]

    return attempt(world, Path(folder), loop, replace(CONFIG, steps=steps, speed=speed), resume=True)


@pytest.mark.ci
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("parallel", [ParallelSettings(), SHARDED], ids=["whole", "shards"])
def test_emulated_float8(tmp_path: Path, parallel: ParallelSettings) -> None:
    sizes = (2,) if parallel is SHARDED else (2, 3)
    found = assert_same(tmp_path, FLOAT8, sizes, replace(CONFIG, parallel=parallel))
    assert found["emulated"][0] != found["plain"][0]
    assert abs(found["emulated"][1] - found["plain"][1]) < 0.1


class Refused(NamedTuple):
    """A run that cannot use a setting, and the message."""

    speed: SpeedSettings
    message: str
    build: Callable[[], nn.Module] = Network
    kind: str = "AdamW"


REFUSED = {
    "no fused kernel": Refused(
        EAGER["fused"], "step.update cannot step NAdam with speed.optimizer=fused", kind="NAdam"
    ),
    "no convolution": Refused(EAGER["channels_last"], "channels_last = true has no effect", partial(nn.Linear, 5, 3)),
    "float8 on the CPU": Refused(replace(PLAIN, float8="tensorwise"), "needs an NVIDIA GPU of compute capability 8.9"),
    "no layer for float8": Refused(
        FLOAT8["emulated"], "speed.float8 = emulated has no effect", partial(nn.Linear, 5, 3)
    ),
}


def refused(world: World, folder: str) -> dict[str, Any]:
    def loop(run: Run[Any], case: Refused) -> None:
        model = run.place(case.build)
        optimizer = getattr(torch.optim, case.kind)(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(images()):
            step.run(model, loss_of)
            step.update(optimizer)

    return {
        name: attempt(world, Path(folder, str(i)), partial(loop, case=case), replace(CONFIG, speed=case.speed))
        for i, (name, case) in enumerate(REFUSED.items())
    }


def test_settings_that_a_run_cannot_use_are_refused(tmp_path: Path) -> None:
    (found,) = run_ranks(refused, 1, str(tmp_path))
    for name, case in REFUSED.items():
        assert case.message in str(found[name]), found[name]
        assert "Next: --set speed." in found[name]


class Dropping(Network):
    """A network with dropout in its attention, which flash attention of the CPU does not support."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.enter(x).flatten(2).transpose(1, 2)
        out: Tensor = F.scaled_dot_product_attention(features, features, features, dropout_p=0.1).mean(1)[:, :3]
        return out


def attentions(world: World, folder: str) -> list[Any]:
    """Run with a back end that fails, then without the setting, and return both results."""

    def loop(run: Run[Any]) -> Any:
        with name_missing_backend(run.settings.speed.attention):
            return train(run, build=Dropping)

    return [attempt(world, Path(folder, name), loop, replace(CONFIG, speed=EAGER[name])) for name in ("flash", "plain")]


@pytest.mark.filterwarnings("ignore:.*do not support non-zero dropout", "ignore:Flash attention kernel not used")
def test_a_back_end_that_does_not_fit_is_named_and_switched_off_afterward(tmp_path: Path) -> None:
    ((flash, plain),) = run_ranks(attentions, 1, str(tmp_path))
    assert "speed.attention=flash cannot compute an attention of this model" in flash
    assert plain[2] == "exact", plain


def cycling(world: World, folder: str) -> Any:
    """Cycle the momentum of a compiled optimizer; here it is not compiled, which would take a minute."""

    def loop(run: Run[Any], kind: str) -> Any:
        model = run.place(lambda: nn.Linear(4, 3))
        optimizer = (
            torch.optim.SGD(model.parameters(), momentum=0.9) if kind == "SGD" else torch.optim.Adam(model.parameters())
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        seen = []
        for step in run.steps(TensorDataset(torch.randn(40, 4), torch.zeros(40, dtype=torch.long))):
            step.run(model, loss_of)
            step.update(optimizer, schedule)
            seen.append(type(optimizer.param_groups[0]["lr"]))
        return set(seen)

    step_kernels.compiled_step = lambda: step_kernels.step_of  # type: ignore[assignment]
    config = replace(CONFIG, steps=10, speed=COMPILED["step"])
    return [attempt(world, Path(folder, kind), partial(loop, kind=kind), config) for kind in ("SGD", "Adam")]


def test_a_step_that_would_be_compiled_again_and_again_is_an_error(tmp_path: Path) -> None:
    ((sgd, adam),) = run_ranks(cycling, 1, str(tmp_path))
    assert "The compiled step of SGD would be compiled again in every step" in sgd
    assert "momentum changed 4 times" in sgd
    assert adam == {float}


def train_on_simulated_gpu(world: World, folder: str) -> Any:
    """Train in float8 on the CPU, whose products in float8 torch computes as well, as if it were a GPU for it."""
    float8_linear.lacks_float8 = lambda *_: ""
    return train_all(world, folder, {kind: replace(PLAIN, float8=kind) for kind in ("tensorwise", "emulated")})


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_on_a_simulated_gpu_keeps_the_promise(tmp_path: Path) -> None:
    (found,) = run_ranks(train_on_simulated_gpu, 1, str(tmp_path))
    assert found["tensorwise"][2] == "exact", found
    assert found["emulated"][2] == "exact"
    assert abs(found["tensorwise"][1] - found["emulated"][1]) < 0.01
