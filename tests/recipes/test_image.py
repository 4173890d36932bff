"""The image recipe at toy size, and at full size where its data is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.loops import attempt
from tests.recipes.training import lacking, same_run, stopped_and_resumed, train_alone, train_recipe
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.datasets.images import FASHION, ImageSplit
from unisono.recipes.image import ImageDataset, Model, Settings, main, shifted
from unisono.testing import run_ranks

pytestmark = pytest.mark.skipif(lacking("image") is not None, reason="scikit-learn is not installed")

TOY = {
    "source": "digits",
    "epochs": 2,
    "batch": 44,  # not a multiple of 8: shares of 5 and 6 pictures
    "train_images": 110,  # a tail of 22: shares of 2 and 3
    "valid_images": 50,
    "model.width": 4,
    "model.stages": 2,
}

train = partial(train_recipe, "image", sets=TOY)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_alone("image", tmp_path_factory.mktemp("alone") / "run", sets=TOY)


def test_it_trains_and_says_so(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Two processes, each with a worker that moves the pictures about: the same model."""
    result, screen = train(tmp_path / "run", 2, sets={**TOY, "loader.workers": 1})
    assert "scikit-learn's digits: 1,438 pictures to train on" in screen
    assert f"validation: {result['accuracy']:.2%} right" in screen
    assert "on 50 pictures" in screen
    same_run(result, alone, "accuracy", "valid_loss")


@pytest.mark.slow
def test_with_group_norm_it_is_a_pipeline_too(tmp_path: Path) -> None:
    """Uneven stages, shares of unlike size: the bits of one process."""
    sets = {**TOY, "epochs": 1, "model.norm": "group"}
    (one, _), (two, _) = (
        train(tmp_path / str(ranks), ranks, sets={**sets, "parallel.pipeline": ranks}) for ranks in (1, 2)
    )
    same_run(two, one, "accuracy", "valid_loss")


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelSettings(pipeline=2), "Batch norm's running statistics.*model.norm=group"),
        (ParallelSettings(tensor=2), "matrices are convolutions.*parallel.tensor=1 --set parallel.shard=2"),
        (ParallelSettings(context=4), "A picture is no sequence.*parallel.context=1 --set parallel.shard=4"),
    ],
)
def test_what_does_not_go_with_it_is_said_before_it_is_made(parallel: ParallelSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(parallel=parallel)
    assert Settings(model=Model(norm="group"), parallel=ParallelSettings(pipeline=2)).parallel.pipeline == 2


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path: Path, alone: dict[str, Any]) -> None:
    resumed = stopped_and_resumed("image", tmp_path / "run", TOY)
    assert resumed["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_learns_digits(tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2, sets={"source": "digits", "epochs": 30})[0]["accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not FASHION.folder.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_it_learns_clothes(tmp_path: Path) -> None:
    """The recipe as it stands, on two processes."""
    assert train(tmp_path / "run", 2, sets={"source": "fashion"})[0]["accuracy"] >= 0.88


def test_a_damaged_picture_ends_every_process_with_its_name(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'unisono[recipes]'")
    for label in ("cats", "dogs"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        for i in range(4):
            image.effect_noise((9, 9), 50).save(tmp_path / "pets" / label / f"{i}.png")
    path = tmp_path / "pets" / "dogs" / "2.png"
    path.write_bytes(path.read_bytes()[:70])
    first, other = run_ranks(attempt, 2, tmp_path / "run", main, Settings(data=tmp_path / "pets"))
    assert f"The picture {path} was to be read." in first
    assert (
        f"The picture {path} was to be read." in other or "PeerLostError" in other
    )  # it waits for the first to read them


def test_pictures_are_moved_whole() -> None:
    """One white pixel in the middle of each: it is somewhere else, never lost, and at most two pixels away."""
    images = torch.zeros(400, 1, 7, 9, dtype=torch.uint8)
    images[:, :, 3, 4] = 255
    torch.manual_seed(1)
    moved = shifted(images, 2)
    assert moved.shape == images.shape
    assert moved.flatten(1).sum(1, dtype=torch.int64).tolist() == [255] * 400
    rows, columns = (moved[:, 0].nonzero()[:, dim] for dim in (1, 2))
    assert set(rows.tolist()) == {1, 2, 3, 4, 5}
    assert set(columns.tolist()) == {2, 3, 4, 5, 6}
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == 25


def test_half_of_the_pictures_are_mirrored() -> None:
    part = ImageSplit(torch.tensor([0, 100], dtype=torch.uint8).expand(300, 1, 1, 2).contiguous(), torch.arange(300))
    torch.manual_seed(1)
    samples = ImageDataset(part, mean=50.0, std=50.0, mirror=True).__getitems__(range(300))
    assert [int(label) for _, label in samples] == list(range(300))
    seen = [tuple(image.flatten().tolist()) for image, _ in samples]
    assert set(seen) == {(-1.0, 1.0), (1.0, -1.0)}
    assert 100 < seen.count((1.0, -1.0)) < 200
    assert torch.equal(ImageDataset(part, 50.0, 50.0)[7][0], torch.tensor([[[-1.0, 1.0]]]))
