"""Distillation with context parallelism: two passes a step have the losses and gradients of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.loops import attempt
from tests.ranks.test_context_parallel import whole_gradient
from tests.ranks.training import settings
from unisono import SequenceDims, distill
from unisono.config import ParallelSettings
from unisono.recipes import text
from unisono.recipes.datasets.python_source import IGNORED, ByteWindows
from unisono.recipes.text import GPT, Model, loss_sum
from unisono.testing import run_ranks
from unisono.train.run import Run

SHARE = 0.1


class PositionDropout(nn.Module):
    """Dropout with a mask from a table of positions, so all slices together drop what one process drops."""

    mask: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(model.context, model.width) > SHARE) / (1 - SHARE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask[: x.shape[1]] if self.training else x


def build(model: Model, *, dropout: bool) -> GPT:
    """Build a model of the text recipe."""
    gpt = GPT(model)
    for block in gpt.blocks if dropout else []:
        block.dropout = PositionDropout(model)
    return gpt


def distill_in_passes(run: Run[Any], length: int, dropout: bool) -> list[dict[str, Any]]:
    """Train one model alone and one with a teacher, as the distill recipe does; return the values of each pass."""
    large = Model(width=16, depth=2, heads=2, context=length)
    small = replace(large, depth=1)

    def place(model: Model, *, frozen: bool = False) -> nn.Module:
        made = partial(build, model, dropout=dropout)
        rows = {name: 0 for name, _ in made().named_buffers()}
        build_it = (lambda: made().requires_grad_(requires_grad=False).eval()) if frozen else made
        return run.place(build_it, sequence=SequenceDims(positions=rows))

    teacher, student, alone = place(large, frozen=True), place(small), place(small)
    of_student, of_alone = (torch.optim.SGD(model.parameters(), lr=0.5) for model in (student, alone))
    run.track(teacher=teacher, student=student, alone=alone, of_student=of_student, of_alone=of_alone)

    def distilled_loss(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            expected = teacher(tokens)
        soft = distill.soft_target_loss(output, expected, temperature=2.0, mask=targets != IGNORED)
        hard, weight = loss_sum(output, tokens, targets)
        return 0.9 * soft + 0.1 * hard, weight

    source = Path(text.__file__).read_bytes()[: 24 * length + length // 3]  # the last window is padded
    passes: list[dict[str, Any]] = []
    for step in run.steps(ByteWindows(source, length)):
        for model, loss_fn, optimizer in ((alone, loss_sum, of_alone), (student, distilled_loss, of_student)):
            step.run(model, loss_fn, over=[optimizer])
            gradient = {name: whole_gradient(p) for name, p in model.named_parameters()}
            passes.append({"loss": step.loss, "weight": step.weight, "norm": step.grad_norm, "gradient": gradient})
            step.update(optimizer)
    return passes


@pytest.mark.parametrize(
    ("length", "dropout"), [(24, False), (23, False), (23, True)], ids=["even", "odd", "odd, with dropout"]
)
def test_losses_and_gradients_of_each_pass(tmp_path: Path, length: int, dropout: bool) -> None:
    """Compare one epoch of 25 windows in batches of 10: the last batch has 5, and one window has ignored targets.

    SGD, and gradients before the update: Adam's first step would hide a gradient of another scale.
    """
    config, loop = settings(steps=3, batch=10), partial(distill_in_passes, length=length, dropout=dropout)
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", loop, config)
    runs = run_ranks(attempt, 2, tmp_path / "2", loop, replace(config, parallel=ParallelSettings(context=2)))
    assert isinstance(truth, list), truth
    assert sum(found["weight"] for found in truth) == 2 * (24 * length + length // 3)
    for run in runs:
        assert isinstance(run, list), run
        for found, expected in zip(run, truth, strict=True):
            assert found["weight"] == expected["weight"]
            assert found["loss"] == pytest.approx(expected["loss"], rel=2e-6)
            assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
            for name, gradient in expected["gradient"].items():
                near, true = torch.tensor(found["gradient"][name]), torch.tensor(gradient)
                assert float((near - true).norm() / true.norm()) < 1e-5, name
