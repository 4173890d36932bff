"""The text recipe at toy size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.training import same_run, stopped_and_resumed, train_alone, train_recipe
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
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_alone("text", tmp_path_factory.mktemp("alone") / "run", sets=TOY)


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        (Model(width=100), ParallelSettings(), "Rotary positions .* 25.*width=96"),
        (Model(heads=0), ParallelSettings(), "Rotary positions"),
        (Model(), ParallelSettings(tensor=3), "4 is no multiple of 3.*tensor=2"),
        (Model(heads=2), ParallelSettings(context=4), "2 is no multiple of 4.*context=2"),
        (Model(depth=1), ParallelSettings(pipeline=5), "a row of 4 layers.*pipeline=4, or: --set model.depth=2"),
    ],
)
def test_a_model_that_does_not_go_with_its_placement_is_not_made(
    model: Model, parallel: ParallelSettings, words: str
) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(model=model, parallel=parallel)


def test_it_trains_and_says_so(tmp_path: Path, alone: dict[str, Any]) -> None:
    result, screen = train(tmp_path / "run", 2)
    assert "licence PSF" in screen
    assert f"validation: {result['bits_per_byte']:.3f} bits per byte, on 3,000 bytes" in screen
    assert "It writes:" in screen
    same_run(result, alone, "bits_per_byte")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more"), [(3, {}), (5, {"loader.workers": 2}), (8, {})])
def test_the_same_bits(tmp_path: Path, alone: dict[str, Any], ranks: int, more: dict[str, Any]) -> None:
    result, _ = train(tmp_path / "run", ranks, sets={**TOY, **more})
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["bits_per_byte"] == alone["bits_per_byte"]


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path: Path, alone: dict[str, Any]) -> None:
    resumed = stopped_and_resumed("text", tmp_path / "run", TOY)
    assert resumed["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_learns(tmp_path: Path) -> None:
    """The recipe as it stands, on two processes: far better than 4 bits a byte."""
    assert train(tmp_path / "run", 2, sets={})[0]["bits_per_byte"] < 2.8
