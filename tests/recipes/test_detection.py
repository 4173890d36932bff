"""Train the detection recipe with small settings, on data that is damaged, and with its defaults."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import damaged_files, need_pillow
from tests.ranks.loops import assert_same_results, attempt, results_on_sizes
from tests.recipes.training import (
    assert_same_run,
    resume_on_three_processes,
    run_recipe,
    train_on_one_process,
    train_recipe,
)
from unisono.config import LoaderSettings, ParallelSettings
from unisono.environment import World
from unisono.errors import SettingsError
from unisono.recipes.detection import Settings, main
from unisono.recipes.vision.drawn_shapes import write_scenes
from unisono.testing import run_result
from unisono.train.run import Run

SMALL = Settings(batch=22, epochs=2, size=48, width=4)  # 55 pictures: 22, 22 and 11, so shares of 1 to 3
TOY = {"batch": 22, "epochs": 2, "size": 48, "width": 4, "checkpoint.every": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 55 pictures for training and 12 for validation."""
    need_pillow()
    write_scenes(tmp_path_factory.mktemp("scenes") / "data", 55, 12)
    return tmp_path_factory.getbasetemp() / "scenes0" / "data"


def with_damage(folder: Path, out: Path) -> Path:
    """Copy a data set by links, with files in it that are no pictures."""
    damaged = list(damaged_files().values())
    for part in ("train", "val"):
        (out / part).mkdir(parents=True)
        (out / f"{part}.json").symlink_to(folder / f"{part}.json")
        for number, path in enumerate(sorted((folder / part).iterdir())):
            if part == "train" and number % 11 == 5:
                (out / part / path.name).write_bytes(damaged[number % len(damaged)])
            else:
                (out / part / path.name).symlink_to(path)
    return out


def metrics(run: Run[Any]) -> list[Any]:
    """Train, and return what must be equal."""
    main(run)
    result = run_result(run)
    return [result[name] for name in ("weights_sha256", "loss", "promise", "map50")]


def train_cases(world: World, out: str, cases: dict[str, Settings]) -> dict[str, Any]:
    """Train with each of these settings."""
    return {name: attempt(world, Path(out) / name, metrics, settings) for name, settings in cases.items()}


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_weights_do_not_depend_on_processes_and_workers(tmp_path: Path, folder: Path) -> None:
    plain = replace(SMALL, data=folder)
    cases = {
        "plain": plain,
        "workers": replace(plain, loader=LoaderSettings(workers=2)),
        "damaged": replace(
            plain, data=with_damage(folder, tmp_path / "damaged"), loader=LoaderSettings(on_error="skip")
        ),
    }
    runs = results_on_sizes(train_cases, tmp_path / "runs", cases)
    for name in cases:
        assert_same_results(runs, name)
        assert runs[0][name][2] == "exact"
    assert runs[0]["plain"] == runs[0]["workers"] != runs[0]["damaged"]


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_wrong_data_ends_the_command_with_what_to_type(tmp_path: Path, folder: Path) -> None:
    wrong = with_damage(folder, tmp_path / "wrong")
    done = run_recipe("detection", tmp_path / "damaged", 2, sets={**TOY, "data": wrong})
    assert done.returncode == 1
    assert f"Cannot read the picture {wrong}/train/" in done.stdout + done.stderr
    assert "--set loader.on_error=skip" in done.stdout + done.stderr
    content = json.loads((folder / "train.json").read_text())
    content["annotations"][3]["category_id"] = 9
    (wrong / "train.json").unlink()
    (wrong / "train.json").write_text(json.dumps(content))
    done = run_recipe("detection", tmp_path / "label", 2, sets={**TOY, "data": wrong})
    assert done.returncode == 1
    assert f"Annotation 3 of {wrong}/train.json is wrong." in done.stdout + done.stderr
    assert "Its category_id is 9, and the categories are 1, 2, 3, 4, 5." in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_print_metrics_and_match_one(tmp_path: Path, folder: Path) -> None:
    sets = {**TOY, "data": folder}
    one = train_on_one_process("detection", tmp_path / "one", sets=sets)
    two, screen = train_recipe("detection", tmp_path / "two", 2, sets={**sets, "loader.workers": 1})
    assert "55 pictures with " in screen
    assert f"validation: mAP@0.5 {two['map50']:.2%} on 12 held-out pictures" in screen
    assert_same_run(two, one, "map50")
    assert resume_on_three_processes("detection", tmp_path / "on", sets)["weights_sha256"] == one["weights_sha256"]
    out = tmp_path / "rows.jsonl"
    words = ["predict", str(tmp_path / "two"), str(folder / "val"), str(out)]
    subprocess.run([sys.executable, "-m", "unisono.cli.main", *words], check=True, timeout=100)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["file"] for row in rows] == [str(path) for path in sorted((folder / "val").iterdir())]
    assert rows[0]["objects"][0].keys() == {"class", "score", "box"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_precision_of_the_defaults(tmp_path: Path) -> None:
    need_pillow()
    assert train_recipe("detection", tmp_path / "run", 2, sets={}, timeout=800)[0]["map50"] >= 0.9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 100}, "16 x 16 pixels.*--set size=96"),
        ({"parallel": ParallelSettings(context=2)}, "parallel.context=1 --set parallel.shard=2"),
    ],
)
def test_what_the_model_does_not_support_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(**changes)
