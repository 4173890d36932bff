"""Spoken words with labels, for the speech recipe.

    load_spoken_words(data=Path("words"))   words/yes/a.wav, words/no/b.wav, ...: any words, in any language
    load_spoken_words("spoken")             digits in about 100 synthetic voices; validation uses held-out voices
    load_spoken_words("recorded")           digits recorded once each by a person, and random variations of them

`SpokenWords.summary()` says what the validation set consists of, and so what its accuracy means.
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
from unisono.recipes.datasets.class_folders import files_by_class, files_of
from unisono.recipes.datasets.espeak import SynthesizerError, Utterance, say, variants
from unisono.recipes.datasets.held_out import held_out, keyed_hash
from unisono.recipes.datasets.wav import check_waves, read_wave

Source = Literal["auto", "spoken", "recorded"]

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

VALID_SHARE = 0.2
"""The fraction of voices (of files, where voices are not known) for validation."""

RATE = 8_000
"""Sampling rate of the digits, in Hz: that of telephones and of the recordings."""

_SPOKEN_TO_RATE = (441, 160)  # 22,050 Hz to 8,000 Hz

RECORDED = Path("/usr/share/asterisk/sounds/en_US_f_Allison/digits")
"""Where Debian's package asterisk-core-sounds-en-wav has 0.wav to 9.wav: one speaker's voice, CC-BY-SA 3.0."""

_HASH_KEY = "unisono: voices"

_ACCENTS = (  # eSpeak NG's names of varieties of English
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
    """Waveforms as (samples, label): float32 [samples] from -1 to 1, and the index of the word.

    Args:
        clips: 16-bit samples, which stay in memory, or paths of mono wave files, which are read when indexed.
        labels: The index of each clip's word.
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
    """Spoken words for training and validation."""

    name: str
    license: str
    words: tuple[str, ...]
    """Label i is the word words[i]."""
    rate: int
    """Sampling rate, in Hz."""
    train: Clips
    valid: Clips
    validation: str
    """How the validation clips differ from the training clips."""
    synthetic: bool
    """The digits are spoken by the synthesizer."""
    digest: str
    """The first 12 digits of a sha256 over all clips, or over the names and lengths of files."""

    def summary(self) -> str:
        """Return name, size, meaning of the validation, license and digest, in one line."""
        return (
            f"{self.name}: {len(self.words)} words at {self.rate:,} Hz, {len(self.train):,} clips for training, "
            f"{len(self.valid):,} for validation {self.validation}, license {self.license}, digest {self.digest}"
        )


def load_spoken_words(
    source: Source = "auto", *, data: Path | None = None, count: int = 1000, draws: int = 4, seed: int = 0
) -> SpokenWords:
    """Load spoken words. Equal arguments give equal data, on every process.

    Args:
        source: "recorded" (digits of the Debian package), "spoken" (digits of the synthesizer), or "auto": the first of
            these that is installed. Only "spoken" has enough voices to validate on new ones.
        data: A folder with one folder of wave files per word. It takes precedence over the source.
        count: Largest number of synthetic voices.
        draws: Number of clips per voice and word. Of recordings, 32 times as many are made.
        seed: Seed of speed, pitch and accent.

    Raises:
        DataError: The data is missing or invalid.
    """
    if data is not None:
        return _load_folder(data)
    if min(count, draws) < 1:
        raise DataError(
            f"Cannot generate digits with voices={count} and draws={draws}.",
            "Both must be at least 1.",
            f"--set {'voices' if count < 1 else 'draws'}=8",
        )
    if source == "recorded" or (source == "auto" and RECORDED.is_dir()):
        return _vary_recordings(draws, seed)
    return _synthesize(count, draws, seed)


def clips_of(path: Path, rate: int) -> tuple[list[Path], Clips]:
    """Return a wave file, or those of a folder, sorted by name, and their clips with numbers as labels.

    Raises:
        DataError: There are none, or their sampling rate is not `rate`, in Hz.
    """
    files = files_of(path, "wave files", {".wav"})
    found, _ = check_waves(files)
    if found != rate:
        fact = f"They have {found:,} Hz, and it was trained with {rate:,} Hz."
        raise DataError(f"The clips of {path} do not fit the model.", fact, f"sox IN.wav -r {rate} OUT.wav")
    return files, Clips(files, range(len(files)))


