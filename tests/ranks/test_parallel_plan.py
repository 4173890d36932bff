"""The parallel layout that docs/guide/parallel/tensor.md shows, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.house.test_documentation import DOCS, blocks_of
from tests.ranks.loops import attempt
from tests.ranks.training import settings
from unisono import ParallelPlan
from unisono.config import ParallelSettings
from unisono.distributed.process_group import to_local
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run

PAGE = DOCS / "guide" / "parallel" / "tensor.md"
(BLOCK,) = [block for block in blocks_of(PAGE) if "class DividedEmbeddings" in block.code]


def divided_embeddings() -> ParallelPlan:
    """Return the layout as the page defines it."""
    names: dict[str, Any] = {}
    exec(compile(BLOCK.code, BLOCK.name, "exec"), names)
    placement: ParallelPlan = names["DividedEmbeddings"]()
    return placement


def test_it_is_short_and_keeps_the_protocol() -> None:
    assert len(BLOCK.code.splitlines()) < 40
    assert isinstance(divided_embeddings(), ParallelPlan)


class Words(torch.utils.data.Dataset):
    """Four words, and which of two kinds their sum is."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        words = torch.arange(4) * (i + 3) % 11
        return words, int(words.sum()) % 2


class Net(nn.Module):
    """A table of 11 rows, which do not come out even."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.dropout(self.words(x).flatten(1)))
        return found


def score(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, y, reduction="sum"), len(y)


def words(run: Run[Any], plan: Callable[[], Any] = divided_embeddings) -> Any:
    model = run.place(Net, plan=plan())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    norms, losses = [], []
    for step in run.steps(Words()):
        step.run(model, score)
        norms.append(step.grad_norm)
        step.update(optimizer)
        losses.append(step.loss)
    losses += run.evaluate(model, Words(), score).values()
    return losses, run.context.state.fingerprint(), norms, len(to_local(model.words.weight)), run_promise(run)


CONFIG = settings(batch=12, virtual_ranks=4, steps=5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (told,) = run_ranks(attempt, 1, tmp_path_factory.mktemp("alone"), words, CONFIG)
    assert not isinstance(told, str), told
    return told


@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (3, 3), (4, 2)])
def test_it_is_the_model_of_one_process(tmp_path: Path, alone: Any, size: int, tensor: int) -> None:
    """To the bit, since rows are only added to zeros. The norm is made in parts."""
    config = replace(CONFIG, parallel=ParallelSettings(tensor=tensor))
    told = run_ranks(attempt, size, tmp_path, words, config)
    for rank, here in enumerate(told):
        assert not isinstance(here, str), here
        assert here[:2] == alone[:2]
        assert here[2] == pytest.approx(alone[2], rel=1e-6)
        rows = -(-11 // tensor)
        assert here[3] == min(rows, 11 - rank % tensor * rows)
        assert here[4][0] == "exact"
        assert "looked up on the process that holds it" in here[4][1]


def half(run: Run[Any]) -> Any:
    return words(run, plan=Half)


class Half:
    """A placement that does not say what it promises."""

    def apply(self, model: nn.Module, mesh: Any) -> None: ...


def test_what_it_lacks_is_told(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(tensor=2))
    for told in run_ranks(attempt, 2, tmp_path, half, config):
        assert "as its plan, a Half" in told, told
        assert "lacks promise and reason" in told
