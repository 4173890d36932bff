"""The two scripts of docs/start/from-trainer.md have the same losses, and the same weights."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs pip install 'unisono[hf]'")

import torch
from safetensors.torch import load_file

from tests.cli.command import start
from tests.house.sources import ROOT
from tests.house.test_documentation import blocks_of
from unisono.environment import inherited

BEFORE, AFTER, *_ = [block.code for block in blocks_of(ROOT / "docs/start/from-trainer.md")]


def by_step(history: list[dict[str, Any]], name: str) -> dict[int, float]:
    """Return the values that the Trainer has logged under a name, by step, from 1."""
    return {int(row["step"]): float(row[name]) for row in history if name in row}


@pytest.mark.ci
def test_the_converted_script_has_the_losses_of_the_trainer(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "script.py").write_text(BEFORE, encoding="utf-8")
    environment = inherited({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=before, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    state = json.loads((before / "out/checkpoint-20/trainer_state.json").read_text(encoding="utf-8"))
    theirs, weights = state["log_history"], load_file(before / "out/model.safetensors")

    hashes = set()
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        shutil.copytree(before / "base", folder / "base")
        (folder / "run").mkdir()
        (folder / "script.py").write_text(AFTER, encoding="utf-8")
        here = os.getcwd()
        start(folder / "script.py", ["--run-dir=run", "--set=track=csv"], ranks=ranks, logs=folder)
        assert os.getcwd() == here
        with (folder / "run/metrics.csv").open(encoding="utf-8", newline="") as file:
            ours = [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
        for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
            here = "mean_loss" if name == "loss" else name
            found, expected = {step + 1: value for step, key, value in ours if key == here}, by_step(theirs, name)
            assert set(expected) <= set(found), name
            assert [found[step] for step in expected] == pytest.approx(list(expected.values()), rel=1e-6), name
        written = load_file(folder / "out/model.safetensors")
        assert written.keys() == weights.keys()
        assert all(torch.allclose(written[name], weights[name], rtol=0, atol=1e-5) for name in weights)
        hashes.add(json.loads((folder / "run/result.json").read_text(encoding="utf-8"))["weights_sha256"])
    assert len(hashes) == 1
