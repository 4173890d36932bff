"""Train the speech recipe with small settings, on tones and on a few synthetic voices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.loops import attempt
from tests.recipes.tones import cut_short, write_words
from tests.recipes.training import assert_same_run, skip_without_data, train_on_one_process, train_recipe
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.speech import Settings, main
from unisono.testing import run_ranks

TOY = {
    "steps": 5,
    "batch": 10,  # not a multiple of 8: shares of 1 and 2 clips, of different lengths
    "voices": 6,
    "draws": 1,
    "source": "spoken",
    "model.mels": 12,
    "model.width": 8,
    "model.depth": 2,
}

train = partial(train_recipe, "speech", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    skip_without_data("speech")
    return train_on_one_process("speech", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.slow
def test_two_processes_print_metrics_and_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Each process has a loader worker that augments the clips."""
    result, screen = train(tmp_path / "run", 2, sets={**TOY, "loader.workers": 1})
    assert "digits spoken by eSpeak NG in 6 voices: 10 words at 8,000 Hz, 50 clips for training, 10 for " in screen
    assert f"validation: accuracy {result['accuracy']:.1%} on 10 clips in 1 held-out voice" in screen
    assert_same_run(result, reference, "accuracy")


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelSettings(tensor=2), "begins with a convolution.*parallel.tensor=1 --set parallel.shard=2"),
        (ParallelSettings(context=2), "no attention.*parallel.context=1 --set parallel.shard=2"),
    ],
)
def test_unsupported_parallelism_is_refused(parallel: ParallelSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(parallel=parallel)


@pytest.mark.slow
def test_words_in_a_folder(tmp_path: Path) -> None:
    """Tones are easy to classify, and two processes match one."""
    sets = {**TOY, "steps": 60, "augment": 0.3, "data": write_words(tmp_path / "words")}
    (one, screen), (two, _) = (train(tmp_path / f"run{ranks}", ranks, sets=sets) for ranks in (1, 2))
    assert "3 words at 16,000 Hz" in screen
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["accuracy"] == 1


def test_damaged_file_ends_each_process_with_an_error(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "words")
    path = cut_short(folder / "word1" / "voice3_1.wav", 900)
    for message in run_ranks(attempt, 2, tmp_path / "run", main, Settings(data=folder)):
        assert f"Cannot read {path}." in message
        assert "Its header gives 3,360 samples, but it ends at 900 bytes." in message


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accuracy_on_held_out_voices(tmp_path: Path) -> None:
    skip_without_data("speech")
    assert train(tmp_path / "run", 2, sets={"source": "spoken"})[0]["accuracy"] >= 0.9
