"""Sentence pairs: numbers in English and German, a user's file, tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unisono import DataError
from unisono.recipes.datasets.sentence_pairs import END, UNKNOWN, Vocabulary, draw_numbers, english, german, load_pairs


@pytest.mark.parametrize(
    ("number", "one", "other"),
    [
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (21, "twenty one", "ein und zwanzig"),
        (40, "forty", "vierzig"),
        (101, "one hundred one", "ein hundert eins"),
        (1001, "one thousand one", "ein tausend eins"),
        (21_000, "twenty one thousand", "ein und zwanzig tausend"),
        (342_007, "three hundred forty two thousand seven", "drei hundert zwei und vierzig tausend sieben"),
        (1_000_000, "one million", "eine Million"),
        (2_000_011, "two million eleven", "zwei Millionen elf"),
        (101_000_000, "one hundred one million", "ein hundert eine Millionen"),
    ],
)
def test_numbers_in_words(number: int, one: str, other: str) -> None:
    assert (english(number), german(number)) == (one, other)


def test_numbers_of_all_lengths_are_drawn_once() -> None:
    numbers = draw_numbers(5000, seed=1)
    assert numbers == draw_numbers(5000, seed=1)
    assert len(set(numbers)) == len(numbers)
    assert len({len(str(number)) for number in numbers}) == 9
    assert len({german(number) for number in numbers}) == len({english(number) for number in numbers}) == len(numbers)


def test_held_out_pairs_are_not_in_the_training_data() -> None:
    pairs = load_pairs(count=2000)
    train = {tuple(source.tolist()) for source, _ in pairs.train}
    assert 0 < len(pairs.valid) < 0.1 * len(train)
    assert not train & {tuple(source.tolist()) for source, _ in pairs.valid}
    assert all(UNKNOWN not in torch.cat(pair).tolist() and pair[0][-1] == pair[1][-1] == END for pair in pairs.valid)
    source, target = pairs.valid[-1]
    assert pairs.longest >= len(source)
    number = next(n for n in draw_numbers(2000, 1) if english(n) == pairs.source.decode(source.tolist()))
    assert pairs.target.decode(target.tolist()) == german(number)
    assert "numbers in English and German" in pairs.summary()


def test_pairs_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"the cat {i}\tdie  Katze {i}\n\n" for i in range(40)), encoding="utf-8")
    pairs = load_pairs(file)
    assert len(pairs.train) + len(pairs.valid) == 40
    assert pairs.target.decode(pairs.train[0][1].tolist()).startswith("die Katze")


def test_a_line_that_is_no_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("one\teins\ntwo zwei\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"Line 2 of .*pairs\.tsv is no pair"):
        load_pairs(tmp_path / "pairs.tsv")
    with pytest.raises(DataError, match="Cannot read"):
        load_pairs(tmp_path / "missing.tsv")
    (tmp_path / "pairs.tsv").write_text("one\teins\n", encoding="utf-8")
    with pytest.raises(DataError, match="has 1 pairs"):
        load_pairs(tmp_path / "pairs.tsv")


def test_unknown_words_have_a_token() -> None:
    words = Vocabulary(["a b", "b"])
    assert words.words[4:] == ("b", "a")
    assert words.encode("a c").tolist() == [5, UNKNOWN, END]
    assert words.decode([5, 4, END, 4]) == "a b"
