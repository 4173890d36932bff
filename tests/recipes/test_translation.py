"""Train the translation recipe with small settings, and with its defaults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.training import assert_same_run, resume_on_three_processes, train_on_one_process, train_recipe
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.datasets.sentence_pairs import END, PAD, START
from unisono.recipes.translation import Settings, Translator, collate, correct, greedy

TOY = {
    "steps": 6,
    "epochs": "none",
    "batch": 20,  # not a multiple of 8: shares of 2 and 3 pairs
    "pairs": 300,
    "width": 16,
    "depth": 1,
    "heads": 2,
}

train = partial(train_recipe, "translation", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("translation", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.ci
def test_two_and_three_processes_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    for ranks, more in ((2, {"loader.workers": 1}), (3, {})):
        result, screen = train(tmp_path / str(ranks), ranks, sets={**TOY, **more})
        assert "numbers in English and German" in screen
        assert f"validation: {result['exact']:.1%} of 14 held-out sentences" in screen
        assert_same_run(result, reference, "exact", "words", "padding")


@pytest.mark.slow
def test_resumed_and_sharded_runs_match_one_process(tmp_path: Path, reference: dict[str, Any]) -> None:
    assert_same_run(resume_on_three_processes("translation", tmp_path / "run", TOY), reference, "exact", "words")
    sharded, _ = train(tmp_path / "sharded", 2, sets={**TOY, "parallel.shard": 2})
    assert_same_run(sharded, reference, "exact", "words")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_numbers_are_translated_with_the_defaults(tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2, sets={})[0]["exact"] > 0.9


def test_padding_changes_no_output() -> None:
    torch.manual_seed(1)
    model = Translator(12, 14, Settings(width=16, depth=1, heads=2)).eval()
    short, long = (
        (torch.tensor([5, 6, END]), torch.tensor([7, END])),
        (torch.tensor([5, 4, 9, 8, END]), torch.ones(6).long()),
    )
    (source, inputs, targets), (alone, alone_inputs, _) = collate([short, long]), collate([short])
    assert inputs[0].tolist() == [START, 7, END, PAD, PAD, PAD]
    assert targets[0].tolist() == [7, END, PAD, PAD, PAD, PAD]
    torch.testing.assert_close(model(source, inputs)[0, :2], model(alone, alone_inputs)[0])
    torch.testing.assert_close(greedy(model, source, 8)[0], greedy(model, alone, 8)[0])


def test_a_sentence_is_right_if_all_its_words_are() -> None:
    output = torch.tensor([[7, END, PAD, PAD], [7, 8, END, PAD], [7, 9, END, PAD]])
    targets = torch.tensor([[7, END, PAD], [7, 8, END], [7, 8, END]])
    found = correct(output, targets, targets, targets)
    assert [(int(total), int(weight)) for total, weight in found.values()] == [(2, 3), (7, 8)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 30, "heads": 4}, "width=30 with heads=4.*--set width=32"),
        ({"parallel": ParallelSettings(context=2)}, r"does not support parallel\.context=2"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        Settings(**changes)
