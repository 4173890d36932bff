"""The audit: what is computed in two places is the same, whoever computes wrongly is named, and no bit knows of it."""

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
"""Virtual ranks 0 to 3, one after the other, from step 1 on: 1, 2, 3, 0, 1."""

Case = tuple[Settings, str, BitFlip | None]


def audited(world: World, folder: Path, cases: dict[str, Case], rank: int) -> dict[str, Any]:
    """What comes of these, one after the other; with the fault, and what the kind says, on that rank."""
    found = {}
    for name, (settings, kind, fault) in cases.items():
        wrong = kind if world.rank == rank else "sound"
        with fault if fault is not None and world.rank == rank else nullcontext():
            found[name] = attempt(world, folder / name, lambda run, wrong=wrong: told(run, wrong), settings)  # type: ignore[misc]
    return found


def told(run: Run[Any], wrong: str) -> Any:
    """`wrong`: what this process does."""
    calls = [0]

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        loss = loss_of(model, x)
        if wrong == "always" and step.number >= 2:
            loss = loss * 1.0000001
        calls[0] += step._state.place == (3, 3, 0, False)  # the third one, and no spare one
        if wrong == "in the step" and step._state.place == (3, 3, 0, False):
            loss = loss * 1.0000001
        step.backward(loss, weight=len(i))

    def after(step: Step, optimizer: Any) -> None:
        step.update(optimizer)
        if wrong == "weights" and step.number == 1:
            flip_(next(iter(optimizer.param_groups[0]["params"])))

    said = train(run, body, after)
    audit = extension_of(run, RedundantCompute)
    return {"told": said, "done": audit.done if audit else []}


def one_of(everybody: list[dict[str, Any]], name: str) -> str:
    """The error, which is the same on every process."""
    assert len({str(found[name]) for found in everybody}) == 1, [found[name] for found in everybody]
    return str(everybody[0][name])


def test_three_processes_vote(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "once": (AUDITED, "sound", BitFlip(3, virtual_rank=3)),
        "always": (AUDITED, "always", None),
        "in the step": (AUDITED, "in the step", None),
        "weights": (AUDITED, "weights", None),
    }
    everybody = run_ranks(audited, 3, tmp_path, cases, 2)
    once = one_of(everybody, "once")
    assert "Step 3's virtual rank 3 was computed on ranks 2, 0 and 1, and compared." in once
    assert "Rank 2 made another gradient than ranks 0 and 1, first of weight: " in once
    assert "(2 of 2 tensors)" in once
    assert "Rank 2 made another gradient than ranks 0 and 1, first of weight: " in one_of(everybody, "always")
    assert "In the step itself rank 2 made other gradients of it than before" in one_of(everybody, "in the step")
    assert "Rank 2 holds another weight than the 2 others" in one_of(everybody, "weights")


def test_two_processes_do_it_again(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "once": (AUDITED, "sound", BitFlip(3, virtual_rank=3)),
        "always": (AUDITED, "always", None),
    }
    everybody = run_ranks(audited, 2, tmp_path, cases, 0)
    assert "Rank 0 made another gradient than rank 1, first of weight: " in one_of(everybody, "once")
    assert "Ranks 1 and 0 made the same again, each its own: nobody knows which is right." in one_of(
        everybody, "always"
    )


def test_one_process_does_it_twice(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "once": (AUDITED, "sound", BitFlip(3, virtual_rank=3)),
        "sound": (AUDITED, "sound", None),
    }
    (found,) = run_ranks(audited, 1, tmp_path, cases, 0)
    assert "Rank 0 made another gradient each time, first of weight: " in found["once"]
    assert found["sound"]["done"] == [(1, 1, (0,)), (2, 2, (0,)), (3, 3, (0,)), (4, 0, (0,)), (5, 1, (0,))]


def trained(world: World, folder: Path, cases: dict[str, tuple[str, Settings]]) -> list[Any]:
    """Whole trainings, with dropout, noise in fetching, several micro-batches and, of a GPT, several lengths."""

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
def test_an_audit_changes_no_bit(kind: str, tmp_path: Path) -> None:
    plain = training.settings(steps=12, micro_batch=1)
    each = replace(plain, audit_every=1)
    (before,) = run_ranks(trained, 1, tmp_path / "plain", {"plain": (kind, plain)})[0]
    (alone,) = run_ranks(trained, 1, tmp_path / "alone", {"alone": (kind, each)})[0]
    assert {**alone, "done": 0} == before
    for found in run_ranks(trained, 3, tmp_path / "three", {"three": (kind, each)}):
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
def test_it_goes_with_every_exchange_of_replicas(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = replace(training.settings(steps=12), **changes)
    cases = {"plain": ("mlp", plain), "each": ("mlp", replace(plain, audit_every=1))}
    for before, each in run_ranks(trained, 2, tmp_path, cases):
        assert {**each, "done": 0} == before
        assert each["done"] > 0
