"""Train the tabular recipe with small settings, and with its defaults beside scikit-learn's models."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.training import assert_same_run, resume_on_three_processes, train_on_one_process, train_recipe
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.tabular import Settings

TOY = {
    "steps": 6,
    "epochs": "none",
    "batch": 44,  # not a multiple of 8: shares of 5 and 6 rows
    "rows": 300,
    "width": 4,
    "hidden": 8,
    "compare": "false",
}

train = partial(train_recipe, "tabular", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("tabular", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.ci
def test_two_and_three_processes_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    for ranks in (2, 3):
        result, screen = train(tmp_path / str(ranks), ranks)
        assert "generated orders: 240 rows for training, 60 for validation" in screen
        assert f"validation: accuracy {result['accuracy']:.2%}" in screen
        assert_same_run(result, reference, "accuracy", "valid_loss")


@pytest.mark.slow
def test_resumed_and_sharded_runs_match_one_process(tmp_path: Path, reference: dict[str, Any]) -> None:
    assert_same_run(resume_on_three_processes("tabular", tmp_path / "run", TOY), reference, "accuracy", "valid_loss")
    sharded, _ = train(tmp_path / "sharded", 2, sets={**TOY, "parallel.shard": 2})
    assert_same_run(sharded, reference, "accuracy", "valid_loss")


@pytest.mark.ci
def test_a_file_with_numbers_only(tmp_path: Path) -> None:
    rows = [f"{i % 10},{i % 7},{'yes' if i % 10 > 4 else 'no'}" for i in range(200)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,big", *rows]), encoding="utf-8")
    sets = {**TOY, "steps": 60, "lr": 0.02, "data": tmp_path / "table.csv"}
    assert train(tmp_path / "run", 1, sets=sets)[0]["accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_embeddings_are_better_than_the_models_of_scikit_learn(tmp_path: Path) -> None:
    result, _ = train(tmp_path / "run", 2, sets={})
    assert result["the best possible model accuracy"] > result["accuracy"]
    assert result["accuracy"] > result["gradient boosting accuracy"] + 0.02
    assert result["accuracy"] > result["logistic regression accuracy"] + 0.05


def test_unsupported_parallelism_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"does not support parallel\.pipeline=2"):
        Settings(parallel=ParallelSettings(pipeline=2))
