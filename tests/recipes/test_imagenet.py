"""Train the imagenet recipe on folders and tar files with small settings, and on data that is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn

from tests.file_server import serve
from tests.pictures import damaged_files, need_pillow, pack, write_pictures, write_tar
from tests.ranks.loops import assert_same_results, attempt, results_on_sizes
from tests.recipes.training import (
    assert_same_run,
    resume_on_three_processes,
    run_recipe,
    train_on_one_process,
    train_recipe,
)
from tests.unit.test_shard_writer import write as write_shards
from unisono.config import LoaderSettings, ParallelSettings
from unisono.environment import World
from unisono.errors import SettingsError
from unisono.recipes.imagenet import Model, Settings, build, main, mix, mixed_loss, update_average
from unisono.testing import run_ranks, run_result
from unisono.train.run import Run

SMALL = Settings(batch=36, epochs=2, size=16, evaluate_every=2, model=Model(width=2))  # 90 pictures: 36, 36 and 18
TOY = {"batch": 36, "epochs": 2, "size": 16, "model.width": 2, "checkpoint.every": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 90 pictures of 3 classes for training and 20 for validation, as files and in tar files."""
    need_pillow()
    folder = write_pictures(tmp_path_factory.mktemp("pictures") / "data")
    for part in ("train", "val"):
        pack(folder / part, folder.parent, shards=3)
        write_shards(folder / part, folder.parent / "shards" / part, 30_000)
    return folder


def in_tars(settings: Settings, folder: Path) -> Settings:
    """Return settings with the tar files."""
    train, valid = (f"{folder.parent}/{part}-{{0..2}}.tar" for part in ("train", "val"))
    return replace(settings, data=train, valid=valid, classes=3, window=20)


def with_damage(folder: Path, out: Path) -> Path:
    """Copy a data set by links, and add files that are no pictures to its first class."""
    for path in sorted(folder.rglob("*.jpg")):
        copy = out / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(path)
    for name, content in damaged_files().items():
        (out / "train" / "circle-plain" / name).write_bytes(content)
    return out


def metrics(run: Run[Any]) -> list[Any]:
    """Train, and return what must be equal."""
    main(run)
    result = run_result(run)
    return [result[name] for name in ("weights_sha256", "loss", "promise", "top1", "top5", "valid_loss")]


def train_cases(world: World, out: str, cases: dict[str, Settings]) -> dict[str, Any]:
    """Train with each of these settings."""
    return {name: attempt(world, Path(out) / name, metrics, settings) for name, settings in cases.items()}


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_weights_do_not_depend_on_processes_and_workers(tmp_path: Path, folder: Path) -> None:
    """Training and validation, from folders and tar files, whole and with damaged files, on 1, 2 and 3 processes."""
    plain, skip = replace(SMALL, data=str(folder)), LoaderSettings(on_error="skip")
    damaged = replace(SMALL, data=str(with_damage(folder, tmp_path / "damaged")), epochs=1)
    cases = {
        "folder": plain,
        "folder, workers": replace(plain, loader=LoaderSettings(workers=2)),
        "tar": in_tars(SMALL, folder),
        "shards": replace(SMALL, data=str(folder.parent / "shards"), window=20, loader=LoaderSettings(workers=1)),
        "vit": replace(plain, epochs=1, model=Model(kind="vit", width=4, heads=2, depth=1)),
        "damaged": replace(damaged, loader=skip),
        "damaged, workers": replace(damaged, loader=replace(skip, workers=1)),
    }
    runs = results_on_sizes(train_cases, tmp_path / "runs", cases)
    for name in cases:
        assert_same_results(runs, name)
    assert all(runs[0][name][2] == "exact" for name in cases)
    assert runs[0]["folder"] == runs[0]["folder, workers"] != runs[0]["tar"] != runs[0]["shards"]
    assert runs[0]["damaged"] == runs[0]["damaged, workers"]


