"""The speech recipe at toy size, on words that are tones and on a few synthetic voices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.loops import attempt
from tests.recipes.tones import cut_short, write_words
from tests.recipes.training import needs_data, same_run, train_alone, train_recipe
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.speech import Settings, main
from unisono.testing import run_ranks

TOY = {
    "steps": 5,
    "batch": 10,  # not a multiple of 8: shares of 1 and 2 clips, of unlike lengths
    "voices": 6,
    "draws": 1,
    "source": "spoken",
    "model.mels": 12,
    "model.width": 8,
    "model.depth": 2,
}

train = partial(train_recipe, "speech", sets=TOY)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    needs_data("speech")
    return train_alone("speech", tmp_path_factory.mktemp("alone") / "run", sets=TOY)


def test_it_trains_and_says_so(tmp_path: Path, alone: dict[str, Any]) -> None:
    """With augmentation, which is drawn where the clip is fetched: here in a process that does nothing else."""
    result, screen = train(tmp_path / "run", 2, sets={**TOY, "loader.workers": 1})
    assert (
        "digits spoken by eSpeak NG in 6 voices: 10 words at 8,000 Hz, 50 clips to train on, 10 to validate" in screen
    )
    assert f"validation: {result['accuracy']:.1%} of 10 clips right, in 1 voice kept apart" in screen
    same_run(result, alone, "accuracy")


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelSettings(tensor=2), "begins with a convolution.*parallel.tensor=1 --set parallel.shard=2"),
        (ParallelSettings(context=2), "no attention.*parallel.context=1 --set parallel.shard=2"),
    ],
)
def test_what_does_not_go_with_it_is_said_before_it_is_made(parallel: ParallelSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(parallel=parallel)


@pytest.mark.slow
def test_words_of_ones_own(tmp_path: Path) -> None:
    """Tones are learnt at once, with the same bits from one process and from two."""
    sets = {**TOY, "steps": 60, "augment": 0.3, "data": write_words(tmp_path / "words")}
    (one, screen), (two, _) = (train(tmp_path / f"run{ranks}", ranks, sets=sets) for ranks in (1, 2))
    assert "3 words at 16,000 Hz" in screen
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["accuracy"] == 1


def test_a_damaged_file_ends_every_process_with_its_name(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "words")
    path = cut_short(folder / "word1" / "voice3_1.wav", 900)
    for told in run_ranks(attempt, 2, tmp_path / "run", main, Settings(data=folder)):
        assert f"Train on {path}." in told
        assert "Its header tells of 3,360 samples, but it ends after 900 bytes." in told


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_learns(tmp_path: Path) -> None:
    """The recipe as it stands, on two processes: voices it has never heard are understood."""
    needs_data("speech")
    assert train(tmp_path / "run", 2, sets={"source": "spoken"})[0]["accuracy"] >= 0.9
