"""Train the diffusion recipe with small settings, and with its defaults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.recipes.training import (
    assert_same_run,
    missing_data,
    resume_on_three_processes,
    train_on_one_process,
    train_recipe,
)
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.diffusion import Diffusion, Settings, frechet_distance, nearest, picture

needs_digits = pytest.mark.skipif(missing_data("image") is not None, reason="scikit-learn is not installed")

TOY = {
    "steps": 6,
    "epochs": "none",
    "batch": 20,  # not a multiple of 8: shares of 2 and 3 images
    "width": 8,
    "times": 20,
    "samples": 30,
    "draw_steps": 3,
}
MEASURED = ("valid_loss", "recognized", "frechet", "frechet_train")

train = partial(train_recipe, "diffusion", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("diffusion", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@needs_digits
@pytest.mark.ci
def test_two_and_three_processes_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    for ranks in (2, 3):
        result, screen = train(tmp_path / str(ranks), ranks)
        assert f"validation: noise loss {result['valid_loss']:.4f}" in screen
        assert_same_run(result, reference, *MEASURED)


@needs_digits
@pytest.mark.slow
def test_resumed_and_sharded_runs_match_one_process(tmp_path: Path, reference: dict[str, Any]) -> None:
    assert_same_run(resume_on_three_processes("diffusion", tmp_path / "run", TOY), reference, *MEASURED)
    sharded, _ = train(tmp_path / "sharded", 2, sets={**TOY, "parallel.shard": 2})
    assert_same_run(sharded, reference, *MEASURED)


@needs_digits
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drawn_digits_look_like_digits(tmp_path: Path) -> None:
    result, _ = train(tmp_path / "run", 2, sets={})
    assert result["recognized"] > 0.9
    assert result["frechet"] < 5 * result["frechet_train"]


class Knows(nn.Module):
    """A model that knows the one image that there is, and so its noise."""

    def __init__(self, diffusion: Diffusion, image: torch.Tensor) -> None:
        super().__init__()
        self.diffusion, self.image = diffusion, image

    def forward(self, images: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = self.diffusion.kept[(times * len(self.diffusion.kept)).round().long(), None, None, None]
        return (images - kept.sqrt() * self.image) / (1 - kept).sqrt()


def test_a_model_without_errors_draws_its_image() -> None:
    diffusion, image = Diffusion(50), torch.rand(1, 1, 4, 4) * 2 - 1
    model = Knows(diffusion, image)
    batch = [image.expand(7, -1, -1, -1), torch.zeros(7).long()]
    assert diffusion.errors(model, batch).abs().max() < 1e-3
    drawn = diffusion.draw(model, torch.zeros(3).long(), (1, 4, 4), 10)
    torch.testing.assert_close(drawn, image.expand(3, -1, -1, -1), atol=1e-3, rtol=0)


def test_the_distance_of_known_distributions() -> None:
    """Of two normal distributions with the same covariance it is the squared distance of the means."""
    torch.manual_seed(1)
    images = torch.randn(500, 1, 2, 2)
    assert frechet_distance(images, images) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(images, images + 2) == pytest.approx(16, rel=1e-6)
    cov = torch.cov(images.flatten(1).double().T)
    assert frechet_distance(images, 3 * images) > 4 * cov.trace().item() * 0.9


def test_pictures_and_nearest_images() -> None:
    known = torch.stack([torch.full((1, 3, 2), value) for value in (-1.0, 0.0, 1.0)])
    assert nearest(known + 0.3, known, torch.tensor([4, 5, 6])).tolist() == [4, 5, 6]
    whole = picture(known.repeat(3, 1, 1, 1), 3)
    assert whole.shape == (1, 9, 6)
    assert whole[0, 0].tolist() == [0, 0, 0.5, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draw_steps": 300}, "draw_steps=300 with times=200.*--set draw_steps=25"),
        ({"parallel": ParallelSettings(tensor=2)}, r"does not support parallel\.tensor=2"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(**changes)
