"""A recipe as a user types it: real processes, the command, a run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.house.sources import ROOT


def train_recipe(
    recipe: str, folder: Path, ranks: int, *words: str, sets: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """What result.json says, and what is on the screen."""
    command = [sys.executable, "-m", "unisono.cli.main", "run", recipe]
    command += ["--ranks", str(ranks), "--run-dir", str(folder)]
    command += [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "result.json").read_text(encoding="utf-8")), done.stdout


def same_run(result: Mapping[str, Any], other: Mapping[str, Any], *measured: str) -> None:
    """Both promise exactness and keep it, in what was trained and in what was measured of it."""
    assert result["promise"] == other["promise"] == "exact"
    for name in ("steps", "loss", "samples", "virtual_ranks", "weights_sha256", *measured):
        assert result[name] == other[name], name
