"""Activation checkpointing: recomputation has the bits of the first pass; compiled layers agree among processes."""

from __future__ import annotations

import copy
import os
import random
import shutil
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.pairs import every_pair
from tests.ranks.agreement import train_gpt
from tests.ranks.loops import Numbers, attempt, train
from tests.ranks.training import settings
from tests.ranks.training import train as train_kind
from unisono.config import ParallelSettings
from unisono.errors import LoopError
from unisono.parallel.activation_checkpoint import LARGE, apply_activation_checkpoint, save_policy
from unisono.parallel.compile import apply_compile
from unisono.recipes.text import GPT, Model
from unisono.testing import run_ranks
from unisono.train.run import Run

WAYS = ("full", "selective")
PLACEMENTS = {
    "one process": (1, ParallelSettings()),
    "two processes": (2, ParallelSettings()),
    "two shards": (2, ParallelSettings(shard=2)),
    "two shards, gathered once a step": (2, ParallelSettings(shard=2, reshard="step")),
}


class Block(nn.Module):
    """A model with much state that a forward pass may depend on.

    It has running statistics, a spectral norm's vectors, a counter, noise of three generators, and rows of layers
    inside, one of which is not always used.
    """

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        noise = 0.1 * np.random.rand() + 0.1 * random.random()
        h = self.first(self.norm(x)) * scale * (1 + noise) + 0.01 * self.seen
        h = self.experts[0](h) + self.experts[1](h).tanh()
        return x + self.dropout(h)


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.down = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        scale = x.sigmoid().mean()
        for block in self.blocks:
            x = block(x, scale=scale)
        out: torch.Tensor = self.down(x)
        return out + torch.rand(2)  # a random number after the layers


def odd(run: Run[Any]) -> Any:
    return train(run, build=Unusual, data=Numbers(48))


