"""Wave files: what their headers promise, looked at before a training begins, and what they hold.

Python's own `wave` reads them: whole-number samples (PCM) of 8, 16, 24 or 32 bits.
"""

from __future__ import annotations

import shlex
import wave
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unisono import DataError

TOLD = 5
"""At most so many of the files that do not fit are told at once."""


class WavHeader(NamedTuple):
    """What a wave file says of itself."""

    channels: int
    bits: int  # a sample
    rate: int  # samples a second
    length: int  # samples in each channel


class UnreadableWav(Exception):
    """A file that is not a whole wave file; the text is why, a sentence."""


def read_header(path: Path) -> WavHeader:
    """The header of a wave file whose last sample is there. Raises Unreadable."""
    try:
        with wave.open(str(path), "rb") as file:
            header = WavHeader(file.getnchannels(), 8 * file.getsampwidth(), file.getframerate(), file.getnframes())
            if not header.length:
                raise UnreadableWav("It has no samples.")
            file.setpos(header.length - 1)
            if len(file.readframes(1)) < file.getsampwidth() * header.channels:
                size = path.stat().st_size
                raise UnreadableWav(f"Its header tells of {header.length:,} samples, but it ends after {size:,} bytes.")
            return header
    except EOFError:
        raise UnreadableWav(f"It ends inside its header, after {path.stat().st_size:,} bytes.") from None
    except (wave.Error, OSError) as error:  # another format, not a wave file at all, or not to be read
        raise UnreadableWav(f"It cannot be read: {error}.") from None


def read_wave(path: Path) -> Tensor:
    """The samples of a mono wave file: float32 [samples], from -1 to 1. Raises DataError if it is not whole."""
    try:
        length = read_header(path).length
        with wave.open(str(path), "rb") as file:
            width, sound = file.getsampwidth(), file.readframes(length)
    except UnreadableWav as why:
        raise DataError(f"Read {path}.", str(why), f"Get it anew, or: rm {shlex.quote(str(path))}") from None
    return torch.from_numpy(_floats(sound, width))


def _floats(sound: bytes, width: int) -> np.ndarray:
    """PCM of `width` bytes a sample, little-endian, as float32 from -1 to 1."""
    if width == 1:  # the one width that has no sign
        return (np.frombuffer(sound, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:  # numpy has no such numbers: they become the upper three bytes of four
        wide = np.zeros((len(sound) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(sound, np.uint8).reshape(-1, 3)
        sound, width = wide.tobytes(), 4
    return np.frombuffer(sound, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))


def labelled_waves(folder: Path) -> dict[str, list[Path]]:
    """The wave files of every folder in `folder`, by its name, sorted; a name that begins with . or _ is passed over.

    Raises DataError if the folder lacks, has fewer than two classes, or one with fewer than two files: one to train on
    and one to validate on.
    """
    asked = f"Train on the wave files in {folder}: one folder a word, as in {folder / 'yes' / 'first.wav'}."
    if not folder.is_dir():
        raise DataError(asked, "There is no such folder.", "--set data=FOLDER, or --set data=none for other data.")
    classes = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] not in "._"]
    found = {
        path.name: [file for file in sorted(path.iterdir()) if file.suffix.lower() == ".wav" and file.name[0] != "."]
        for path in classes
    }
    if len(found) < 2:
        told = f"the only one is {classes[0].name}" if classes else "it has none"
        true = f"Two folders or more are needed to tell words apart; {told}."
        raise DataError(asked, true, f"mkdir {shlex.quote(str(folder / 'OTHER_WORD'))}, with its wave files in it.")
    few = [name for name, files in found.items() if len(files) < 2]
    if few:
        where = folder / few[0]
        more = f" (and so {len(few) - 1} more)" if len(few) > 1 else ""
        true = f"{where} has {len(found[few[0]])} wave files{more}: two are needed, to train and to validate."
        empty = not any(where.iterdir())
        raise DataError(asked, true, f"{'rmdir' if empty else 'rm -r'} {shlex.quote(str(where))}, or record more.")
    return found


def check_waves(files: Mapping[str, Sequence[Path]]) -> tuple[int, list[int]]:
    """The sampling rate of all these files, and the length of each in samples, in order. Reads every header.

    Raises DataError that names each file that is damaged, not mono, or has another rate than most; of more than TOLD
    it names the first.
    """
    paths = [path for some in files.values() for path in some]
    headers: dict[Path, WavHeader] = {}
    wrong: dict[Path, tuple[str, bool]] = {}  # what is wrong, and whether a conversion repairs it
    for path in paths:
        try:
            headers[path] = read_header(path)
        except UnreadableWav as why:
            wrong[path] = (str(why), "unknown format" in str(why))
    rates = Counter(header.rate for header in headers.values())
    rate = max(rates, key=lambda r: (rates[r], -r)) if rates else 16_000
    fits = sum(header.channels == 1 and header.rate == rate for header in headers.values())
    most = ", as most files have" if 2 * fits > len(headers) else ""
    for path, header in headers.items():
        if header.channels != 1 or header.rate != rate:
            has = f"It has {header.channels} channel{'s' * (header.channels > 1)} at {header.rate:,} samples a second"
            wrong[path] = (f"{has}; one channel at {rate:,} is needed{most}.", True)
    if wrong:
        raise _wrong_files(wrong, rate, len(paths))
    return rate, [headers[path].length for path in paths]


def _wrong_files(wrong: Mapping[Path, tuple[str, bool]], rate: int, count: int) -> Exception:
    """One error: each file of a few, or the first of many, and how to convert all that can be."""
    if len(wrong) > TOLD:
        if all(convertible for _, convertible in wrong.values()):
            folders = sorted({shlex.quote(str(path.parent)) for path in wrong})
            files = " ".join(f"{folder}/*.wav" for folder in folders)
            do = f'for f in {files}; do sox "$f" -r {rate} -c 1 -b 16 fixed.wav && mv fixed.wav "$f"; done'
        else:
            broken = next(path for path, (_, yes) in wrong.items() if not yes)
            do = f"rm {shlex.quote(str(broken))}, and look at the others."
        path, (true, _) = next(iter(wrong.items()))
        return DataError(f"Train on {path}.", f"{true} {len(wrong)} of {count} files do not fit.", do)
    problems = []
    for path, (true, can_be) in wrong.items():
        name = shlex.quote(str(path))
        convert = f"sox {name} -r {rate} -c 1 -b 16 fixed.wav && mv fixed.wav {name}"
        asked = f"Train on {path}."
        problems.append(DataError(asked, true, convert if can_be else f"Get it anew, or: rm {name}").problems[0])
    return DataError.of(problems)
