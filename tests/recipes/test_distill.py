"""Train the distill recipe with small settings: placements, resume, kills, wrong teachers; and with its defaults."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.house.sources import ROOT
from tests.recipes.test_text import TOY as TEACHER
from tests.recipes.training import (
    assert_same_run,
    resume_on_three_processes,
    run_recipe,
    train_on_one_process,
    train_recipe,
)
from unisono.recipes import distill
from unisono.recipes.datasets.python_source import load_python_source
from unisono.recipes.text import GPT, Model

MEASURED = ("teacher_bits_per_byte", "student_bits_per_byte", "alone_bits_per_byte")


def train_teacher(folder: Path, **changes: Any) -> dict[str, Any]:
    """Train a teacher of two blocks, and return the settings of the student's run."""
    train_on_one_process("text", folder, sets={**TEACHER, "model.depth": 2, **changes})
    return {"teacher": folder, "steps": 6, "batch": 10, "validate_bytes": 3000}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of a student's run, with dropout."""
    return train_teacher(tmp_path_factory.mktemp("teacher") / "run")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, toy: dict[str, Any]) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("distill", tmp_path_factory.mktemp("reference") / "run", sets=toy)


@pytest.mark.ci
def test_two_processes_print_metrics_and_match_one(
    tmp_path: Path, toy: dict[str, Any], reference: dict[str, Any]
) -> None:
    result, screen = train_recipe("distill", tmp_path / "run", 2, sets=toy)
    for name in ("teacher", "student", "alone"):
        assert f"{result[f'{name}_bits_per_byte']:.3f} bits per byte" in screen
    assert_same_run(result, reference, *MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 5])
def test_any_number_of_processes(tmp_path: Path, toy: dict[str, Any], reference: dict[str, Any], ranks: int) -> None:
    assert_same_run(train_recipe("distill", tmp_path / "run", ranks, sets=toy)[0], reference, *MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4], ids=["shard", "shard and replicate"])
def test_teacher_and_students_are_divided(
    tmp_path: Path, toy: dict[str, Any], reference: dict[str, Any], ranks: int
) -> None:
    result = train_recipe("distill", tmp_path / "run", ranks, sets={**toy, "parallel.shard": 2})[0]
    assert_same_run(result, reference, *MEASURED)


@pytest.mark.slow
def test_teacher_and_students_are_divided_by_context(tmp_path: Path) -> None:
    """Compare models without dropout.

    Each slice of a sequence draws its own dropout masks, so with dropout the loss of every step is another one than on
    one process, as it is with another seed.
    """
    toy = {**train_teacher(tmp_path / "teacher", **{"model.dropout": 0.0}), "keep": "[1]", "heads": 2}
    one = train_on_one_process("distill", tmp_path / "one", sets=toy)
    two = train_recipe("distill", tmp_path / "two", 2, sets={**toy, "parallel.context": 2})[0]
    for name in ("loss", "loss_alone", *MEASURED):
        assert two[name] == pytest.approx(one[name], rel=1e-5), name


DYING = """
import os, signal
from pathlib import Path
import unisono
from unisono.recipes import distill

calls, loss_sum = 0, distill.loss_sum

def dying(*batch):
    global calls
    calls += 1
    mark = Path(__file__).with_name("killed")
    if calls == 7 and unisono.World.current().rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss_sum(*batch)

distill.loss_sum = dying
if __name__ == "__main__":
    unisono.main(distill.main, distill.Settings)
"""


