"""Start commands that train on the GPU, and read their results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import python_path
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "benchmarks/golden/script.py"
SECONDS = 180
"""Time limit of a run. Several run at once."""


class Start(NamedTuple):
    """One start of a run.

    ranks  number of processes; several share the GPU
    sets   settings, separated by spaces
    flags  further flags, separated by spaces
    """

    ranks: int = 1
    sets: str = ""
    flags: str = ""


def train(folder: Path, target: str, *starts: Start, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of a run, or {"error": text}. A second start resumes the first one."""
    folder.mkdir()
    name, *own = target.split()
    for number, start in enumerate(starts):
        words = [sys.executable, "-m", "unisono.cli.main", "run", name, "--run-dir", str(folder / "run")]
        words += ["--ranks", str(start.ranks)]
        words += (
            ["--ranks-per-device", str(start.ranks)] if start.ranks > 1 and "--cpu-ranks" not in start.flags else []
        )
        words += [word for each in (*own, *start.sets.split()) for word in ("--set", each)]
        words += [*start.flags.split(), *(["--resume"] if number else [])]
        path = ":".join(filter(None, [python_path(), environment.get("PYTHONPATH")]))
        process = subprocess.run(
            words,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=inherited({**environment, "PYTHONPATH": path, "GOLDEN_FOLDER": str(folder)}),
            check=False,
            timeout=SECONDS,
        )
        if process.returncode:
            return {"error": process.stderr[-2000:]}
    result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return result


def train_all(
    folder: Path, target: str, variants: Mapping[str, tuple[Start, ...]], environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the results of several runs, by name. Three of them run at once."""
    with ThreadPoolExecutor(3) as pool:
        runs = {
            name: pool.submit(train, folder / name.replace(" ", "-"), target, *starts, environment=environment)
            for name, starts in variants.items()
        }
        return {name: run.result() for name, run in runs.items()}
