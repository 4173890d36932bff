"""Spoken words with their labels: recordings of one's own, or digits that a synthesizer says in about 100 voices.

    voices(data=Path("words"))    words/yes/a.wav, words/no/b.wav, ...: any words, any languages
    voices("spoken")              the digits, said by eSpeak NG: the validation is in voices that nobody has trained on
    voices("recorded")            the digits, said once each by a person, and draws of these: see `recorded_digits`

A part of it is for validation, and `SpokenWords.line()` says what that part can tell and what not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono import DataError
from unisono.recipes.datasets.espeak import NoSpeech, Utterance, say, variants
from unisono.recipes.datasets.wav import check_waves, labelled_waves, read_wave

Source = Literal["auto", "spoken", "recorded"]

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

VALID_SHARE = 0.2
"""The share of voices (of files, where voices are not known) that are kept for validation."""

RATE = 8_000
"""Samples a second of the digits: a telephone's, as the recorded ones have."""

_SPOKEN_TO_RATE = (441, 160)  # 22,050 Hz to 8,000 Hz

RECORDED = Path("/usr/share/asterisk/sounds/en_US_f_Allison/digits")
"""Where the Debian package asterisk-core-sounds-en-wav puts 0.wav to 9.wav: a speaker's voice, CC-BY-SA 3.0."""

# The names that eSpeak NG gives English as it is spoken here and there.
_ACCENTS = (
    "en",
    "en-us",
    "en-gb-x-rp",
    "en-gb-scotland",
    "en-us-nyc",
    "en-029",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
)


class Clips(Dataset[tuple[Tensor, int]]):
    """Clips of sound, each as (samples, label): float32 [samples] from -1 to 1, and the number of its word.

    A clip is given as 16-bit samples, which stay in memory, or as the path of a mono wave file, read when it is asked.
    """

    def __init__(self, clips: Sequence[Tensor | Path], labels: Sequence[int]) -> None:
        assert len(clips) == len(labels)
        self.clips, self.labels = list(clips), list(labels)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        clip = self.clips[index]
        return read_wave(clip) if isinstance(clip, Path) else clip / 2**15, self.labels[index]


@dataclass(frozen=True)
class SpokenWords:
    """Spoken words in two parts."""

    name: str
    licence: str
    words: tuple[str, ...]
    """What the labels mean: label i is words[i]."""
    rate: int
    """Samples a second."""
    train: Clips
    valid: Clips
    validation: str
    """What the validation is on, in words."""
    spoken: bool
    """Are these the synthesizer's digits?"""
    digest: str
    """The first 12 digits of a sha256 over all clips, or over the names and lengths of files."""

    def line(self) -> str:
        """What the data is, how much, under which licence, and what the validation means: one line."""
        return (
            f"{self.name}: {len(self.words)} words at {self.rate:,} Hz, {len(self.train):,} clips to train on, "
            f"{len(self.valid):,} to validate on ({self.validation}), licence {self.licence}, digest {self.digest}"
        )


def voices(
    source: Source = "auto", *, data: Path | None = None, count: int = 1000, draws: int = 4, seed: int = 0
) -> SpokenWords:
    """The words to learn; equal arguments give equal data, in every process.

    source  recorded: digits of the Debian package; spoken: digits of the synthesizer; auto: the first of them that is
            there, in this order. Only many voices can show what a model makes of a new one, so try both
    data    a folder of folders of wave files, one for each word: it is taken, whatever the source
    count   of synthetic voices, at most: fewer are sooner said
    draws   how often a voice says a word; of a recording 32 times as many are drawn
    seed    of speed, pitch and accent

    Raises DataError where the data lacks, or is not what it should be.
    """
    if data is not None:
        return _own(data)
    if min(count, draws) < 1:
        raise DataError(
            f"Digits were asked for, with voices={count} and draws={draws}.",
            "Both are counts, and with less than 1 of them nothing is said.",
            f"--set {'voices' if count < 1 else 'draws'}=8",
        )
    if source == "recorded" or (source == "auto" and RECORDED.is_dir()):
        return _recorded(draws, seed)
    return _spoken(count, draws, seed)