def load_recorded_digits() -> Clips | None:
    """Load a person's ten digits, one clip each, from the Debian package; None if it is not installed."""
    paths = _recorded_paths()
    return Clips(paths, range(len(DIGITS))) if all(path.is_file() for path in paths) else None


def _recorded_paths() -> list[Path]:
    return [RECORDED / f"{digit}.wav" for digit in range(len(DIGITS))]


# -- a user's folder


def _load_folder(folder: Path) -> SpokenWords:
    files = files_by_class(folder, "wave files", {".wav"}, ignored="._")
    samples = {path.relative_to(folder).as_posix(): path for paths in files.values() for path in paths}
    rate, lengths = check_waves(list(samples.values()))
    digest = hashlib.sha256()
    for name, length in zip(samples, lengths, strict=True):
        digest.update(f"{name}\0{length}\0".encode())
    held_voices = _held_out_voices(files)
    train: list[tuple[Path, int]] = []
    valid: list[tuple[Path, int]] = []
    for label, paths in enumerate(files.values()):
        held_names = held_out((path.relative_to(folder).as_posix() for path in paths), VALID_SHARE, _HASH_KEY)
        for path in paths:
            if held_voices:
                held = _voice_of(path) in held_voices
            else:
                held = path.relative_to(folder).as_posix() in held_names
            (valid if held else train).append((path, label))
    return SpokenWords(
        name=f"wave files in {folder}",
        license="your own",
        words=tuple(files),
        rate=rate,
        train=Clips(*zip(*train, strict=True)),
        valid=Clips(*zip(*valid, strict=True)),
        validation=f"in {_count_voices(len(held_voices))}, by the part of file names before the first _"
        if held_voices
        else "in other files, maybe of the same voices (file names do not tell them)",
        synthetic=False,
        digest=digest.hexdigest()[:12],
    )


def _voice_of(path: Path) -> str:
    """Return the voice in names like 3fa1_0.wav."""
    return path.stem.partition("_")[0]


def _held_out_voices(files: dict[str, list[Path]]) -> set[str]:
    """Choose the voices for validation; none if file names do not tell voices, or a word would lack one of the sets."""
    voices = {_voice_of(path) for paths in files.values() for path in paths}
    held = held_out(sorted(voices), VALID_SHARE, _HASH_KEY)
    sides = [{_voice_of(path) in held for path in paths} for paths in files.values()]
    repeated = len(voices) < sum(len(paths) for paths in files.values())
    return held if repeated and all(len(side) == 2 for side in sides) else set()


# -- digits in synthetic voices


def _synthesize(count: int, draws: int, seed: int) -> SpokenWords:
    """Let each voice speak each digit `draws` times, each time with random speed, pitch and accent."""
    try:
        train_voices, valid_voices = split_voices(variants(), count)
        rng = np.random.Generator(np.random.PCG64(seed))
        spoken = [(voice, digit) for voice in train_voices + valid_voices for digit in DIGITS * draws]
        utterances = [
            Utterance(
                text=digit,
                voice=f"{_ACCENTS[rng.integers(len(_ACCENTS))]}+{voice}",
                speed=int(rng.integers(120, 220)),
                pitch=int(rng.integers(25, 76)),
            )
            for voice, digit in spoken
        ]
        waveforms = [np.frombuffer(clip, np.int16) for clip in say(utterances, seed)]
    except SynthesizerError as error:
        raise DataError(
            "Cannot synthesize digits, and --set data=FOLDER is not given.",
            f"The synthesizer eSpeak NG failed: {error}.",
            "pip install 'unisono[recipes]', or --set data=FOLDER with one folder of wave files per word.",
        ) from error
    clips = [_resample(waveform, *_SPOKEN_TO_RATE) for waveform in waveforms]
    labels = [DIGITS.index(digit) for _, digit in spoken]
    train_size = len(train_voices) * len(DIGITS) * draws
    return SpokenWords(
        name=f"digits spoken by eSpeak NG in {len(train_voices) + len(valid_voices)} voices",
        license="GPL-3+ for the synthesizer, none for its speech",
        words=DIGITS,
        rate=RATE,
        train=Clips(clips[:train_size], labels[:train_size]),
        valid=Clips(clips[train_size:], labels[train_size:]),
        validation=f"in {_count_voices(len(valid_voices))}, all synthetic",
        synthetic=True,
        digest=_digest(clips),
    )


