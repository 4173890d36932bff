"""Train the supernet recipe with small settings: placements, a resume, paths alone, and the search on given scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.training import (
    assert_same_run,
    missing_data,
    resume_on_three_processes,
    train_on_one_process,
    train_recipe,
)
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.supernet import OPERATIONS, Settings, drawn_path, evolve, operation_sizes

pytestmark = pytest.mark.skipif(missing_data("image") is not None, reason="scikit-learn is not installed")

TOY = {
    "source": "digits",
    "steps": 6,
    "epochs": "none",
    "batch": 20,  # not a multiple of 8: shares of 2 and 3 images
    "train_images": 110,
    "layers": 2,
    "width": 8,
    "population": 4,
    "generations": 2,
    "most": 1.0,
}
PATHS = ("best_path", "random_path", "worst_path", "best_accuracy", "random_accuracy", "worst_accuracy")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train and search on one process, and return the contents of result.json."""
    return train_on_one_process("supernet", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.ci
def test_two_and_three_processes_find_the_same_paths(tmp_path: Path, reference: dict[str, Any]) -> None:
    for ranks in (2, 3):
        result, screen = train_recipe("supernet", tmp_path / str(ranks), ranks, sets=TOY)
        assert_same_run(result, reference, *PATHS)
        assert "8 paths were compared." in screen
    assert reference["best_accuracy"] >= reference["random_accuracy"] >= reference["worst_accuracy"]


@pytest.mark.slow
def test_a_resume_on_another_number_of_processes_draws_the_same_paths(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    assert_same_run(resume_on_three_processes("supernet", tmp_path / "run", TOY), reference, *PATHS)


@pytest.mark.slow
def test_a_sharded_super_network_matches_one_process(tmp_path: Path, reference: dict[str, Any]) -> None:
    result = train_recipe("supernet", tmp_path / "run", 2, sets={**TOY, "parallel.shard": 2})[0]
    assert_same_run(result, reference, *PATHS)


@pytest.mark.slow
def test_a_path_alone_is_trained_from_scratch(tmp_path: Path) -> None:
    sets = {**TOY, "path": "31"}
    one = train_on_one_process("supernet", tmp_path / "one", sets=sets)
    two, screen = train_recipe("supernet", tmp_path / "two", 2, sets=sets)
    assert_same_run(two, one, "accuracy", "valid_loss")
    assert f"path 31: accuracy {one['accuracy']:.2%}" in screen


def test_the_path_of_a_step_follows_from_seed_and_number() -> None:
    settings = Settings(layers=5)
    paths = [drawn_path(settings, step) for step in range(400)]
    assert paths == [drawn_path(settings, step) for step in range(400)]
    assert paths != [drawn_path(Settings(layers=5, seed=1), step) for step in range(400)]
    for layer in range(5):
        counts = [sum(path[layer] == operation for path in paths) for operation in OPERATIONS]
        assert min(counts) > 70, "each operation is drawn equally often, 100 times of 400"


def test_the_search_finds_a_good_path_within_the_limit() -> None:
    settings = Settings(layers=6, population=16, generations=6, most=0.6)
    asked = []

    def score(path: str) -> dict[str, float]:
        asked.append(path)
        return {"accuracy": sum(a == b for a, b in zip(path, "213021", strict=True)) / 6}

    found = evolve(settings, score)
    assert list(found) == asked
    assert len(found) == 16 * 6, "no path is compared twice"
    assert max(found.values()) > max(list(found.values())[:16]), "evolution finds better ones than the random start"
    sizes = operation_sizes(settings)
    largest = sum(max(layer.values()) for layer in sizes)
    for path in found:
        assert sum(layer[operation] for layer, operation in zip(sizes, path, strict=True)) <= 0.6 * largest


def test_a_small_space_ends() -> None:
    found = evolve(Settings(layers=1, population=16, generations=3, most=1.0), lambda _: {"accuracy": 0.5})
    assert sorted(found) == sorted(OPERATIONS)


@pytest.mark.parametrize("path", ["31", "3012134", "301219"])
def test_unknown_paths_are_refused(path: str) -> None:
    with pytest.raises(SettingsError, match=rf"There is no path {path}\."):
        Settings(path=path)


def test_a_limit_that_no_path_keeps_is_refused() -> None:
    with pytest.raises(SettingsError, match="most = 0 is out of range"):
        Settings(most=0)


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"parallel\.tensor=2"):
        Settings(parallel=ParallelSettings(tensor=2))