@pytest.mark.ci
def test_shards_have_the_bits_of_replicas(tmp_path: Path, folder: Path) -> None:
    """The average of the weights is sharded, too."""
    whole = replace(SMALL, data=str(folder), epochs=1)
    cases = {"whole": whole, "shards": replace(whole, parallel=ParallelSettings(shard=2))}
    for result in run_ranks(train_cases, 2, str(tmp_path), cases):
        assert result["shards"] == result["whole"], result


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_file_ends_the_run_with_its_name(tmp_path: Path, folder: Path, workers: int) -> None:
    settings = replace(
        SMALL, data=str(with_damage(folder, tmp_path / "data")), epochs=1, loader=LoaderSettings(workers=workers)
    )
    for text in run_ranks(train_cases, 2, str(tmp_path), {"damaged": settings}):
        assert "PeerLostError" in text["damaged"] or "Cannot read the picture" in text["damaged"]
    assert "--set loader.on_error=skip" in text["damaged"] or "PeerLostError" in text["damaged"]


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_shards_at_a_url_are_cached(tmp_path: Path, folder: Path) -> None:
    """Two processes with loader workers read them from a server, and have the weights of one that reads the files."""
    local = {**TOY, "epochs": 1, "evaluate_every": 0, "window": 20, "data": folder.parent / "shards"}
    one = train_on_one_process("imagenet", tmp_path / "one", sets=local)
    with serve(folder.parent / "shards", tmp_path / "seen") as server:
        remote = {"data": f"{server.url}/train", "valid": f"{server.url}/val", "cache": tmp_path / "cache"}
        two, screen = train_recipe("imagenet", tmp_path / "two", 2, sets={**local, **remote, "loader.workers": 1})
    assert f"{server.url}/train: 90 pictures in " in screen
    assert_same_run(two, one, "top1", "valid_loss")
    shards = sorted(path for part in ("train", "val") for path in (folder.parent / "shards" / part).glob("*.tar"))
    contents = sorted(path.read_bytes() for path in (tmp_path / "cache").glob("*.shard"))
    assert sorted(path.read_bytes() for path in shards) == [each for each in contents if not each.startswith(b"{")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wrong_data_ends_the_command_with_what_to_type(tmp_path: Path, folder: Path) -> None:
    """Each run has two processes. The first line that both print is the error of the data."""
    (tmp_path / "empty").mkdir()
    with_damage(folder, tmp_path / "damaged")
    with_damage(folder, tmp_path / "missing")
    (tmp_path / "missing" / "train" / "nothing").mkdir()
    copytree(folder.parent / "shards", tmp_path / "shards")
    last = sorted((tmp_path / "shards" / "train").glob("*.tar"))[-1]
    last.write_bytes(last.read_bytes()[:-2048])  # between the picture and the label of the last sample
    with tarfile.open(folder.parent / "train-0.tar") as tar:
        cuts = tar.getmembers()[20].offset_data + 100, tar.getmembers()[20].offset  # within a picture, and before it
    for name, cut in zip(("train-0.tar", "train-2.tar"), cuts, strict=True):
        (tmp_path / name).write_bytes((folder.parent / "train-0.tar").read_bytes()[:cut])
    write_tar(tmp_path / "train-1.tar", {"a.jpg": b"no picture", "a.cls": b"5"})
    valid = f"{folder.parent}/val-{{0..2}}.tar"
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"data": tmp_path / "empty"}, ("fewer than two classes", "mkdir ")),
        (
            {"data": tmp_path / "missing"},
            ("missing/train/nothing has no pictures.", "rmdir "),
        ),
        ({"data": tmp_path / "damaged"}, ("Cannot read the picture ", "--set loader.on_error=skip", "rm ")),
        (
            {"data": tmp_path / "train-0.tar", "valid": valid, "classes": 3},
            ("of the shard ", "train-0.tar is damaged", "--set loader.on_error=skip"),
        ),
        (
            {"data": tmp_path / "train-2.tar", "valid": valid, "classes": 3},
            ("train-2.tar is damaged", "between two members, and lacks the zeros that end a tar", "truncate -s +1024"),
        ),
        ({"data": tmp_path / "shards"}, (f"The shard {last} is cut short.", "in its index", "unisono shards FOLDER")),
        (
            {"data": tmp_path / "train-1.tar", "valid": valid, "classes": 3},
            ("The label 5 of the sample a is out of range.", "--set classes=6"),
        ),
    ]
    for number, (sets, words) in enumerate(cases):
        done = run_recipe("imagenet", tmp_path / f"run-{number}", 2, sets={**TOY, **sets})
        assert done.returncode in (1, 2), done.stdout
        assert [word for word in words if word not in done.stdout + done.stderr] == [], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_print_metrics_and_match_one(tmp_path: Path, folder: Path) -> None:
    sets = {**TOY, "data": folder, "loader.workers": 1}
    one = train_on_one_process("imagenet", tmp_path / "one", sets={**TOY, "data": folder})
    two, screen = train_recipe("imagenet", tmp_path / "two", 2, sets={**sets, "evaluate_every": 2})
    assert f"{folder}: 90 pictures for training, 20 for validation, 3 classes" in screen
    assert f"validation: top-1 {two['top1']:.2%}, top-5 {two['top5']:.2%}, loss {two['valid_loss']:.4f}" in screen
    assert "step 2: top-1" in screen
    assert_same_run(two, one, "top1", "top5", "valid_loss")
    resumed = resume_on_three_processes("imagenet", tmp_path / "resumed", sets)
    assert resumed["weights_sha256"] == one["weights_sha256"]
    words = [str(tmp_path / "two"), str(folder / "val"), str(tmp_path / "rows.jsonl"), "--model", "average"]
    subprocess.run([sys.executable, "-m", "unisono.cli.main", "predict", *words], check=True, timeout=100)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [str(path) for path in sorted((folder / "val").rglob("*.jpg"))]
    assert {row["class"] for row in rows} <= {"circle-plain", "square-plain", "triangle-plain"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "least"), [("resnet50", 0.5), ("vit", 0.15)])
