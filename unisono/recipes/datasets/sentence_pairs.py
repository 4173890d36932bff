"""Sentences and their translations: numbers in English and German words, or a user's own pairs.

    forty two thousand one  ->  zwei und vierzig tausend eins

German puts the ones before the tens, joins them with "und", and changes "eins" to "ein" or "eine" before other words.
So a translation needs another order and other words, and has one right answer. The numbers are drawn with a seed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unisono import DataError
from unisono.recipes.datasets.held_out import held_out

PAD, START, END, UNKNOWN = range(4)
"""Tokens that are no words."""
SPECIAL = ("<pad>", "<start>", "<end>", "<unknown>")
DIGITS = 9
"""The most digits of a number."""
VALID_SHARE = 0.05
"""The fraction of the pairs for validation."""

_HASH_KEY = "unisono: sentence pairs"
_ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_EINS = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
_ZEHN = ["zehn", "elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"]
_ZWANZIG = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]

Pair = tuple[str, str]
"""A sentence and its translation, each of words with spaces between them."""


class Vocabulary:
    """The words of one language, numbered by their frequency."""

    def __init__(self, sentences: Sequence[str], most: int = 20_000) -> None:
        counts = Counter(word for sentence in sentences for word in sentence.split())
        words = sorted(counts, key=lambda word: (-counts[word], word))[:most]
        self.words = (*SPECIAL, *words)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: str) -> Tensor:
        """Return the tokens of a sentence and END: int64 [words + 1]."""
        return torch.tensor([*(self._numbers.get(word, UNKNOWN) for word in sentence.split()), END])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the words before END."""
        tokens = list(tokens)
        return " ".join(self.words[token] for token in tokens[: tokens.index(END) if END in tokens else None])


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs for training and validation, as tokens. A sample is (source, target), each ends with END."""

    name: str
    license: str
    source: Vocabulary
    target: Vocabulary
    train: list[tuple[Tensor, Tensor]]
    valid: list[tuple[Tensor, Tensor]]
    digest: str
    """The first 12 digits of the sha256 over all pairs: equal digests, equal data."""

    @property
    def longest(self) -> int:
        """The most tokens of a sentence, END included."""
        return max(len(tokens) for pair in (*self.train, *self.valid) for tokens in pair)

    def summary(self) -> str:
        """Return name, size, license and digest, in one line."""
        return (
            f"{self.name}: {len(self.train):,} pairs for training, {len(self.valid):,} others for validation, "
            f"{len(self.source):,} and {len(self.target):,} words, license {self.license}, digest {self.digest}"
        )


def load_pairs(data: Path | None = None, count: int = 20_000, seed: int = 1) -> Pairs:
    """Load sentence pairs. A hash of the source sentence chooses the pairs for validation.

    Args:
        data: a file with a pair in each line: a sentence, a tab, its translation. None: numbers in words.
        count: of numbers that are drawn. Each has 1 to 9 digits, equally often; repeated ones count once.
        seed: of the numbers.

    Raises:
        DataError: a line is no pair, or there are fewer than two pairs.
    """
    if data is None:
        name, license_ = "numbers in English and German", "none"
        pairs = [(english(number), german(number)) for number in draw_numbers(count, seed)]
    else:
        name, license_, pairs = f"sentence pairs of {data}", "your own", read_pairs(data)
    valid = held_out({source for source, _ in pairs}, VALID_SHARE, _HASH_KEY)
    train = [pair for pair in pairs if pair[0] not in valid]
    if not train:
        raise DataError(
            f"Cannot split {name} into training and validation.",
            f"There is {len(pairs)} sentence.",
            "at least two sentences.",
        )
    source, target = Vocabulary([pair[0] for pair in train]), Vocabulary([pair[1] for pair in train])
    digest = hashlib.sha256("\n".join(f"{source}\t{target}" for source, target in pairs).encode()).hexdigest()[:12]

    def encoded(part: list[Pair]) -> list[tuple[Tensor, Tensor]]:
        return [(source.encode(one), target.encode(other)) for one, other in part]

    held = sorted((pair for pair in pairs if pair[0] in valid), key=lambda pair: len(pair[0].split()))
    return Pairs(name, license_, source, target, encoded(train), encoded(held), digest)


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of pairs, which are separated by a tab. Empty lines are left out."""
    pairs = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}.", f"{error}.", "--set data=FILE, a text in UTF-8.") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = [" ".join(part.split()) for part in line.split("\t")]
        if len(parts) != 2 or not all(parts):
            raise DataError(
                f"Line {number} of {path} is no pair.",
                f"It has {len(parts)} parts with tabs between them: {line[:60]!r}.",
                "a sentence, a tab, its translation.",
            )
        pairs.append((parts[0], parts[1]))
    if len(pairs) < 2:
        raise DataError(f"{path} has {len(pairs)} pairs.", "A part of them is for validation.", "at least two lines.")
    return pairs


def draw_numbers(count: int, seed: int) -> list[int]:
    """Draw numbers of 1 to DIGITS digits, each number of digits equally often, and return each once, in order."""
    rng = np.random.Generator(np.random.PCG64(seed))
    digits = rng.integers(0, DIGITS, count)
    return sorted({int(10**d + rng.random() * 9 * 10**d) for d in digits})


def english(number: int) -> str:
    """Return the words of a number from 1 to 999,999,999 in English, with a space between the words."""
    words = []
    for size, name in ((1_000_000, "million"), (1000, "thousand"), (1, "")):
        count, number = divmod(number, size)
        hundreds, rest = divmod(count, 100)
        words += [_ONES[hundreds - 1], "hundred"] if hundreds else []
        if rest >= 20:
            words += [_TENS[rest // 10 - 2], *([_ONES[rest % 10 - 1]] if rest % 10 else [])]
        elif rest >= 10:
            words.append(_TEENS[rest - 10])
        elif rest:
            words.append(_ONES[rest - 1])
        words += [name] if count and name else []
    return " ".join(words)


def german(number: int) -> str:
    """Return the words of a number from 1 to 999,999,999 in German, with a space between their parts."""
    words = []
    for size, name in ((1_000_000, "Millionen"), (1000, "tausend"), (1, "")):
        count, number = divmod(number, size)
        if count == 1 and name == "Millionen":
            words += ["eine", "Million"]
            continue
        hundreds, rest = divmod(count, 100)
        words += [_ein(hundreds), "hundert"] if hundreds else []
        if rest >= 20:
            words += [*([_ein(rest % 10), "und"] if rest % 10 else []), _ZWANZIG[rest // 10 - 2]]
        elif rest >= 10:
            words.append(_ZEHN[rest - 10])
        elif rest:
            words.append(_EINS[rest - 1] if not name else "eine" if name == "Millionen" and rest == 1 else _ein(rest))
        words += [name] if count and name else []
    return " ".join(words)


def _ein(digit: int) -> str:
    """Return a digit in German as it is before another word: "ein" in place of "eins"."""
    return "ein" if digit == 1 else _EINS[digit - 1]