CONFIG = settings(batch=16, virtual_ranks=4, steps=3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of a run without recomputation."""
    (found,) = run_ranks(attempt, 1, tmp_path_factory.mktemp("kept"), odd, CONFIG)
    assert isinstance(found, list), found
    return found


@pytest.mark.parametrize(("placement", "how"), every_pair(PLACEMENTS, WAYS))
def test_recomputation_has_the_bits_of_the_first_pass(
    tmp_path: Path, kept: list[Any], how: Any, placement: str
) -> None:
    size, parallel = PLACEMENTS[placement]
    config = replace(CONFIG, parallel=replace(parallel, activation_checkpoint=how))
    assert run_ranks(attempt, size, tmp_path, odd, config) == [kept] * size


class Checkpointed(nn.Module):
    """A row of layers with batch norm, and a torch checkpoint of the script around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        out: torch.Tensor = self.out(x)
        return out


def checkpointed(run: Run[Any]) -> Any:
    return train(run, build=Checkpointed, data=Numbers(48))


def test_a_checkpoint_in_the_script_counts_batches_once(tmp_path: Path) -> None:
    def found(how: Any, size: int) -> Any:
        config = replace(CONFIG, parallel=ParallelSettings(activation_checkpoint=how))
        return run_ranks(attempt, size, tmp_path, checkpointed, config)[-1]

    kept = found("none", 1)
    assert isinstance(kept, list), kept
    assert [found("full", 1), found("selective", 2)] == [kept] * 2


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"virtual_ranks": 1}, {"micro_batch": 1}])
def test_precisions_and_micro_batches(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A model without rows is one layer: the GPT of these tests has one block."""
    config = settings(**changes)
    short = partial(train_kind, length=53)
    (kept,) = run_ranks(short, 1, "gpt", config, str(tmp_path / "kept"))
    config = replace(config, parallel=ParallelSettings(activation_checkpoint="full"))
    (again,) = run_ranks(short, 1, "gpt", config, str(tmp_path / "again"))
    assert (again["state"], again["losses"], again["norms"]) == (kept["state"], kept["losses"], kept["norms"])
    assert again["result"]["promise"] == "exact"


@pytest.mark.parametrize(
    "axes",
    [
        {"pipeline": 2},
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "shard": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_divided_models(tmp_path: Path, axes: dict[str, Any]) -> None:
    """The bits are those of the same layout without recomputation."""

    def found(how: Any) -> tuple[list[float], set[str]]:
        config = settings(
            batch=12, virtual_ranks=4, steps=2, parallel=ParallelSettings(activation_checkpoint=how, **axes)
        )
        came = run_ranks(train_gpt, prod(axes.values()), str(tmp_path / how), config)
        return came[0].losses, {one.fingerprint for one in came}

    kept = found("none")
    assert len(kept[1]) == 1
    assert [found(how) for how in WAYS] == [kept] * len(WAYS)


def test_a_graph_that_is_walked_twice_recomputes_twice(tmp_path: Path) -> None:
    """A zero-bubble schedule runs backward to the inputs first, and to the weights later."""

    def found(how: Any) -> list[float]:
        parallel = ParallelSettings(
            activation_checkpoint=how, pipeline=2, schedule="InterleavedZeroBubble", stages_per_rank=1
        )
        config = settings(batch=12, virtual_ranks=4, steps=2, parallel=parallel)
        (first, second) = run_ranks(train_gpt, 2, str(tmp_path / how), config)
        assert first.fingerprint == second.fingerprint
        return [*first.losses, *first.norms]

    assert found("full") == found("none")


def gpt(how: str = "none") -> nn.Module:
    torch.manual_seed(0)
    model = GPT(Model(width=32, depth=3, heads=2, dropout=0.1))
    if how != "none":
        apply_activation_checkpoint(model, how, [])
    return model


TOKENS = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))


def bytes_kept(how: str) -> int:
    """Return the bytes that autograd keeps between forward and backward, without those that a selective layer holds."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = gpt(how)(TOKENS)
    assert out.requires_grad
    return sum(kept.values())


def flops(how: str) -> int:
    with FlopCounterMode(display=False) as counter:
        gpt(how)(TOKENS).sum().backward()
    return int(counter.get_total_flops())


def test_layers_keep_their_inputs_only() -> None:
    assert bytes_kept("full") < 0.3 * bytes_kept("none")


def test_selective_recomputes_no_product() -> None:
    assert flops("selective") == flops("none") < flops("full")


def test_attention_with_dropout_is_not_kept() -> None:
    """If it were kept, the recomputation would draw fewer numbers."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    x = torch.zeros(1, 1, 2, 8)
    assert save_policy(None, attention, x, x, x) is CheckpointPolicy.MUST_SAVE
    assert save_policy(None, attention, x, x, x, 0.0, True) is CheckpointPolicy.MUST_SAVE
    assert save_policy(None, attention, x, x, x, 0.1, True) is CheckpointPolicy.PREFER_RECOMPUTE
    assert save_policy(None, attention, x, x, x, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("how", WAYS)
def test_names_do_not_change_and_a_copy_is_independent(how: str) -> None:
    model, plain = gpt(how), gpt()
    assert list(model.state_dict()) == list(plain.state_dict())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    copied.eval()
    plain.eval()
    assert torch.equal(copied(TOKENS), plain(TOKENS))
    copied(TOKENS).sum().backward()
    assert all(p.grad is None for p in model.parameters())


RECURRENT = {
    "GRU": lambda: nn.GRU(5, 3, num_layers=2, dropout=0.2),
    "GRUCell": lambda: nn.GRUCell(5, 3),
    "LSTM": lambda: nn.LSTM(5, 3).double(),  # in float32 oneDNN computes it as one operator
    "RNN": lambda: nn.RNN(5, 3),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_have_the_gradients_without_recomputation(kind: str) -> None:
    """Their kernels overwrite products, GRU's without a new version, so selective must not keep these."""

    def gradients(how: str | None) -> list[Any]:
        torch.manual_seed(3)
        model = RECURRENT[kind]()
        if how is not None:
            apply_activation_checkpoint(model, how, [])
        out = model(torch.randn(4, 5, dtype=next(model.parameters()).dtype))
        (out if isinstance(out, torch.Tensor) else out[0]).sin().sum().backward()
        return [p.grad for p in model.parameters()]

    kept = gradients(None)
    for how in WAYS:
        assert all(map(torch.equal, gradients(how), kept)), how


def test_an_unsafe_split_is_refused() -> None:
    class Unsafe(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = torch.unsafe_split(super().forward(x), 3)
            return first.sigmoid_() * second

    model = Unsafe(4, 4)
    apply_activation_checkpoint(model, "selective", [])
    with pytest.raises(LoopError, match=r"unsafe_split.*cannot be noticed"):
        model(torch.randn(6, 4))


class Codebook(nn.Linear):
    """A large buffer that changes."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("codes", torch.zeros(LARGE + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes += 1
        return super().forward(x).tanh()


def test_a_large_buffer_that_changes_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(activation_checkpoint="full"))
    (found,) = run_ranks(attempt, 1, tmp_path, codebook, config)
    assert f"Its buffer codes has {LARGE + 1} elements" in found, found


def codebook(run: Run[Any]) -> Any:
    return train(run, build=Codebook)


def overwritten(run: Run[Any]) -> Any:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)) for _ in range(2)))

    def body(step: Any, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        step.backward(model(x).sum(), len(i))

    return train(run, body, build=build)


def test_an_overwritten_product_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(activation_checkpoint="selective"))
    (found,) = run_ranks(attempt, 1, tmp_path, overwritten, config)
    assert "has been mutated" in found, found
    assert "--set parallel.activation_checkpoint=full" in found
    (found,) = run_ranks(attempt, 1, tmp_path / "layer", overwritten, replace(config, parallel=LAYER))
    assert isinstance(found, list), found


LAYER = ParallelSettings(activation_checkpoint="full")


# -- compiled


class PlainNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GELU()) for _ in range(2))
        self.down = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.1)
        out: torch.Tensor = self.down(x)
        return out


def compiled(run: Run[Any]) -> Any:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(run.dir.parent / "inductor")
    found = train(run, build=PlainNet, data=Numbers(48))
    return [*found, torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0]


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler"
)


@pytest.mark.slow  # a first compilation takes ten seconds and more
@needs_compiler
@pytest.mark.timeout(400)
def test_compiled_layers_agree_among_processes(tmp_path: Path) -> None:
    """They agree with an uncompiled one to rounding; also when they are recomputed."""

    def found(size: int, **parallel: Any) -> list[Any]:
        config = replace(CONFIG, steps=2, parallel=ParallelSettings(**parallel))
        first, *others = run_ranks(attempt, size, tmp_path / f"{size}{parallel}", compiled, config, seconds=200)
        assert isinstance(first, list), first
        assert others == [first] * (size - 1)
        return list(first)

    eager, alone = found(1), found(1, compile=True)
    assert (eager[-1], alone[-1]) == (False, True)
    assert alone[:2] == pytest.approx(eager[:2], rel=1e-5)
    assert found(2, compile=True, shard=2) == alone
    assert found(1, compile=True, activation_checkpoint="full")[:2] == pytest.approx(eager[:2], rel=1e-5)


def test_layers_are_compiled_in_the_first_forward_pass() -> None:
    """FSDP2 can then shard a layer after it is wrapped, with the same names."""
    model, plain = gpt("full"), gpt()
    apply_compile(model, [])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert copy.deepcopy(model).state_dict().keys() == plain.state_dict().keys()
