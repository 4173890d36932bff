"""Wave files for tests: words that are tones, in a folder for each."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np


def write_wave(
    path: Path, *, hertz: float = 440.0, seconds: float = 0.2, rate: int = 16_000, channels: int = 1, width: int = 2
) -> Path:
    """A tone as PCM of `width` bytes a sample; every channel has the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    numbers = np.repeat(np.rint(tone * (2 ** (8 * width - 1) - 1)).astype("<i8"), channels)
    if width == 1:
        numbers += 128
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(numbers.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return path


def write_words(folder: Path, *, words: int = 3, voices: int = 5) -> Path:
    """Words of another pitch each, said by voices that differ a little; files are named as in anna_0.wav."""
    for word in range(words):
        for voice in range(voices):
            name = f"voice{voice}_{word}.wav"
            hertz = 300 * 1.5**word * (1 + 0.02 * voice)
            write_wave(folder / f"word{word}" / name, hertz=hertz, seconds=0.15 + 0.02 * voice)
    return folder


def cut_short(path: Path, size: int) -> Path:
    """Leave only the first `size` bytes of a file."""
    path.write_bytes(path.read_bytes()[:size])
    return path
