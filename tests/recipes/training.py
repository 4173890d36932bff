"""Run recipes with the command, with real processes and run directories."""

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
    recipe: str, folder: Path, ranks: int, *words: str, sets: Mapping[str, Any], timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, for at most `timeout` seconds."""
    command = [sys.executable, "-m", "unisono.cli.main", "run", recipe]
    command += ["--ranks", str(ranks), "--run-dir", str(folder)]
    command += [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def train_recipe(
    recipe: str, folder: Path, ranks: int, *words: str, sets: Mapping[str, Any], timeout: float = 280
) -> tuple[dict[str, Any], str]:
    """Return the contents of result.json and the output."""
    process = run_recipe(recipe, folder, ranks, *words, sets=sets, timeout=timeout)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return json.loads((folder / "result.json").read_text(encoding="utf-8")), process.stdout


def train_on_one_process(recipe: str, folder: Path, *, sets: Mapping[str, Any]) -> dict[str, Any]:
    """Train in one forked process, and return the contents of result.json."""
    folder.mkdir()
    words = [f"--run-dir={folder}", *(f"--set={name}={value}" for name, value in sets.items())]
    start(recipes()[recipe], words, ranks=1, logs=folder)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def resume_on_three_processes(recipe: str, folder: Path, sets: Mapping[str, Any]) -> dict[str, Any]:
    """Train 6 steps on two processes, then resume from the checkpoint of step 4 on three, and return result.json."""
    sets = {**sets, "checkpoint.every": 4}
    train_recipe(recipe, folder, 2, sets=sets)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    return train_recipe(recipe, folder, 3, "--resume", sets=sets)[0]


def missing_data(recipe: str) -> str | None:
    """Return what a recipe's data needs and this machine lacks."""
    if recipe == "image" and find_spec("sklearn") is None:
        return "scikit-learn"
    if recipe == "speech":
        try:
            espeak.variants()
        except espeak.SynthesizerError as error:
            return f"a synthesizer: {error}"
    return None


def skip_without_data(recipe: str) -> None:
    """Skip the test if the recipe's data is not installed."""
    if (missing := missing_data(recipe)) is not None:
        pytest.skip(f"needs {missing} (pip install 'unisono[recipes]')")


def assert_same_run(result: Mapping[str, Any], other: Mapping[str, Any], *measured: str) -> None:
    """Check that both runs promise exact results and have the same ones."""
    assert result["promise"] == other["promise"] == "exact"
    for name in ("steps", "loss", "samples", "virtual_ranks", "weights_sha256", *measured):
        assert result[name] == other[name], name
