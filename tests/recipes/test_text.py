"""Train the text recipe with small settings, and with its defaults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.training import assert_same_run, resume_on_three_processes, train_on_one_process, train_recipe
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.text import Model, Settings

TOY = {
    "steps": 6,
    "batch": 10,  # not a multiple of 8: shares of 1 and 2 windows
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.context": 24,
    "model.dropout": 0.1,
    "validate_bytes": 3000,  # not a multiple of the context: a short last window
    "sample_bytes": 20,
}

train = partial(train_recipe, "text", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("text", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        (Model(width=100), ParallelSettings(), "Rotary embeddings .* 25.*width=96"),
        (Model(heads=0), ParallelSettings(), "Rotary embeddings"),
        (Model(), ParallelSettings(tensor=3), "4 is not a multiple of 3.*tensor=2"),
        (Model(heads=2), ParallelSettings(context=4), "2 is not a multiple of 4.*context=2"),
        (Model(depth=1), ParallelSettings(pipeline=5), "only 4 layers.*pipeline=4, or: --set model.depth=2"),
    ],
)
def test_invalid_model_or_parallelism_is_refused(model: Model, parallel: ParallelSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(model=model, parallel=parallel)


@pytest.mark.ci
def test_two_processes_print_metrics_and_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    result, screen = train(tmp_path / "run", 2)
    assert "license PSF" in screen
    assert f"validation: {result['bits_per_byte']:.3f} bits per byte on 3,000 held-out bytes" in screen
    assert "Generated text:" in screen
    assert_same_run(result, reference, "bits_per_byte")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more"), [(3, {}), (5, {"loader.workers": 2}), (8, {})])
def test_more_processes_match_one(tmp_path: Path, reference: dict[str, Any], ranks: int, more: dict[str, Any]) -> None:
    result, _ = train(tmp_path / "run", ranks, sets={**TOY, **more})
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert result["bits_per_byte"] == reference["bits_per_byte"]


@pytest.mark.slow
def test_resumed_run_matches_an_uninterrupted_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    resumed = resume_on_three_processes("text", tmp_path / "run", TOY)
    assert resumed["weights_sha256"] == reference["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bits_per_byte_of_the_defaults(tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2, sets={})[0]["bits_per_byte"] < 2.8
