"""Parameters in bfloat16 while layers compute (parallel.param_dtype): one process and any division have the same bits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import training
from tests.ranks.loops import Numbers, attempt, train
from tests.ranks.training import padded, settings
from unisono.settings import ParallelSettings
from unisono.testing import run_ranks
from unisono.train.run import Run

Low = partial(ParallelSettings, param_dtype="bf16")

PLACEMENTS = {
    "two models": (2, Low()),
    "two shards": (2, Low(shard=2)),
    "three shards": (3, Low(shard=3)),
    "four shards": (4, Low(shard=4)),
    "two models of two shards": (4, Low(shard=2)),
    "three shards, gathered once a step": (3, Low(shard=3, gather="step")),
    "two models of two shards, gathered once a step": (4, Low(shard=2, gather="step")),
    "two shards in the CPU's memory": (2, Low(shard=2, offload=True)),
    "two shards in the CPU's memory, gathered once a step": (2, Low(shard=2, offload=True, gather="step")),
}

CASES: dict[str, dict[str, Any]] = {
    "mlp, clipped": {"clip": 0.2},
    "gpt": {},
    "gpt, several micro-batches": {"batch": 24, "virtual_ranks": 4, "micro_batch": 2},
    "gpt, under autocast": {"precision": "bf16"},
}

short = partial(training.train, length=53)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        case: run_ranks(short, 1, case.split(",")[0], settings(parallel=Low(), **changes), str(folder / case))[0]
        for case, changes in CASES.items()
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_division_gives_the_bits_of_one_process(
    tmp_path: Path, alone: dict[str, dict[str, Any]], case: str, placement: str
) -> None:
    size, parallel = PLACEMENTS[placement]
    first = alone[case]
    for run in run_ranks(short, size, case.split(",")[0], settings(**CASES[case], parallel=parallel), str(tmp_path)):
        assert run["state"] == first["state"]
        assert run["losses"] == first["losses"]
        assert run["norms"] == first["norms"]
        assert run["result"]["right"] == first["result"]["right"]
        assert run["result"]["promise"] == "exact"


class Rows(nn.Module):
    """A row of layers with one called within another, a weight that layers share, and dropout."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(23, 16)
        self.rows = nn.ModuleList(Layer(dropout) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.tokens.weight
        self.rows[2].up.weight = self.rows[1].up.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for row in self.rows:
            x = row(x, scale=torch.ones(16))
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, 4)).permute(3, 0, 2, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) * scale
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Plain(Rows):
    """No weight is in two layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.rows[2].up = nn.Linear(16, 32)


def next_token(output: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    assert output.dtype == torch.float32
    loss = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return loss, (targets != -100).sum()


def rows(run: Run[Any], build: Any = Rows, **place: Any) -> Any:
    """Losses, gradients' kinds and norms, what is evaluated and predicted, and the weights."""
    model = run.place(build, **place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    told: list[Any] = []
    for step in run.steps(training.Sentences(24), collate_fn=padded):
        step.run(model, next_token)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        told.append(step.grad_norm)
        step.update(optimizer, clip=1.0)
        told.append(step.loss)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    told.append(run.evaluate(model, training.Sentences(7), next_token, collate_fn=padded))
    told.append(run.predict(model, [torch.arange(i, i + 5) for i in range(5)]).sum().item())
    return [*told, run._state.fingerprint()]


plain = partial(rows, build=Plain)

CONFIG = settings(steps=3, batch=12, virtual_ranks=6)
TWO_DEVICES = {"split": 2, "devices": ["cpu", "cpu"]}


@pytest.mark.parametrize("recompute", ["none", "layer", "selective"])
@pytest.mark.parametrize("others", [{"shard": 2}, {"shard": 2, "gather": "step"}, {}])
def test_layers_that_are_computed_again(tmp_path: Path, recompute: Any, others: Any) -> None:
    """The bits of keeping everything on one process."""
    (told,) = run_ranks(attempt, 1, tmp_path / "1", rows, replace(CONFIG, parallel=Low()))
    assert isinstance(told, list), told
    config = replace(CONFIG, parallel=Low(recompute=recompute, **others))
    assert run_ranks(attempt, others.get("shard", 1), tmp_path / "n", rows, config) == [told] * others.get("shard", 1)


def test_layers_over_two_devices_of_one_process(tmp_path: Path) -> None:
    (told,) = run_ranks(attempt, 1, tmp_path / "1", plain, replace(CONFIG, parallel=Low()))
    assert isinstance(told, list), told
    assert run_ranks(attempt, 1, tmp_path / "2", plain, replace(CONFIG, parallel=Low(**TWO_DEVICES))) == [told]


@pytest.mark.parametrize(
    "other", [{"context": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2, "recompute": "layer"}]
)
def test_beside_an_axis_that_divides_what_is_computed(tmp_path: Path, other: Any) -> None:
    """Along the axes of data no bit changes; another size of this axis agrees to bfloat16's rounding."""
    (one,) = run_ranks(attempt, 1, tmp_path / "1", plain, replace(CONFIG, parallel=Low()))
    two = run_ranks(attempt, 2, tmp_path / "2", plain, replace(CONFIG, parallel=Low(**other)))
    assert isinstance(two[0], list), two[0]
    assert two == [two[0]] * 2
    assert two[0][1] == pytest.approx(one[1], rel=1e-2)
    for shards in ({}, {"shard": 2}, {"shard": 2, "gather": "step"}):
        config = replace(CONFIG, parallel=Low(**other, **shards))
        assert run_ranks(attempt, 4, tmp_path / str(shards), plain, config) == [two[0]] * 4
