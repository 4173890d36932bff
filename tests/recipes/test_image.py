"""Train the image recipe with small settings, and with its defaults where its data is installed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.loops import attempt
from tests.recipes.training import (
    assert_same_run,
    missing_data,
    resume_on_three_processes,
    train_on_one_process,
    train_recipe,
)
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.datasets.images import FASHION, ImageSplit
from unisono.recipes.image import ImageDataset, Model, Settings, main, random_shift
from unisono.testing import run_ranks

pytestmark = pytest.mark.skipif(missing_data("image") is not None, reason="scikit-learn is not installed")

TOY = {
    "source": "digits",
    "epochs": 2,
    "batch": 44,  # not a multiple of 8: shares of 5 and 6 images
    "train_images": 110,  # the last batch has 22: shares of 2 and 3
    "valid_images": 50,
    "model.width": 4,
    "model.stages": 2,
}

train = partial(train_recipe, "image", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("image", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.slow
def test_two_processes_print_metrics_and_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Each process has a loader worker that augments the images."""
    result, screen = train(tmp_path / "run", 2, sets={**TOY, "loader.workers": 1})
    assert "scikit-learn's digits: 1,438 images for training" in screen
    assert f"validation: accuracy {result['accuracy']:.2%}" in screen
    assert "on 50 held-out images" in screen
    assert_same_run(result, reference, "accuracy", "valid_loss")


@pytest.mark.slow
def test_pipeline_with_group_norm_matches_one_process(tmp_path: Path) -> None:
    """Stages and shares of the batch are uneven."""
    sets = {**TOY, "epochs": 1, "model.norm": "group"}
    (one, _), (two, _) = (
        train(tmp_path / str(ranks), ranks, sets={**sets, "parallel.pipeline": ranks}) for ranks in (1, 2)
    )
    assert_same_run(two, one, "accuracy", "valid_loss")


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelSettings(pipeline=2), "Batch norm updates its running statistics.*model.norm=group"),
        (ParallelSettings(tensor=2), "not convolutions.*parallel.tensor=1 --set parallel.shard=2"),
        (ParallelSettings(context=4), "An image is not a sequence.*parallel.context=1 --set parallel.shard=4"),
    ],
)
def test_unsupported_parallelism_is_refused(parallel: ParallelSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(parallel=parallel)
    assert Settings(model=Model(norm="group"), parallel=ParallelSettings(pipeline=2)).parallel.pipeline == 2


@pytest.mark.slow
def test_resumed_run_matches_an_uninterrupted_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    resumed = resume_on_three_processes("image", tmp_path / "run", TOY)
    assert resumed["weights_sha256"] == reference["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_accuracy_on_digits(tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2, sets={"source": "digits", "epochs": 30})[0]["accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not FASHION.folder.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_accuracy_on_fashion_mnist(tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2, sets={"source": "fashion"})[0]["accuracy"] >= 0.88


def test_damaged_image_ends_each_process_with_an_error(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'unisono[recipes]'")
    for label in ("cats", "dogs"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        for i in range(4):
            image.effect_noise((9, 9), 50).save(tmp_path / "pets" / label / f"{i}.png")
    path = tmp_path / "pets" / "dogs" / "2.png"
    path.write_bytes(path.read_bytes()[:70])
    first, second = run_ranks(attempt, 2, tmp_path / "run", main, Settings(data=tmp_path / "pets"))
    assert f"Cannot read the image {path}." in first
    # Rank 1 waits until rank 0 has loaded the images, and may lose it before.
    assert f"Cannot read the image {path}." in second or "PeerLostError" in second


def test_random_shift_moves_a_pixel_by_at_most_its_limit() -> None:
    """Each image has one white pixel in the middle, which must not be lost."""
    images = torch.zeros(400, 1, 7, 9, dtype=torch.uint8)
    images[:, :, 3, 4] = 255
    torch.manual_seed(1)
    shifted = random_shift(images, 2)
    assert shifted.shape == images.shape
    assert shifted.flatten(1).sum(1, dtype=torch.int64).tolist() == [255] * 400
    rows, columns = (shifted[:, 0].nonzero()[:, dim] for dim in (1, 2))
    assert set(rows.tolist()) == {1, 2, 3, 4, 5}
    assert set(columns.tolist()) == {2, 3, 4, 5, 6}
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == 25


def test_half_of_the_images_are_flipped() -> None:
    split = ImageSplit(torch.tensor([0, 100], dtype=torch.uint8).expand(300, 1, 1, 2).contiguous(), torch.arange(300))
    torch.manual_seed(1)
    samples = ImageDataset(split, mean=50.0, std=50.0, mirror=True).__getitems__(range(300))
    assert [int(label) for _, label in samples] == list(range(300))
    images = [tuple(image.flatten().tolist()) for image, _ in samples]
    assert set(images) == {(-1.0, 1.0), (1.0, -1.0)}
    assert 100 < images.count((1.0, -1.0)) < 200
    assert torch.equal(ImageDataset(split, 50.0, 50.0)[7][0], torch.tensor([[[-1.0, 1.0]]]))