@pytest.mark.slow
def test_a_killed_process_and_a_resume_change_nothing(
    tmp_path: Path, toy: dict[str, Any], reference: dict[str, Any]
) -> None:
    for axis, ranks in (("replicate", 3), ("shard", 2)):  # the other processes continue, or all of them restart
        folder = tmp_path / axis
        folder.mkdir()
        (folder / "dying.py").write_text(DYING)
        sets = {**toy, "checkpoint.every": 1, f"parallel.{axis}": ranks}
        killed = train_recipe(str(folder / "dying.py"), folder / "run", ranks, sets=sets)[0]
        assert (folder / "killed").exists()
        assert_same_run(killed, reference, *MEASURED)
    assert_same_run(resume_on_three_processes("distill", tmp_path / "resumed", toy), reference, *MEASURED)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"teacher": "none"}, "The distill recipe needs a teacher."),
    "no run": ({"teacher": "missing"}, "There is no folder missing."),
    "no block": ({"keep": "[2]"}, "The teacher has no block 2."),
    "too many heads": ({"heads": 3}, "The student cannot have heads=3."),
    "a divided head": ({"parallel.tensor": 2}, "cannot have parallel.tensor=2 with a student of 1 heads."),
    "a pipeline": ({"parallel.pipeline": 2}, "The distill recipe cannot have parallel.pipeline=2."),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", WRONG)
def test_wrong_teachers_are_refused(tmp_path: Path, toy: dict[str, Any], name: str) -> None:
    changed, expected = WRONG[name]
    ended = run_recipe("distill", tmp_path / "run", 2, sets={**toy, **changed})
    assert ended.returncode != 0
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_student_begins_with_all_that_the_teacher_uses() -> None:
    """A teacher that uses two of four heads, a half of its neurons, and a half of its channels in a rotated basis."""
    shape = Model(width=32, depth=2, heads=4, context=24)
    torch.manual_seed(0)
    large, half = GPT(shape), shape.width // 2
    rotation = torch.linalg.qr(torch.randn(shape.width, shape.width)).Q
    tokens = torch.randint(256, (8, shape.context))
    with torch.no_grad():
        for block in distill.blocks(large):
            block.look.weight[half:] = 0
            block.look.weight[:, 8:24] = 0
            block.down.weight[half:] = 0
            block.down.weight[:, ::2] = 0
            for layer in (block.look, block.down):
                layer.weight.copy_(rotation @ layer.weight)
            for layer in (block.query_key_value, block.up):
                layer.weight.copy_(layer.weight @ rotation.T)
        large.tokens.weight[:, half:] = 0
        large.tokens.weight.copy_(large.tokens.weight @ rotation.T)
        small = distill.prune(large, replace(shape, width=half, heads=2), tokens)
        torch.testing.assert_close(small(tokens), large(tokens), rtol=1e-3, atol=1e-3)
    assert sum(p.numel() for p in small.parameters()) < 0.35 * sum(p.numel() for p in large.parameters())


@pytest.mark.slow
def test_predictions_of_the_student(tmp_path: Path, toy: dict[str, Any]) -> None:
    """The mean over the windows of the validation text is what the run has reported."""
    result = train_on_one_process("distill", tmp_path / "run", sets=toy)
    text = load_python_source().valid[:3000]
    (tmp_path / "text.txt").write_bytes(text)
    words = ["predict", tmp_path / "run", tmp_path / "text.txt", tmp_path / "out.jsonl", "--model", "student"]
    command = [sys.executable, "-m", "unisono.cli.main", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sum(row["bytes"] for row in rows) == len(text)
    bits = sum(row["bits_per_byte"] * row["bytes"] for row in rows)
    assert bits / len(text) == pytest.approx(result["student_bits_per_byte"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_student_is_half_way_from_a_model_of_its_size_to_its_teacher(tmp_path: Path) -> None:
    """A smaller teacher than the recipe's, with the default settings of the distillation: about three quarters."""
    train = partial(train_recipe, ranks=2)
    shape = {"model.width": 64, "model.context": 64, "batch": 32, "validate_bytes": 2**16}
    train("text", tmp_path / "teacher", sets={**shape, "steps": 400, "sample_bytes": 0})
    sets = {"teacher": tmp_path / "teacher", "batch": 32, "validate_bytes": 2**16}
    result, _ = train("distill", tmp_path / "run", sets=sets)
    teacher, student, alone = (result[name] for name in MEASURED)
    assert teacher < student < (teacher + alone) / 2
