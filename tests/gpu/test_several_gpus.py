"""Several GPUs: NCCL, deaths, hangs and layouts. They wait for a machine that has so many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import python_path
from tests.gpu.runs import ROOT, SCRIPT
from tests.gpu.test_same_bits import IMAGE, TARGETS, TEXT, assert_one_fingerprint
from unisono.environment import inherited


def train(folder: Path, target: str, ranks: int | str, *words: str) -> dict[str, Any]:
    """Return the result of a run with one process on each GPU, or {"error": text}."""
    folder.mkdir(exist_ok=True)
    name, *own = target.split()
    command = [sys.executable, "-m", "unisono.cli.main", "run", name, "--run-dir", str(folder / "run")]
    command += ["--ranks", str(ranks), *(word for each in own for word in ("--set", each)), *words]
    environment = inherited({"PYTHONPATH": python_path(), "GOLDEN_FOLDER": str(folder)})
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    if process.returncode:
        return {"error": process.stderr[-2000:]}
    result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return result


@pytest.mark.gpus(2)
@pytest.mark.parametrize("target", TARGETS)
def test_tree_over_nccl_has_the_bits_of_one_gpu(tmp_path: Path, target: str) -> None:
    assert_one_fingerprint({str(n): train(tmp_path / str(n), TARGETS[target], n) for n in (1, 2)})


@pytest.mark.gpus(4)
@pytest.mark.parametrize("target", ["text", "image with batch norm"])
def test_four_and_three_gpus_have_the_bits_of_one(tmp_path: Path, target: str) -> None:
    assert_one_fingerprint({str(n): train(tmp_path / str(n), TARGETS[target], n) for n in (1, 3, 4)})


@pytest.mark.gpus(2)
def test_all_restart_after_a_death(tmp_path: Path) -> None:
    target = f"{SCRIPT} net=mlp steps=8 checkpoint.every=2"
    killed = train(tmp_path / "killed", f"{target} dies=4", 2)
    assert_one_fingerprint({"whole": train(tmp_path / "whole", target, 1), "killed": killed})


@pytest.mark.gpus(2)
def test_survivors_abort_nccl_and_continue(tmp_path: Path) -> None:
    """--ranks MIN:MAX asks for survival on GPUs."""
    target = f"{SCRIPT} net=mlp steps=8"
    survived = train(tmp_path / "survived", f"{target} dies=3", "1:2")
    assert "error" not in survived, survived
    assert survived["deaths"]
    assert_one_fingerprint({"whole": train(tmp_path / "whole", target, 1), "survived": survived})


LAYOUTS = {
    "shards by layer": ("parallel.shard=2",),
    "shards by step": ("parallel.shard=2", "parallel.reshard=step"),
}


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_over_nccl_have_the_bits_of_one_gpu(tmp_path: Path, layout: str) -> None:
    sets = [word for each in LAYOUTS[layout] for word in ("--set", each)]
    assert_one_fingerprint({"1": train(tmp_path / "1", TEXT, 1), layout: train(tmp_path / "2", TEXT, 2, *sets)})


@pytest.mark.gpus(2)
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_divided_models_train(tmp_path: Path, axis: str) -> None:
    whole = train(tmp_path / "1", TEXT, 1)
    divided = train(tmp_path / "2", TEXT, 2, "--set", f"parallel.{axis}=2")
    assert "error" not in divided, divided
    assert divided["loss"] == pytest.approx(whole["loss"], rel=1e-3)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("exchange", ["allreduce", "ring", "ddp", "wide", "local_sgd"])
def test_exchanges_train(tmp_path: Path, exchange: str) -> None:
    target = f"{SCRIPT} net=cnn steps=8"
    whole = train(tmp_path / "1", target, 1)
    found = train(tmp_path / "2", target, 2, "--set", f"exchange={exchange}")
    assert "error" not in found, found
    assert found["loss"] == pytest.approx(whole["loss"], rel=0.2)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("sets", ["parallel.model_parallel_devices=2", "parallel.data_parallel_devices=2"])
def test_two_gpus_of_one_process(tmp_path: Path, sets: str) -> None:
    whole = train(tmp_path / "1", IMAGE, 1)
    found = train(tmp_path / "2", IMAGE, 1, "--set", sets)
    assert_one_fingerprint({"1": whole, sets: found})
