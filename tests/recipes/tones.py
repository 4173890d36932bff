"""Write wave files for tests: each word is a tone, with one folder per word."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np


def write_wave(
    path: Path, *, hertz: float = 440.0, seconds: float = 0.2, rate: int = 16_000, channels: int = 1, width: int = 2
) -> Path:
    """Write a tone as PCM of `width` bytes per sample, the same in each channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    samples = np.repeat(np.rint(tone * (2 ** (8 * width - 1) - 1)).astype("<i8"), channels)
    if width == 1:
        samples += 128
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return path


def write_words(folder: Path, *, words: int = 3, voices: int = 5) -> Path:
    """Write words with a pitch each, in voices that vary it a little. Files have names like voice0_0.wav."""
    for word in range(words):
        for voice in range(voices):
            name = f"voice{voice}_{word}.wav"
            hertz = 300 * 1.5**word * (1 + 0.02 * voice)
            write_wave(folder / f"word{word}" / name, hertz=hertz, seconds=0.15 + 0.02 * voice)
    return folder


def cut_short(path: Path, size: int) -> Path:
    """Truncate a file to `size` bytes."""
    path.write_bytes(path.read_bytes()[:size])
    return path
