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


def test_it_is_short_and_has_the_protocol() -> None:
    assert len(BLOCK.code.splitlines()) < 40
    assert isinstance(divided_embeddings(), ParallelPlan)


class WordPairs(torch.utils.data.Dataset):
    """Pairs of four words, and the class of their sum, out of two."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        words = torch.arange(4) * (i + 3) % 11
        return words, int(words.sum()) % 2


class Net(nn.Module):
    """A table of 11 rows, which are not evenly divisible."""

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
    for step in run.steps(WordPairs()):
        step.run(model, score)
        norms.append(step.grad_norm)
        step.update(optimizer)
        losses.append(step.loss)
    losses += run.evaluate(model, WordPairs(), score).values()
    return losses, run.context.state.fingerprint(), norms, len(to_local(model.words.weight)), run_promise(run)


CONFIG = settings(batch=12, virtual_ranks=4, steps=5)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (found,) = run_ranks(attempt, 1, tmp_path_factory.mktemp("alone"), words, CONFIG)
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (3, 3), (4, 2)])
def test_it_has_the_bits_of_one_process(tmp_path: Path, single: Any, size: int, tensor: int) -> None:
    """The weights are equal to the bit, because rows are only added to zeros; the norm is a sum of parts."""
    config = replace(CONFIG, parallel=ParallelSettings(tensor=tensor))
    found = run_ranks(attempt, size, tmp_path, words, config)
    for rank, here in enumerate(found):
        assert not isinstance(here, str), here
        assert here[:2] == single[:2]
        assert here[2] == pytest.approx(single[2], rel=1e-6)
        rows = -(-11 // tensor)
        assert here[3] == min(rows, 11 - rank % tensor * rows)
        assert here[4][0] == "exact"
        assert "looked up on the process that holds it" in here[4][1]


def place_without_promise(run: Run[Any]) -> Any:
    return words(run, plan=WithoutPromise)


class WithoutPromise:
    """A plan without a promise."""

    def apply(self, model: nn.Module, mesh: Any) -> None: ...


def test_an_incomplete_plan_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(tensor=2))
    for found in run_ranks(attempt, 2, tmp_path, place_without_promise, config):
        assert "cannot use: a WithoutPromise" in found, found
        assert "lacks promise and reason" in found