def test_accuracy_of_the_defaults(tmp_path: Path, kind: str, least: float) -> None:
    need_pillow()
    result, _ = train_recipe("imagenet", tmp_path / "run", 2, sets={"model.kind": kind}, timeout=560)
    assert result["top1"] >= least
    assert result["top5"] > result["top1"]


# -- parts


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(Model(width=64), 25_557_032), (Model(kind="vit", width=64, heads=12, depth=12, patch=16), 86_567_656)],
)
def test_models_have_the_parameters_of_the_papers(model: Model, parameters: int) -> None:
    with torch.device("meta"):
        built = build(Settings(model=model, size=224), 1000)
        assert sum(p.numel() for p in built.parameters()) == parameters
        assert built(torch.zeros(2, 3, 224, 224, dtype=torch.uint8)).shape == (2, 1000)


def test_mixup_mixes_pictures_and_labels_in_the_same_shares() -> None:
    pictures = [(torch.full((3, 2, 2), 20 * n, dtype=torch.uint8), n) for n in range(8)]
    torch.manual_seed(1)
    mixed, labels, others, shares = mix(pictures, alpha=1.0)
    assert mixed.dtype == torch.uint8
    assert sorted(others.tolist()) == labels.tolist() == list(range(8))
    assert ((shares >= 0) & (shares <= 1)).all()
    expected = 20 * (shares * labels + (1 - shares) * others)
    assert (mixed[:, 0, 0, 0] - expected).abs().max() <= 0.5
    plain, labels, others, shares = mix(pictures, alpha=0.0)
    assert torch.equal(plain, torch.stack([picture for picture, _ in pictures]))
    assert (labels.tolist(), shares.tolist()) == (others.tolist(), [1.0] * 8)


def test_loss_of_a_mixture_is_the_mixture_of_losses() -> None:
    output, labels = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])
    others, pictures = labels.flip(0), torch.zeros(4)

    def loss(shares: torch.Tensor) -> torch.Tensor:
        total, count = mixed_loss(output, pictures, labels, others, shares, smoothing=0.1)
        assert count == 4
        return total

    first, second = loss(torch.ones(4)), loss(torch.zeros(4))
    expected = nn.functional.cross_entropy(output, labels, reduction="sum", label_smoothing=0.1)
    assert torch.allclose(first, expected)
    assert torch.allclose(loss(torch.full((4,), 0.25)), 0.25 * first + 0.75 * second)


def test_the_average_follows_the_weights_and_has_the_buffers() -> None:
    average, model = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    nn.init.constant_(model.weight, 3.0)
    model(torch.randn(8, 2))
    update_average(average, model, 0.75)
    assert average.weight.tolist() == [1.5, 1.5]
    assert torch.equal(average.get_buffer("running_mean"), model.get_buffer("running_mean"))
    assert average.get_buffer("num_batches_tracked") == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": ParallelSettings(tensor=2)}, "parallel.tensor=1 --set parallel.shard=2"),
        ({"parallel": ParallelSettings(pipeline=2)}, "parallel.pipeline=1 --set parallel.shard=2"),
        ({"size": 50, "model": Model(kind="vit")}, "whole patches.*--set size=48"),
    ],
)
def test_what_the_models_do_not_support_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(**changes)
