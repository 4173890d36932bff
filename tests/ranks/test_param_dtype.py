"""Layers that compute with bfloat16 parameters (parallel.param_dtype): any placement has the bits of one process."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

import unisono
from tests.pairs import every_pair
from tests.ranks import test_fsdp, training
from tests.ranks.loops import Numbers, attempt, train
from tests.ranks.test_activation_checkpoint import needs_compiler
from tests.ranks.test_fsdp import assert_same, short
from tests.ranks.training import padded, settings
from unisono.checkpoint.sharded_state import gather_tensor
from unisono.config import ParallelSettings
from unisono.distributed.process_group import to_local
from unisono.testing import run_ranks
from unisono.train.run import Run

Low = partial(ParallelSettings, param_dtype="bf16")

PLACEMENTS = {
    "two models": (2, Low()),
    "two shards": (2, Low(shard=2)),
    "three shards": (3, Low(shard=3)),
    "four shards": (4, Low(shard=4)),
    "two models of two shards": (4, Low(shard=2)),
    "three shards, gathered once a step": (3, Low(shard=3, reshard="step")),
    "two models of two shards, gathered once a step": (4, Low(shard=2, reshard="step")),
    "two shards in the CPU's memory": (2, Low(shard=2, offload=True)),
    "two shards in the CPU's memory, gathered once a step": (2, Low(shard=2, offload=True, reshard="step")),
}

CASES = {name: changes for name, changes in test_fsdp.CASES.items() if "bf16" not in name}
CASES["gpt, under autocast"] = {"precision": "bf16"}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train every case on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        case: run_ranks(short, 1, case.split(",")[0], settings(parallel=Low(), **changes), str(folder / case))[0]
        for case, changes in CASES.items()
    }


@pytest.mark.ci
@pytest.mark.parametrize(("placement", "case"), every_pair(PLACEMENTS, CASES))
def test_any_placement_gives_the_bits_of_one_process(
    tmp_path: Path, single: dict[str, dict[str, Any]], case: str, placement: str
) -> None:
    size, parallel = PLACEMENTS[placement]
    config = settings(**CASES[case], parallel=parallel)
    assert_same(run_ranks(short, size, case.split(",")[0], config, str(tmp_path)), single[case])


class Rows(nn.Module):
    """A row of layers with one inside another, a shared weight, and dropout."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.scale: torch.Tensor | None = torch.ones(16)  # float32 by name, in a layer of bfloat16
        self.tokens = nn.Embedding(24, 16)
        layers = [Layer(dropout) for _ in range(3)]
        layers[2].up.weight = layers[1].up.weight
        self.rows = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for row in self.rows:
            x = row(x, scale=self.scale)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.look = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, 4)).permute(3, 0, 2, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = self.look(seen.transpose(1, 2).flatten(2))
        x = x + (seen if scale is None else seen * scale)
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Untied(Rows):
    """A model without shared weights."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.scale = None
        self.rows[2].up = nn.Linear(16, 32)


def next_token(output: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    assert output.dtype == torch.float32
    loss = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return loss, (targets != -100).sum()


def rows(run: Run[Any], build: Any = Rows, **place: Any) -> Any:
    """Return losses, dtypes and norms of gradients, an evaluation, a prediction, and the weights."""
    model = run.place(build, **place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    found: list[Any] = []
    for step in run.steps(training.Sentences(24), collate_fn=padded):
        step.run(model, next_token)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        found.append(step.grad_norm)
        step.update(optimizer, clip=1.0)
        found.append(step.loss)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    found.append(run.evaluate(model, training.Sentences(7), next_token, collate_fn=padded))
    found.append(run.predict(model, [torch.arange(i, i + 5) for i in range(5)]).sum().item())
    return [*found, run.context.state.fingerprint()]


plain = partial(rows, build=Untied, sequence=unisono.SequenceDims())

CONFIG = settings(steps=3, batch=12, virtual_ranks=6)
TWO_DEVICES: dict[str, Any] = {"model_parallel_devices": 2, "devices": ["cpu", "cpu"]}


@pytest.mark.parametrize(
    ("activation_checkpoint", "others"),
    every_pair(["none", "full", "selective"], [{"shard": 2}, {"shard": 2, "reshard": "step"}, {}]),
)
def test_recomputed_layers(tmp_path: Path, activation_checkpoint: Any, others: Any) -> None:
    """The bits are those of one process without recomputation."""
    (found,) = run_ranks(attempt, 1, tmp_path / "1", rows, replace(CONFIG, parallel=Low()))
    assert isinstance(found, list), found
    config = replace(CONFIG, parallel=Low(activation_checkpoint=activation_checkpoint, **others))
    assert run_ranks(attempt, others.get("shard", 1), tmp_path / "n", rows, config) == [found] * others.get("shard", 1)


def test_layers_over_two_devices_of_one_process(tmp_path: Path) -> None:
    (found,) = run_ranks(attempt, 1, tmp_path / "1", plain, replace(CONFIG, parallel=Low()))
    assert isinstance(found, list), found
    assert run_ranks(attempt, 1, tmp_path / "2", plain, replace(CONFIG, parallel=Low(**TWO_DEVICES))) == [found]


@pytest.mark.ci
@pytest.mark.parametrize(
    "other",
    [
        {"context": 2},
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"context": 2, "activation_checkpoint": "full"}, marks=pytest.mark.slow),
    ],
)
def test_with_tensor_and_context_parallelism(tmp_path: Path, other: Any) -> None:
    """The axes of data change no bit; another size of this axis agrees to the rounding of bfloat16."""
    (one,) = run_ranks(attempt, 1, tmp_path / "1", plain, replace(CONFIG, parallel=Low()))
    two = run_ranks(attempt, 2, tmp_path / "2", plain, replace(CONFIG, parallel=Low(**other)))
    assert isinstance(two[0], list), two[0]
    assert two == [two[0]] * 2
    assert two[0][1] == pytest.approx(one[1], rel=1e-2)
    divided: list[dict[str, Any]] = [{}, {"shard": 2}, {"shard": 2, "reshard": "step"}]
    for shards in divided:
        config = replace(CONFIG, parallel=Low(**other, **shards))
        assert run_ranks(attempt, 4, tmp_path / str(shards), plain, config) == [two[0]] * 4


def compiled(run: Run[Any]) -> Any:
    """Train the rows on sequences of one length, because every shape is compiled by itself."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(run.dir.parent / "inductor")
    model = run.place(partial(Rows, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    found: list[Any] = []
    for step in run.steps([torch.arange(i % 5, i % 5 + 9) for i in range(24)], collate_fn=padded):
        step.run(model, next_token)
        step.update(optimizer, clip=1.0)
        found += [step.loss, step.grad_norm]
    return [*found, run.context.state.fingerprint()]


@pytest.mark.slow  # a first compilation takes ten seconds and more
@needs_compiler
@pytest.mark.timeout(600)
def test_compiled_layers(tmp_path: Path) -> None:
    """The bits differ from those without compilation, and are the same on any number of processes."""

    def found(size: int, **parallel: Any) -> list[Any]:
        config = settings(steps=2, batch=12, virtual_ranks=6, parallel=Low(**parallel))
        first, *others = run_ranks(attempt, size, tmp_path / f"{size}{parallel}", compiled, config, seconds=250.0)
        assert isinstance(first, list), first
        assert others == [first] * (size - 1)
        return list(first)

    eager, single = found(1), found(1, compile=True)
    assert single[:4] == pytest.approx(eager[:4], rel=1e-2)
    assert found(2, compile=True, shard=2) == single
    assert found(2, compile=True, shard=2, reshard="step") == single
    again = found(1, compile=True, activation_checkpoint="full")
    assert found(2, compile=True, shard=2, activation_checkpoint="full") == again


@pytest.mark.ci
def test_a_checkpoint_is_loaded_under_any_placement(tmp_path: Path) -> None:
    """Checkpoints hold float32, so a new placement loses nothing."""
    config, folder = settings(clip=0.5, parallel=Low()), tmp_path / "parts"
    never_stopped = run_ranks(short, 1, "gpt", config, str(tmp_path / "whole"))[0]
    stops = [(2, Low(shard=2), 2), (2, Low(), 4), (4, Low(shard=2, reshard="step"), 6)]
    for size, parallel, stop in stops:
        part = partial(short, resume=stop > 2, stop_after=stop)
        run_ranks(part, size, "gpt", replace(config, parallel=parallel), str(folder))
    (ended,) = run_ranks(partial(short, resume=True), 1, "gpt", config, str(folder))
    assert ended["state"] == never_stopped["state"]
    saved = [tensor for file in folder.rglob("*.safetensors") for tensor in load_file(file).values()]
    assert {tensor.dtype for tensor in saved if tensor.is_floating_point()} == {torch.float32}


def by_hand(run: Run[Any]) -> Any:
    """Compare the loop of one virtual rank with one that casts every parameter by hand."""
    model = run.place(partial(Rows, dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    plain = Rows(dropout=0.0)
    plain.load_state_dict(model.state_dict())
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert plain.scale is not None
    plain.scale = plain.scale.bfloat16()
    for step in run.steps(training.Sentences(24), collate_fn=padded):
        for tokens, targets in step:
            loss, weight = next_token(model(tokens), tokens, targets)
            step.backward(loss, weight=weight)
            low = {name: p.bfloat16() for name, p in plain.named_parameters()}
            loss, weight = next_token(functional_call(plain, low, (tokens,)).float(), tokens, targets)
            loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad / step.weight)
            theirs.grad /= step.weight
        by_hand.step()
        by_hand.zero_grad()
        step.update(optimizer)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    return True


def test_one_virtual_rank_is_the_loop_by_hand(tmp_path: Path) -> None:
    config = settings(steps=3, batch=8, virtual_ranks=1, parallel=Low())
    assert run_ranks(attempt, 1, tmp_path, by_hand, config) == [True]


def beside_torch(run: Run[Any]) -> Any:
    """Return the gradient of a step, ours and that of stock FSDP2 for the same micro-batches."""
    model = run.place(partial(Rows, dropout=0.0))
    plain: Any = Rows(dropout=0.0)
    plain.load_state_dict({name: gather_tensor(p.detach()) for name, p in model.state_dict().items()})
    policy = partial(MixedPrecisionPolicy, torch.bfloat16, torch.float32)
    plain.scale = plain.scale.bfloat16()  # for the two that share a weight, and are not units of FSDP2
    fully_shard(plain.rows[0], mp_policy=policy())
    fully_shard(plain, mp_policy=policy(output_dtype=torch.float32))
    for unit in plain.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    found = []
    for step in run.steps(training.Sentences(24), collate_fn=padded):
        for tokens, targets in step:
            loss, weight = next_token(model(tokens), tokens, targets)
            step.backward(loss, weight=weight)
            next_token(plain(tokens), tokens, targets)[0].backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            found.append(torch.equal(to_local(ours.grad), to_local(theirs.grad) / step.weight))
        step.update(optimizer)
        break
    return found


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_two_shards_have_the_gradient_of_stock_fsdp(tmp_path: Path, gather: Any) -> None:
    """The gradients are equal to the bit, because two micro-batches have one order of addition."""
    config = settings(steps=1, batch=8, virtual_ranks=2, parallel=Low(shard=2, reshard=gather))
    for found in run_ranks(attempt, 2, tmp_path, beside_torch, config):
        assert found == [True] * len(found)
        assert len(found) > 20


def pictures(run: Run[Any]) -> Any:
    """Train convolutions with another memory format, in a row and outside of it; and an average of the weights."""
    build = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))  # noqa: E731
    model = run.place(lambda: build().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model) if run.size == 1 else None
    run.track(model=model, optimizer=optimizer)
    found = []
    for step in run.steps(torch.utils.data.TensorDataset(torch.randn(32, 1, 8, 8, generator=torch.Generator()))):
        step.run(model, lambda out, x: ((out - x.mean()).pow(2).sum(), len(x)))
        step.update(optimizer, clip=10.0)
        found += [step.loss, step.grad_norm]
        if average is not None:
            average.update_parameters(model)
            assert average(torch.zeros(1, 1, 8, 8)).dtype == torch.float32
    return [*found, run.context.state.fingerprint()]


def test_channels_last_and_a_copy(tmp_path: Path) -> None:
    config = settings(steps=4, batch=8, virtual_ranks=4, parallel=Low())
    (found,) = run_ranks(attempt, 1, tmp_path / "1", pictures, config)
    assert isinstance(found, list), found
    for gather in ("layer", "step"):
        config = replace(config, parallel=Low(shard=2, reshard=gather))
        assert run_ranks(attempt, 2, tmp_path / gather, pictures, config) == [found] * 2


def twice(run: Run[Any]) -> Any:
    """Call a model twice in one round, call one of its layers twice as well, and compute the gradient of a gradient."""
    rows = nn.Sequential(nn.Linear(3, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    model = run.place(nn.Sequential(rows, rows[2], nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    found = []
    for step in run.steps(Numbers(32)):
        for x, i in step:
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            step.backward(out.square().sum() + model(-x).square().sum() + slope.square().sum(), weight=len(i))
        step.update(optimizer, clip=10.0)
        found += [step.loss, step.grad_norm]
    return [*found, run.context.state.fingerprint()]


def test_models_and_layers_that_are_called_several_times(tmp_path: Path) -> None:
    """Gradients within a call are added in bfloat16, those of several calls in float32, wherever the cast is made."""
    config = settings(steps=3, batch=12, virtual_ranks=4, parallel=Low())
    (found,) = run_ranks(attempt, 1, tmp_path / "1", twice, config)
    assert isinstance(found, list), found
    config = replace(config, parallel=Low(shard=2, reshard="step"))
    assert run_ranks(attempt, 2, tmp_path / "2", twice, config) == [found] * 2


class UsesWeightOutside(nn.Module):
    """Use a layer's weight outside of that layer, and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = row(x).relu()
        out: torch.Tensor = self.out(x) + self.rows[0].get_parameter("weight").square().sum()
        return out


def elsewhere(run: Run[Any]) -> Any:
    def penalised(step: Any, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        step.backward((model(x) - 1).square().sum() + len(i) * penalty, weight=len(i))

    return train(run, penalised, build=UsesWeightOutside)


def thaws(run: Run[Any]) -> Any:
    """Train with two layers that are unfrozen after the first step."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        model[:2].requires_grad_(False)
        return model

    def after(step: Any, optimizer: Any) -> None:
        step.update(optimizer)
        run.context.models.modules[0].requires_grad_(True)

    return train(run, after=after, build=build)


@pytest.mark.parametrize(("loop", "gather"), [(elsewhere, "step"), (thaws, "step"), (thaws, "layer")])
def test_weights_used_outside_and_layers_that_thaw(tmp_path: Path, loop: Any, gather: Any) -> None:
    config = settings(steps=3, batch=8, virtual_ranks=4, parallel=Low())
    (found,) = run_ranks(attempt, 1, tmp_path / "1", loop, config)
    assert isinstance(found, list), found
    config = replace(config, parallel=Low(shard=2, reshard=gather))
    assert run_ranks(attempt, 2, tmp_path / "2", loop, config) == [found] * 2


REFUSED: dict[str, tuple[Any, str]] = {
    "running statistics": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "1 is a BatchNorm1d.*GroupNorm"),
    "a list of its own": (lambda: nn.LSTM(3, 2), "It is a LSTM, which keeps a list.*param_dtype=fp32"),
    "a spectral norm": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))),
        "1 is a ParametrizedLinear with a spectral norm.*param_dtype=fp32",
    ),
    "a spectral norm as it was": (
        lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
        "It is a Linear with a spectral norm.*param_dtype=fp32",
    ),
    "other numbers": (lambda: nn.Linear(3, 2).double(), "weight is torch.float64.*model.float"),
}


def train_refused(run: Run[Any], what: str) -> Any:
    return train(run, build=REFUSED[what][0])


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_modules_are_refused(tmp_path: Path, what: str) -> None:
    (found,) = run_ranks(attempt, 1, tmp_path, partial(train_refused, what=what), settings(parallel=Low()))
    assert re.search(REFUSED[what][1], str(found), re.DOTALL), found