def split_voices(names: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """Split up to `count` of these voices into training and validation: a fifth for validation, at least one.

    Variants of one voice (Mike and mike2, f1 and f2) are in the same part.

    Raises:
        DataError: All chosen voices are variants of one voice.
    """
    ranked = sorted(names, key=lambda name: (keyed_hash(_family(name), _HASH_KEY), name))[:count]
    valid_size = max(1, round(VALID_SHARE * len(ranked)))
    while valid_size < len(ranked) and _family(ranked[valid_size]) == _family(ranked[valid_size - 1]):
        valid_size += 1
    if valid_size >= len(ranked):
        raise DataError(
            f"Cannot split {len(ranked)} voices into training and validation.",
            f"Of {len(names)} voices, voices={count} takes {len(ranked)}, and they are variants of one voice.",
            f"--set voices={max(8, count + 8)}",
        )
    return ranked[valid_size:], ranked[:valid_size]


def _family(name: str) -> str:
    return name.rstrip("0123456789").lower().removesuffix("robot")


# -- variations of ten recordings


def _vary_recordings(draws: int, seed: int) -> SpokenWords:
    """Change speed (and with it pitch), loudness and start of ten recordings at random."""
    digits = load_recorded_digits()
    if digits is None:
        raise DataError(
            "Cannot load recorded digits (source=recorded): they are not installed.",
            f"{RECORDED} does not have 0.wav to 9.wav.",
            "apt-get install asterisk-core-sounds-en-wav, or --set source=spoken.",
        )
    check_waves(_recorded_paths())
    rng = np.random.Generator(np.random.PCG64(seed))
    clips = []
    labels = []
    for _ in range(32 * draws):  # as many clips as from 32 synthetic voices
        for waveform, label in (digits[i] for i in range(len(digits))):
            scaled = waveform.numpy() * 2**15 * rng.uniform(0.3, 1.0)
            stretched = _resample(scaled, int(rng.integers(80, 126)), 100)
            silence = torch.zeros(int(rng.integers(RATE // 10)), dtype=torch.int16)
            clips.append(torch.cat((silence, stretched)))
            labels.append(label)
    train_size = round(len(clips) * (1 - VALID_SHARE))
    return SpokenWords(
        name="digits recorded by one speaker (Allison Smith, asterisk-core-sounds-en-wav)",
        license="CC-BY-SA 3.0",
        words=DIGITS,
        rate=RATE,
        train=Clips(clips[:train_size], labels[:train_size]),
        valid=Clips(clips[train_size:], labels[train_size:]),
        validation="on variations of the SAME ten recordings (which say nothing about other voices)",
        synthetic=False,
        digest=_digest(clips),
    )


# -- shared by all sources


def _resample(waveform: np.ndarray, down: int, up: int) -> Tensor:
    """Resample to `up` 16-bit samples for each `down`, by truncating or padding the spectrum.

    Padding with silence to a multiple of `down` gives both FFTs lengths with small factors, which are quick.
    """
    blocks = max(1, -(-len(waveform) // down))
    spectrum = np.fft.rfft(waveform.astype(np.float64), blocks * down)
    resampled = np.fft.irfft(spectrum[: blocks * up // 2 + 1], blocks * up) * (up / down)
    return torch.from_numpy(np.clip(np.rint(resampled), -(2**15), 2**15 - 1).astype(np.int16))


def _count_voices(count: int) -> str:
    return f"{count} held-out voice{'s' * (count > 1)}"


def _digest(clips: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for clip in clips:
        digest.update(len(clip).to_bytes(8) + clip.numpy().tobytes())
    return digest.hexdigest()[:12]