def recorded_digits() -> Clips | None:
    """A person's ten digits, one clip each, from the Debian package; None where it is not installed."""
    paths = [RECORDED / f"{digit}.wav" for digit in range(len(DIGITS))]
    return Clips(paths, range(len(DIGITS))) if all(path.is_file() for path in paths) else None


# -- a folder of one's own


def _own(folder: Path) -> SpokenWords:
    files = labelled_waves(folder)
    rate, lengths = check_waves(files)
    digest = hashlib.sha256()
    for path, length in zip((path for paths in files.values() for path in paths), lengths, strict=True):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{length}\0".encode())
    held = _held_voices(files)
    train: list[tuple[Path, int]] = []
    valid: list[tuple[Path, int]] = []
    for label, paths in enumerate(files.values()):
        ranked = sorted(paths, key=lambda path: _draw(path.relative_to(folder).as_posix()))
        chosen = set(ranked[: max(1, round(VALID_SHARE * len(paths)))])
        for path in paths:
            (valid if (_voice_of(path) in held if held else path in chosen) else train).append((path, label))
    return SpokenWords(
        name=f"wave files in {folder}",
        licence="your own",
        words=tuple(files),
        rate=rate,
        train=Clips(*zip(*train, strict=True)),
        valid=Clips(*zip(*valid, strict=True)),
        validation=f"in {_voices(len(held))} kept apart, by file names up to the first _"
        if held
        else "other files; whether of other voices, their names do not say",
        spoken=False,
        digest=digest.hexdigest()[:12],
    )


def _voice_of(path: Path) -> str:
    """Whose voice it is, where files are named as in 3fa1_0.wav."""
    return path.stem.partition("_")[0]


def _held_voices(files: dict[str, list[Path]]) -> set[str]:
    """The voices to validate on; none if names do not tell voices: then some word would be left without a clip."""
    everyone = sorted({_voice_of(path) for paths in files.values() for path in paths}, key=_draw)
    held = set(everyone[: max(1, round(VALID_SHARE * len(everyone)))])
    parts = [{_voice_of(path) in held for path in paths} for paths in files.values()]
    repeated = len(everyone) < sum(len(paths) for paths in files.values())
    return held if repeated and all(len(part) == 2 for part in parts) else set()


# -- digits of many synthetic voices


def _spoken(count: int, draws: int, seed: int) -> SpokenWords:
    """Each voice says each digit `draws` times, every time with another speed, pitch and accent."""
    try:
        train_voices, valid_voices = split_voices(variants(), count)
        dice = np.random.Generator(np.random.PCG64(seed))
        spoken = [(voice, digit) for voice in train_voices + valid_voices for digit in DIGITS * draws]
        utterances = [
            Utterance(
                text=digit,
                voice=f"{_ACCENTS[dice.integers(len(_ACCENTS))]}+{voice}",
                speed=int(dice.integers(120, 220)),
                pitch=int(dice.integers(25, 76)),
            )
            for voice, digit in spoken
        ]
        sounds = [np.frombuffer(sound, np.int16) for sound in say(utterances, seed)]
    except NoSpeech as why:
        raise DataError(
            "The speech recipe was asked for spoken digits, and no folder of wave files was named.",
            f"The synthesizer eSpeak NG does not speak: {why}.",
            "pip install 'unisono[recipes]', or bring your own: --set data=FOLDER, with one folder a word.",
        ) from why
    clips = [_resampled(sound, *_SPOKEN_TO_RATE) for sound in sounds]
    labels = [DIGITS.index(digit) for _, digit in spoken]
    cut = len(train_voices) * len(DIGITS) * draws
    return SpokenWords(
        name=f"digits spoken by eSpeak NG in {len(train_voices) + len(valid_voices)} voices",
        licence="that of the synthesizer is GPL-3+, what it says is free",
        words=DIGITS,
        rate=RATE,
        train=Clips(clips[:cut], labels[:cut]),
        valid=Clips(clips[cut:], labels[cut:]),
        validation=f"in {_voices(len(valid_voices))} kept apart, all synthetic",
        spoken=True,
        digest=_digest(clips),
    )


