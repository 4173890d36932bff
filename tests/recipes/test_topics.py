"""The topics recipe at toy size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.training import same_run, train_alone, train_recipe

TOY = {"steps": 5, "batch": 43, "width": 8}  # shares of 5 and 6 texts

train = partial(train_recipe, "topics", sets=TOY)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_alone("topics", tmp_path_factory.mktemp("alone") / "run", sets=TOY)


def test_it_trains_and_says_so(tmp_path: Path, alone: dict[str, Any]) -> None:
    result, screen = train(tmp_path / "run", 2)
    assert "licence PSF" in screen
    assert f"validation: {result['accuracy']:.1%} of" in screen
    assert f"the commonest topic alone gets {result['majority']:.1%}" in screen
    same_run(result, alone, "accuracy")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_learns(tmp_path: Path) -> None:
    """The recipe as it stands, on two processes: far better than always the commonest topic."""
    result, _ = train(tmp_path / "run", 2, sets={})
    assert result["accuracy"] > 0.5
    assert result["accuracy"] > 1.8 * result["majority"]
