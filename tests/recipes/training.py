"""A recipe as a user types it: real processes, the command, a run directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import start
from tests.house.sources import ROOT
from unisono.cli.request.target import recipes
from unisono.recipes.datasets import espeak


def run_recipe(
    recipe: str, folder: Path, ranks: int, *words: str, sets: Mapping[str, Any]
) -> subprocess.CompletedProcess[str]:
    """The command, when it is over."""
    command = [sys.executable, "-m", "unisono.cli.main", "run", recipe]
    command += ["--ranks", str(ranks), "--run-dir", str(folder)]
    command += [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=280)


def train_recipe(
    recipe: str, folder: Path, ranks: int, *words: str, sets: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """What result.json says, and what is on the screen."""
    done = run_recipe(recipe, folder, ranks, *words, sets=sets)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "result.json").read_text(encoding="utf-8")), done.stdout


def train_alone(recipe: str, folder: Path, *, sets: Mapping[str, Any]) -> dict[str, Any]:
    """What result.json says of one process, which is forked: for what another run is held against."""
    folder.mkdir()
    words = [f"--run-dir={folder}", *(f"--set={name}={value}" for name, value in sets.items())]
    start(recipes()[recipe], words, ranks=1, logs=folder)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def stopped_and_resumed(recipe: str, folder: Path, sets: Mapping[str, Any]) -> dict[str, Any]:
    """Saved after step 4 on two processes; the state at the end, step 6, is removed, and three processes go on."""
    sets = {**sets, "checkpoint.every": 4}
    train_recipe(recipe, folder, 2, sets=sets)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    return train_recipe(recipe, folder, 3, "--resume", sets=sets)[0]


def lacking(recipe: str) -> str | None:
    """What a recipe's data needs and this machine has not."""
    if recipe == "image" and find_spec("sklearn") is None:
        return "scikit-learn"
    if recipe == "speech":
        try:
            espeak.variants()
        except espeak.NoSpeech as why:
            return f"a synthesizer: {why}"
    return None


def needs_data(recipe: str) -> None:
    """Skip the test where it is not there."""
    if (lacks := lacking(recipe)) is not None:
        pytest.skip(f"needs {lacks} (pip install 'unisono[recipes]')")


def same_run(result: Mapping[str, Any], other: Mapping[str, Any], *measured: str) -> None:
    """Both promise exactness and keep it, in what was trained and in what was measured of it."""
    assert result["promise"] == other["promise"] == "exact"
    for name in ("steps", "loss", "samples", "virtual_ranks", "weights_sha256", *measured):
        assert result[name] == other[name], name