def split_voices(names: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """`count` of these voices, or all, as (to train on, to validate on): a fifth of them, at least one.

    Mike and mike2, f1 and f2 are one family, and a family is wholly on one side. DataError for fewer than two families.
    """
    ranked = sorted(names, key=lambda name: (_draw(_family(name)), name))[:count]
    cut = max(1, round(VALID_SHARE * len(ranked)))
    while cut < len(ranked) and _family(ranked[cut]) == _family(ranked[cut - 1]):
        cut += 1
    if cut >= len(ranked):
        raise DataError(
            f"{count} voices were asked for.",
            f"Of {len(names)} voices {len(ranked)} were taken, all of one family: none is left to validate on.",
            f"--set voices={max(8, count + 8)}",
        )
    return ranked[cut:], ranked[:cut]


def _family(name: str) -> str:
    return name.rstrip("0123456789").lower().removesuffix("robot")


# -- ten recordings of one person


def _recorded(draws: int, seed: int) -> SpokenWords:
    """Draws of the ten recordings: faster or slower (and so higher or lower), louder or softer, a little later."""
    digits = recorded_digits()
    if digits is None:
        raise DataError(
            "The speech recipe was asked for source=recorded.",
            f"{RECORDED} does not have 0.wav to 9.wav.",
            "apt-get install asterisk-core-sounds-en-wav, or --set source=spoken.",
        )
    check_waves({"digits": [RECORDED / f"{digit}.wav" for digit in range(len(DIGITS))]})
    dice = np.random.Generator(np.random.PCG64(seed))
    clips = []
    labels = []
    for _ in range(32 * draws):  # there is one voice, so more of it
        for sound, label in (digits[i] for i in range(len(digits))):
            stretched = _resampled(sound.numpy() * 2**15 * dice.uniform(0.3, 1.0), int(dice.integers(80, 126)), 100)
            late = torch.zeros(int(dice.integers(RATE // 10)), dtype=torch.int16)
            clips.append(torch.cat((late, stretched)))
            labels.append(label)
    cut = round(len(clips) * (1 - VALID_SHARE))
    return SpokenWords(
        name="digits recorded by one speaker (Allison Smith, asterisk-core-sounds-en-wav)",
        licence="CC-BY-SA 3.0",
        words=DIGITS,
        rate=RATE,
        train=Clips(clips[:cut], labels[:cut]),
        valid=Clips(clips[cut:], labels[cut:]),
        validation="other draws of speed and loudness of the SAME ten recordings: it says nothing about other voices",
        spoken=False,
        digest=_digest(clips),
    )


# -- what they share


def _resampled(sound: np.ndarray, down: int, up: int) -> Tensor:
    """`up` 16-bit samples for each `down` of `sound`, through its spectrum: what the new rate cannot hold is cut off.

    Silence makes the sound a multiple of `down` long, so that both lengths are products of small numbers: quick ones.
    """
    blocks = max(1, -(-len(sound) // down))
    spectrum = np.fft.rfft(sound.astype(np.float64), blocks * down)
    resampled = np.fft.irfft(spectrum[: blocks * up // 2 + 1], blocks * up) * (up / down)
    return torch.from_numpy(np.clip(np.rint(resampled), -(2**15), 2**15 - 1).astype(np.int16))


def _voices(count: int) -> str:
    return f"{count} voice{'s' * (count > 1)}"


def _digest(clips: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for clip in clips:
        digest.update(len(clip).to_bytes(8) + clip.numpy().tobytes())
    return digest.hexdigest()[:12]


def _draw(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone; the key makes the split this recipe's own."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=b"unisono: voices").digest()
    return int.from_bytes(digest) / 2**64
