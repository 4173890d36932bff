"""Train the topics recipe with small settings, and with its defaults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.training import assert_same_run, train_on_one_process, train_recipe

TOY = {"steps": 5, "batch": 43, "width": 8}  # shares of 5 and 6 texts

train = partial(train_recipe, "topics", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("topics", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.slow
def test_two_processes_print_metrics_and_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    result, screen = train(tmp_path / "run", 2)
    assert "license PSF" in screen
    assert f"validation: accuracy {result['accuracy']:.1%} on" in screen
    assert f"the most common topic: {result['majority']:.1%}" in screen
    assert_same_run(result, reference, "accuracy")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_accuracy_of_the_defaults(tmp_path: Path) -> None:
    """The accuracy must be far above that of the most common topic."""
    result, _ = train(tmp_path / "run", 2, sets={})
    assert result["accuracy"] > 0.5
    assert result["accuracy"] > 1.8 * result["majority"]
