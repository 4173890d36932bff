"""Train each recipe, in each precision, on 1 to 4 processes, and compare the bits of the weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.loops import attempt
from tests.recipes.training import skip_without_data
from unisono.config import LoaderSettings, Settings
from unisono.environment import World
from unisono.recipes import image, speech, text, topics
from unisono.recipes.datasets import docstrings
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run

CASES: dict[str, dict[str, Any]] = {
    "fp32 with a loader worker": {"loader": LoaderSettings(workers=1)},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}
LONG = ("image", "speech")

SETTINGS: dict[str, Settings] = {
    "text": text.Settings(
        steps=4,
        batch=10,
        validate_bytes=2000,
        sample_bytes=0,
        model=text.Model(width=16, depth=1, heads=2, context=24, dropout=0.1),
    ),
    "image": image.Settings(
        source="digits",
        steps=4,
        epochs=None,
        batch=24,
        train_images=88,  # the fourth batch has 16: shares of 2
        valid_images=30,
        model=image.Model(width=4, stages=2),
    ),
    "speech": speech.Settings(
        steps=4,
        epochs=None,
        batch=10,
        voices=3,
        draws=1,
        source="spoken",
        model=speech.Model(mels=12, width=8, depth=2),
    ),
    "topics": topics.Settings(steps=4, epochs=None, batch=43, width=8),
}


def run_main(run: Run[Any], main: Callable[[Run[Any]], None]) -> dict[str, Any]:
    """Run a recipe, and return its metrics and the hash of its weights."""
    main(run)
    result = run_result(run)
    return {name: result.get(name) for name in ("weights_sha256", "loss", "skipped", "accuracy", "bits_per_byte")}


def train(world: World, folder: str, recipe: str) -> dict[str, Any]:
    """Train a recipe in each case."""
    main = importlib.import_module(f"unisono.recipes.{recipe}").main
    for name in docstrings.TOPICS.keys() - {"imports", "mail", "tests"}:  # reading all topics takes two seconds
        del docstrings.TOPICS[name]
    topics.load_docstrings = cache(docstrings.load_docstrings)
    return {
        case: attempt(world, Path(folder) / case, partial(run_main, main=main), replace(SETTINGS[recipe], **changes))
        for case, changes in CASES.items()
    }


@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((1, 2, 3, 4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("recipe", [pytest.param(r, marks=[pytest.mark.slow] * (r in LONG)) for r in SETTINGS])
def test_weights_do_not_depend_on_the_number_of_processes(tmp_path: Path, recipe: str, sizes: tuple[int, ...]) -> None:
    """The tests of each recipe compare two processes with one."""
    skip_without_data(recipe)
    runs = [result for n in sizes for result in run_ranks(train, n, str(tmp_path / str(n)), recipe)]
    for case in CASES:
        assert isinstance(runs[0][case], dict), runs[0][case]
        assert [result[case] for result in runs] == [runs[0][case]] * len(runs), case
    assert len({runs[0][case]["weights_sha256"] for case in CASES}) == len(CASES)
