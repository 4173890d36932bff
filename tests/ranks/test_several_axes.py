"""tensor=2 with pipeline=2: one layout for any number of replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.agreement import GPT, LENGTH, Sentences, TrainResult, assert_agree, train_gpt
from tests.ranks.loops import attempt
from unisono.config import ParallelSettings, Settings
from unisono.testing import run_ranks
from unisono.train.run import Run

INSIDE = 4
"""Processes of the layout: two halves of every matrix, times two stretches of the layers."""

CONFIG = Settings(steps=3, batch=28, virtual_ranks=12, micro_batch=2, clip=0.5)
"""Over 60 sequences: the third step has four of them, so eight virtual ranks are empty."""


def beside(replicas: int, folder: Path, length: int = LENGTH, **ways: Any) -> TrainResult:
    """Return the result of this number of replicas of the layout, which is equal on all their processes."""
    parallel = ParallelSettings(tensor=2, pipeline=2, **ways)
    config = replace(CONFIG, parallel=parallel)
    everybody = run_ranks(
        train_gpt, INSIDE * replicas, str(folder / str(replicas)), config, GPT, None, False, length, seconds=120.0
    )
    first = everybody[0]
    for came in everybody:
        assert (came.losses, came.norms, came.fingerprint) == (first.losses, first.norms, first.fingerprint)
    gradients = {name: grad for came in everybody for name, grad in came.gradients.items()}
    weights = {name: weight for came in everybody for name, weight in came.weights.items()}
    return first._replace(gradients=gradients, weights=weights)


def bits(came: TrainResult) -> Any:
    return came.losses, came.norms, came.fingerprint


@pytest.mark.slow
def test_two_replicas_have_the_bits_of_one_and_agree_with_one_process(tmp_path: Path) -> None:
    one = beside(1, tmp_path)
    assert bits(beside(2, tmp_path)) == bits(one)
    (truth,) = run_ranks(train_gpt, 1, str(tmp_path / "alone"), CONFIG)
    assert_agree(one, truth)
    assert one.promise[0] == "exact"
    assert "other layouts than tensor=2 agree to rounding" in one.promise[1]


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param({"loss_parallel": True}, id="loss", marks=pytest.mark.slow),
        pytest.param(
            {"schedule": "ZBVZeroBubble", "activation_checkpoint": "full"}, id="ZBVZeroBubble", marks=pytest.mark.slow
        ),
    ],
)
def test_divided_sequences_and_logits_in_a_pipeline(tmp_path: Path, ways: dict[str, Any]) -> None:
    """Sequences of 11 positions: 6 on the first process, 5 on the second."""
    (truth,) = run_ranks(train_gpt, 1, str(tmp_path / "alone"), CONFIG, GPT, None, False, 11)
    assert_agree(beside(1, tmp_path, length=11, sequence_parallel=True, **ways), truth)


def forward(run: Run[Any]) -> Any:
    """Return a prediction, and a forward pass of the loop's own."""
    model = run.place(GPT)
    with torch.no_grad():
        alone = model(Sentences(5).rows[:, :-1])
    return run.predict(model, Sentences(5)).flatten().tolist() + alone.flatten().tolist()


def test_outputs_are_whole(tmp_path: Path) -> None:
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", forward, CONFIG)
    assert isinstance(truth, list), truth
    config = replace(
        CONFIG, parallel=ParallelSettings(tensor=2, pipeline=2, sequence_parallel=True, loss_parallel=True)
    )
    for rows in run_ranks(attempt, 4, tmp_path / "4", forward, config):
        assert rows == pytest.approx(truth, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_the_number_of_replicas_changes_no_bit(tmp_path: Path, schedule: Any) -> None:
    """1 to 4 replicas, on 4 to 16 processes."""
    (one, *others) = [bits(beside(replicas, tmp_path, schedule=schedule)) for replicas in (1, 2, 3, 4)]
    assert others == [one] * 3
