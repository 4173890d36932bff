"""Distillation: the same bits on any number of processes, with a teacher that is sharded, and with cached outputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests import rounding
from tests.ranks.loops import attempt
from unisono import SavedWeights, distill
from unisono.config import ParallelSettings, Settings
from unisono.environment import World
from unisono.errors import CheckpointError
from unisono.export.safetensors_file import export
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run

CONFIG = Settings(steps=4, batch=16, virtual_ranks=8, seed=3)
SHARDED = replace(CONFIG, parallel=ParallelSettings(shard=2))


class Network(nn.Module):
    """A small network with batch norm, dropout and a hidden layer to compare."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.hidden = nn.Sequential(nn.ReLU(), nn.Linear(width, width))
        self.drop = nn.Dropout(0.2)
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(self.drop(self.hidden(self.norm(self.enter(x)))))
        return out


def points(length: int = 64) -> TensorDataset:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def train_teacher(run: Run[Any]) -> str:
    """Train the teacher, and return its run directory."""
    model = run.place(lambda: Network(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(points()):
        step.run(model, hard_loss)
        step.update(optimizer)
    return str(run.dir)


def hard_loss(output: Tensor, x: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, y, reduction="sum"), len(y)


def teacher_run(world: World, folder: str, seed: int = 3) -> Any:
    return attempt(world, Path(folder), train_teacher, replace(CONFIG, seed=seed))


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a trained teacher."""
    (found,) = run_ranks(teacher_run, 1, str(tmp_path_factory.mktemp("teacher") / "run"))
    assert Path(found).is_dir(), found
    return Path(found)


def distilled(run: Run[Any], teacher_dir: str, way: str) -> Any:
    """Distill a student in one of several ways, and return the fingerprint."""
    source = SavedWeights(teacher_dir)
    teacher = run.place(lambda: source.load_frozen(Network(32)))
    student = run.place(lambda: Network(8))
    parts: list[nn.Module] = [student]
    data: Dataset[Any] = points()
    tracked: dict[str, Any] = {"teacher": source}
    if way == "cached":
        cache = distill.cache_outputs(run, teacher, data, source)
        data, tracked = distill.WithOutputs(data, cache), {**tracked, "targets": cache}
    elif way == "hidden":
        projection = run.place(lambda: nn.Linear(8, 32))
        parts.append(projection)
        tracked["projection"] = projection
        ours = distill.RecordedOutputs(student, ["hidden"])
        theirs = distill.RecordedOutputs(teacher, ["hidden"])
    optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()], lr=0.01)
    run.track(model=student, optimizer=optimizer, **tracked)

    def loss(output: Tensor, x: Tensor, y: Tensor, expected: Tensor | None = None) -> tuple[Tensor, int]:
        if expected is None:
            with torch.no_grad():
                expected = teacher(x)
        hard, weight = hard_loss(output, x, y)
        total = 0.3 * hard + 0.7 * distill.soft_target_loss(output, expected)
        if way == "hidden":
            total = total + distill.hidden_state_loss(projection(ours.take("hidden")), theirs.take("hidden"))
        return total, weight

    for step in run.steps(data):
        step.run(student, loss)
        step.update(optimizer)
    assert not any(p.requires_grad for p in teacher.parameters())
    found = run_result(run)
    return found["weights_sha256"], found["loss"], found["promise"]


WAYS = ("soft", "hidden", "cached")


def distill_all(world: World, folder: str, teacher_dir: str, config: Settings, resume: bool = False) -> dict[str, Any]:
    return {
        way: attempt(
            world, Path(folder, way), partial(distilled, teacher_dir=teacher_dir, way=way), config, resume=resume
        )
        for way in WAYS
    }


@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((2, 5), marks=pytest.mark.slow)], ids=str)
def test_any_number_of_processes(tmp_path: Path, teacher_dir: Path, sizes: tuple[int, ...]) -> None:
    runs = [
        found
        for size in (1, *sizes)
        for found in run_ranks(distill_all, size, str(tmp_path / f"{len(sizes)}-{size}"), str(teacher_dir), CONFIG)
    ]
    for way in WAYS:
        assert runs[0][way][2] == "exact", runs[0][way]
        assert [found[way] for found in runs] == [runs[0][way]] * len(runs), way
    assert runs[0]["cached"][1] == pytest.approx(runs[0]["soft"][1], rel=1e-5)
    if not rounding.depends_on_batch_size():  # the cache is computed in larger batches
        assert runs[0]["cached"][:2] == runs[0]["soft"][:2]
    assert runs[0]["hidden"][0] != runs[0]["soft"][0]


@pytest.mark.parametrize("sizes", [(2,), pytest.param((4, 6), marks=pytest.mark.slow)], ids=str)
def test_a_sharded_teacher(tmp_path: Path, teacher_dir: Path, sizes: tuple[int, ...]) -> None:
    (reference,) = run_ranks(distill_all, 1, str(tmp_path / "1"), str(teacher_dir), CONFIG)
    for size in sizes:
        for found in run_ranks(distill_all, size, str(tmp_path / str(size)), str(teacher_dir), SHARDED):
            for way in WAYS:
                assert found[way] == reference[way], way


@pytest.mark.ci
@pytest.mark.parametrize("config", [CONFIG, SHARDED], ids=["whole", "sharded"])
def test_a_resume_continues_with_the_same_teacher(tmp_path: Path, teacher_dir: Path, config: Settings) -> None:
    (reference,) = run_ranks(distill_all, 1, str(tmp_path / "whole"), str(teacher_dir), CONFIG)
    folder = str(tmp_path / "resumed")
    run_ranks(distill_all, 2, folder, str(teacher_dir), replace(config, steps=2))
    rows = next((tmp_path / "resumed" / "cached" / "teacher").glob("rows-*"))
    before = rows.stat().st_mtime_ns
    size = 3 if config is CONFIG else 4
    for found in run_ranks(distill_all, size, folder, str(teacher_dir), config, True):
        assert found == reference
    assert rows.stat().st_mtime_ns == before, "the outputs were computed again"


def test_a_resume_with_another_teacher_is_refused(tmp_path: Path, teacher_dir: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    run_ranks(distill_all, 1, str(folder), str(teacher_dir), replace(CONFIG, steps=2))
    (found,) = run_ranks(teacher_run, 1, str(other), 4)
    assert found == str(other)
    (resumed,) = run_ranks(distill_all, 1, str(folder), str(other), CONFIG, True)
    assert "CheckpointError: Cannot resume with the weights in" in resumed["soft"]
    assert f"others, of {teacher_dir}" in resumed["soft"]
    assert "DataError" in resumed["cached"]
    assert "holds the outputs of another teacher, or for other data" in resumed["cached"]


def test_damaged_outputs_are_refused_and_missing_ones_computed(tmp_path: Path, teacher_dir: Path) -> None:
    def cached(folder: str) -> Any:
        (found,) = run_ranks(distill_all, 1, folder, str(teacher_dir), CONFIG)
        return found["cached"]

    reference = cached(str(tmp_path / "a"))
    files = tmp_path / "a" / "cached" / "teacher"
    (rows,) = files.glob("rows-*")
    for name in ("b", "c"):
        shutil.copytree(files, tmp_path / name / "cached" / "teacher")
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    (tmp_path / "b" / "cached" / "teacher" / rows.name).write_bytes(content)
    refused = cached(str(tmp_path / "b"))
    assert f"{rows.name} are damaged" in refused
    assert "rm -r" in refused
    index = tmp_path / "c" / "cached" / "teacher" / "cache.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "files": {}}))
    assert cached(str(tmp_path / "c")) == reference


class Forgetful(NamedTuple):
    """A way to write a teacher wrong, and the message."""

    build: Callable[[SavedWeights], nn.Module]
    message: str


WRONG = {
    "trained": Forgetful(lambda source: source.load(Network(32)), "The state of the run is not tracked completely"),
    "in training mode": Forgetful(
        lambda source: source.load_frozen(Network(32)).train(), "The state of the run is not tracked completely"
    ),
    "of another width": Forgetful(lambda source: source.load_frozen(Network(16)), "do not fit a Network"),
    "of another class": Forgetful(
        lambda source: source.load_frozen(nn.Linear(4, 3)), "Only the model has: bias, weight"
    ),
}


def build_wrong(world: World, folder: str, teacher_dir: str) -> dict[str, Any]:
    def loop(run: Run[Any], build: Callable[[SavedWeights], nn.Module]) -> None:
        source = SavedWeights(teacher_dir)
        teacher = run.place(lambda: build(source))
        student = run.place(lambda: Network(8))
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        run.track(model=student, optimizer=optimizer, teacher=source)
        for step in run.steps(points()):
            step.run(student, lambda out, x, y: (distill.soft_target_loss(out, teacher(x).detach()), len(y)))
            step.update(optimizer)

    return {
        name: attempt(world, Path(folder, str(number)), partial(loop, build=case.build), CONFIG)
        for number, (name, case) in enumerate(WRONG.items())
    }


def test_a_teacher_that_could_change_must_be_tracked(tmp_path: Path, teacher_dir: Path) -> None:
    (found,) = run_ranks(build_wrong, 1, str(tmp_path), str(teacher_dir))
    for name, case in WRONG.items():
        assert case.message in str(found[name]), name


def continued(world: World, folder: str) -> Any:
    """Let a model that draws random tokens continue sequences."""
    prompts = TensorDataset(torch.arange(22).view(11, 2))

    def loop(run: Run[Any]) -> list[list[int]]:
        model = run.place(lambda: nn.Sequential(nn.Embedding(22, 8), nn.Linear(8, 22)))
        forward = partial(_continue, temperature=1.0)
        written: Tensor = run.predict(model, prompts, forward=forward)
        return written.tolist()

    return attempt(world, Path(folder), loop, CONFIG)


def _continue(model: nn.Module, batch: Any, temperature: float) -> Tensor:
    return distill.continue_sequences(model, batch[0], 5, temperature=temperature)


def test_generated_sequences_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    (reference,) = run_ranks(continued, 1, str(tmp_path / "1"))
    assert [row[:2] for row in reference] == torch.arange(22).view(11, 2).tolist()
    assert len({tuple(row[2:]) for row in reference}) == 11
    assert run_ranks(continued, 3, str(tmp_path / "3")) == [reference] * 3


def placed_with(run: Run[Any], source: Path, in_parts: bool) -> Any:
    """Place a network with saved weights, and return the fingerprint."""
    weights = SavedWeights(source)
    if in_parts:
        model = run.place(lambda: Network(32), weights=weights)
    else:
        model = run.place(lambda: weights.load(Network(32)))
    run.track(model=model)
    return run.context.state.fingerprint()


@pytest.mark.parametrize("kind", ["run", "file"])
def test_weights_are_read_in_parts(tmp_path: Path, teacher_dir: Path, kind: str) -> None:
    """From a checkpoint, and from a file: shards and replicas have the weights that one process loads, and buffers."""
    source = teacher_dir
    if kind == "file":
        source = tmp_path / "weights.safetensors"
        export(teacher_dir, source)
    (whole,) = run_ranks(attempt, 1, tmp_path / "whole", partial(placed_with, source=source, in_parts=False), CONFIG)
    for axes in (ParallelSettings(), ParallelSettings(shard=2)):
        loop, settings = partial(placed_with, source=source, in_parts=True), replace(CONFIG, parallel=axes)
        assert run_ranks(attempt, 2, tmp_path / f"{axes.shard}", loop, settings) == [whole] * 2


def placed_with_other_files(world: World, folder: Path, files: list[Path]) -> Any:
    return attempt(world, folder, partial(placed_with, source=files[world.rank], in_parts=True), CONFIG)


def test_other_weights_on_another_host_are_refused(tmp_path: Path, teacher_dir: Path) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    export(teacher_dir, files[0])
    tensors = load_file(files[0])
    tensors["leave.weight"] += 1
    save_file(tensors, files[1])
    for message in run_ranks(placed_with_other_files, 2, tmp_path / "run", files):
        assert "The processes read different weights" in message
        assert "leave.weight is [3, 32]" in message


def placed_on_rank_0_only(world: World, folder: Path, source: Path) -> Any:
    def loop(run: Run[Any]) -> Any:
        return run.place(lambda: Network(32), weights=None if world.rank else SavedWeights(source))

    return attempt(world, folder, loop, CONFIG)


def test_weights_on_some_processes_only_are_refused(tmp_path: Path, teacher_dir: Path) -> None:
    for message in run_ranks(placed_on_rank_0_only, 2, tmp_path / "run", teacher_dir):
        assert "LoopError: Only some processes pass weights to run.place." in message
        assert "They are None on 1 process of 2: rank 1." in message


@pytest.mark.parametrize("wrong", ["no run", "nothing", "no model", "damaged"])
def test_weights_that_cannot_be_loaded(tmp_path: Path, teacher_dir: Path, wrong: str) -> None:
    path, name = {"no run": (tmp_path, None), "nothing": (tmp_path / "x", None)}.get(wrong, (teacher_dir, None))
    if wrong == "no model":
        name = "generator"
    elif wrong == "damaged":
        path = tmp_path / "weights.safetensors"
        path.write_bytes(b"\0" * 40)
    with pytest.raises(CheckpointError) as caught:
        SavedWeights(path, model=name)
    assert str(path) in str(caught.value).splitlines()[0]


def test_an_exported_file_has_the_same_weights_as_the_run(tmp_path: Path, teacher_dir: Path) -> None:
    file = tmp_path / "weights.safetensors"
    export(teacher_dir, file)
    weights, run = SavedWeights(file), SavedWeights(teacher_dir)
    assert weights.sha256 == run.sha256
    first, second = weights.load(Network(32)).state_dict(), run.load(Network(32)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
