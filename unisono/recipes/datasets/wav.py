"""Read and check wave files with Python's module `wave`: integer samples (PCM) of 8, 16, 24 or 32 bits."""

from __future__ import annotations

import shlex
import wave
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unisono import DataError

MAX_ERRORS = 5
"""With more invalid files than this, the error reports only the first."""


class WavHeader(NamedTuple):
    """The format and length in a wave file's header."""

    channels: int
    rate: int  # Hz
    length: int  # samples per channel


class UnreadableWavError(Exception):
    """A file is not a complete wave file. The message is the reason, as a sentence."""


def read_header(path: Path) -> WavHeader:
    """Read the header of a wave file, and check that the file has all samples.

    Raises:
        UnreadableWavError: It is not a wave file, or not a complete one.
    """
    try:
        with wave.open(str(path), "rb") as file:
            header = WavHeader(file.getnchannels(), file.getframerate(), file.getnframes())
            if not header.length:
                raise UnreadableWavError("It has no samples.")
            file.setpos(header.length - 1)
            if len(file.readframes(1)) < file.getsampwidth() * header.channels:
                size = path.stat().st_size
                raise UnreadableWavError(f"Its header gives {header.length:,} samples, but it ends at {size:,} bytes.")
            return header
    except EOFError:
        raise UnreadableWavError(f"It ends in its header, at {path.stat().st_size:,} bytes.") from None
    except (wave.Error, OSError) as error:
        raise UnreadableWavError(f"It cannot be read: {error}.") from None


def read_wave(path: Path) -> Tensor:
    """Return the samples of a mono wave file: float32 [samples], from -1 to 1.

    Raises:
        DataError: It is not a complete wave file.
    """
    try:
        length = read_header(path).length
        with wave.open(str(path), "rb") as file:
            width, pcm = file.getsampwidth(), file.readframes(length)
    except UnreadableWavError as error:
        raise _damaged(path, str(error)) from None
    return torch.from_numpy(_to_float(pcm, width))


def _damaged(path: Path, fact: str) -> DataError:
    return DataError(f"Cannot read {path}.", fact, f"Copy it again, or: rm {shlex.quote(str(path))}")


def _to_float(pcm: bytes, width: int) -> np.ndarray:
    """Convert little-endian PCM of `width` bytes per sample to float32 from -1 to 1."""
    if width == 1:  # 8-bit samples are unsigned
        return (np.frombuffer(pcm, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:  # numpy has no 24-bit integers: use the upper three bytes of 32-bit ones
        wide = np.zeros((len(pcm) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(pcm, np.uint8).reshape(-1, 3)
        pcm, width = wide.tobytes(), 4
    return np.frombuffer(pcm, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))


def check_waves(paths: Sequence[Path]) -> tuple[int, list[int]]:
    """Check that all files are mono and have one sampling rate. Reads only the headers.

    Returns:
        The sampling rate in Hz, and the length of each file in samples.

    Raises:
        DataError: A file is damaged, is not mono, or has another rate than most files.
    """
    headers: dict[Path, WavHeader] = {}
    invalid: dict[Path, _Invalid] = {}
    for path in paths:
        try:
            headers[path] = read_header(path)
        except UnreadableWavError as error:
            invalid[path] = _Invalid(str(error), convertible="unknown format" in str(error))
    rates = Counter(header.rate for header in headers.values())
    rate = max(rates, key=lambda r: (rates[r], -r)) if rates else 16_000
    valid = sum(header.channels == 1 and header.rate == rate for header in headers.values())
    most = ", as in most files" if 2 * valid > len(headers) else ""
    for path, header in headers.items():
        if header.channels != 1 or header.rate != rate:
            found = f"It has {header.channels} channel{'s' * (header.channels > 1)} at {header.rate:,} Hz"
            invalid[path] = _Invalid(f"{found}, and must have 1 channel at {rate:,} Hz{most}.", convertible=True)
    if invalid:
        raise _invalid_files(invalid, rate, len(paths))
    return rate, [headers[path].length for path in paths]


class _Invalid(NamedTuple):
    """Why a file cannot be used, and whether sox can repair it."""

    fact: str
    convertible: bool


def _invalid_files(invalid: dict[Path, _Invalid], rate: int, count: int) -> Exception:
    """Report each of a few files, or the first of many, with the command that converts them."""
    if len(invalid) > MAX_ERRORS:
        if all(file.convertible for file in invalid.values()):
            folders = sorted({shlex.quote(str(path.parent)) for path in invalid})
            files = " ".join(f"{folder}/*.wav" for folder in folders)
            convert = _convert_command('"$f"', rate)
            command = f"for f in {files}; do {convert}; done"
        else:
            damaged = next(path for path, file in invalid.items() if not file.convertible)
            command = f"rm {shlex.quote(str(damaged))}, and check the others."
        path, file = next(iter(invalid.items()))
        return DataError(f"Cannot use {path}.", f"{file.fact} {len(invalid)} of {count} files are invalid.", command)
    errors = [
        DataError(f"Cannot use {path}.", file.fact, _convert_command(shlex.quote(str(path)), rate))
        if file.convertible
        else _damaged(path, file.fact)
        for path, file in invalid.items()
    ]
    return DataError.of([problem for error in errors for problem in error.problems])


def _convert_command(name: str, rate: int) -> str:
    return f"sox {name} -r {rate} -c 1 -b 16 fixed.wav && mv fixed.wav {name}"
