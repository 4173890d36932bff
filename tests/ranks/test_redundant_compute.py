"""Audits: redundant computation agrees, wrong processes are named, and bits do not change."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import training
from tests.ranks.loops import SETTINGS, attempt, loss_of, train
from unisono.config import BalanceSettings, DivergenceSettings, Settings
from unisono.environment import World
from unisono.testing import extension_of, run_ranks
from unisono.testing.faults import BitFlip, flip_
from unisono.train.diagnostics.redundant_compute import RedundantCompute
from unisono.train.run import Run
from unisono.train.step import Step

UNWATCHED = DivergenceSettings(every=0)
AUDITED = replace(SETTINGS, steps=6, audit_every=1, divergence=UNWATCHED)
"""Audits of virtual ranks 1, 2, 3, 0 and 1, from step 1 on."""

Case = tuple[Settings, str, BitFlip | None]


def train_audited(world: World, folder: Path, cases: dict[str, Case], rank: int) -> dict[str, Any]:
    """Run the cases one after the other, with the fault and the error of each case on that rank."""
    found = {}
    for name, (settings, kind, fault) in cases.items():
        wrong = kind if world.rank == rank else "sound"
        with fault if fault is not None and world.rank == rank else nullcontext():
            found[name] = attempt(world, folder / name, lambda run, wrong=wrong: train_with_error(run, wrong), settings)  # type: ignore[misc]
    return found


def train_with_error(run: Run[Any], wrong: str) -> Any:
    """Train with an error on this process; `wrong` is its kind."""
    calls = [0]

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        loss = loss_of(model, x)
        if wrong == "always" and step.number >= 2:
            loss = loss * 1.0000001
        calls[0] += step._state.place == (3, 3, 0, False)  # the third micro-batch, and not a redundant one
        if wrong == "in the step" and step._state.place == (3, 3, 0, False):
            loss = loss * 1.0000001
        step.backward(loss, weight=len(i))

    def after(step: Step, optimizer: Any) -> None:
        step.update(optimizer)
        if wrong == "weights" and step.number == 1:
            flip_(next(iter(optimizer.param_groups[0]["params"])))

    message = train(run, body, after)
    audit = extension_of(run, RedundantCompute)
    return {"result": message, "done": audit.done if audit else []}


def common_error(by_rank: list[dict[str, Any]], name: str) -> str:
    """Return the error of a case, which must be equal on all processes."""
    assert len({str(found[name]) for found in by_rank}) == 1, [found[name] for found in by_rank]
    return str(by_rank[0][name])


def test_three_processes_vote(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "once": (AUDITED, "sound", BitFlip(3, virtual_rank=3)),
        "always": (AUDITED, "always", None),
        "in the step": (AUDITED, "in the step", None),
        "weights": (AUDITED, "weights", None),
    }
    by_rank = run_ranks(train_audited, 3, tmp_path, cases, 2)
    once = common_error(by_rank, "once")
    assert "Virtual rank 3 of step 3 has different gradients on ranks 2, 0 and 1." in once
    assert "Rank 2 made another gradient than ranks 0 and 1, first of weight: " in once
    assert "(2 of 2 tensors)" in once
    assert "Rank 2 made another gradient than ranks 0 and 1, first of weight: " in common_error(by_rank, "always")
    assert "In the step itself rank 2 made other gradients of it than before" in common_error(by_rank, "in the step")
    assert "Rank 2 holds another weight than the 2 others" in common_error(by_rank, "weights")


def test_two_processes_compute_again(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "once": (AUDITED, "sound", BitFlip(3, virtual_rank=3)),
        "always": (AUDITED, "always", None),
    }
    by_rank = run_ranks(train_audited, 2, tmp_path, cases, 0)
    assert "Rank 0 made another gradient than rank 1, first of weight: " in common_error(by_rank, "once")
    assert "Ranks 1 and 0 each repeat their own result, so it is unknown which is right." in common_error(
        by_rank, "always"
    )


def test_one_process_computes_twice(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "once": (AUDITED, "sound", BitFlip(3, virtual_rank=3)),
        "sound": (AUDITED, "sound", None),
    }
    (found,) = run_ranks(train_audited, 1, tmp_path, cases, 0)
    assert "Rank 0 made another gradient each time, first of weight: " in found["once"]
    assert found["sound"]["done"] == [(1, 1, (0,)), (2, 2, (0,)), (3, 3, (0,)), (4, 0, (0,)), (5, 1, (0,))]


def train_cases(world: World, folder: Path, cases: dict[str, tuple[str, Settings]]) -> list[Any]:
    """Train with dropout, random noise in the data, several micro-batches and, for the GPT, several lengths."""

    def loop(run: Run[Any], kind: str) -> Any:
        out = training.loop(run, kind, 53, {}, None, True)
        audit = extension_of(run, RedundantCompute)
        done = len({(v, ranks) for _, v, ranks in audit.done}) if audit else 0
        return {"losses": out["losses"], "norms": out["norms"], "done": done, "sha": run.context.state.fingerprint()}

    return [
        attempt(world, folder / name, partial(loop, kind=kind), settings, verified=True)
        for name, (kind, settings) in cases.items()
    ]


@pytest.mark.parametrize("kind", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_audit_does_not_change_bits(kind: str, tmp_path: Path) -> None:
    plain = training.settings(steps=12, micro_batch=1)
    each = replace(plain, audit_every=1)
    (before,) = run_ranks(train_cases, 1, tmp_path / "plain", {"plain": (kind, plain)})[0]
    (reference,) = run_ranks(train_cases, 1, tmp_path / "alone", {"alone": (kind, each)})[0]
    assert {**reference, "done": 0} == before
    for found in run_ranks(train_cases, 3, tmp_path / "three", {"three": (kind, each)}):
        assert {**found[0], "done": 0} == before
        assert found[0]["done"] == 10, "another virtual rank each time, or others who compute it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"exchange": "wide"},
        {"exchange": "allreduce"},
        {"exchange": "ddp"},
        {"precision": "fp16"},
        {"balance": BalanceSettings(work_stealing=True)},
        {"exchange": "ring"},
    ],
    ids=str,
)
def test_audit_with_each_exchange(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = replace(training.settings(steps=12), **changes)
    cases = {"plain": ("mlp", plain), "each": ("mlp", replace(plain, audit_every=1))}
    for before, each in run_ranks(train_cases, 2, tmp_path, cases):
        assert {**each, "done": 0} == before
        assert each["done"] > 0
