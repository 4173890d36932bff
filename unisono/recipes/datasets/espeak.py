"""Speech from the synthesizer eSpeak NG: about 100 voices in 10 MB, from `pip install 'unisono[recipes]'`.

Each list of words is spoken by a new process, so that equal lists give equal bytes:

- A clip depends on what the same process said before (a voice's flutter continues).
- Noise in a voice comes from the random numbers of the C library, which eSpeak NG seeds from the clock by default.
- The library is not thread-safe.

This file is also that process's program. It reads a request as JSON and writes clips as bytes. It runs on its own,
without torch, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

RATE = 22_050
"""Sampling rate of the clips, in Hz."""

_SYNCHRONOUS, _DONT_EXIT = 2, 0x8000  # of espeak_Initialize: return after speaking; never end the process
_TEXT, _UTF8 = 1, 1  # of espeak_Synth: position is in characters; the text is UTF-8
_SPEED, _PITCH = 1, 3  # of espeak_SetParameter: words per minute, 80 to 450; 0 to 100, where 50 is the voice's default


class Utterance(NamedTuple):
    """A text to speak."""

    text: str
    voice: str  # a language and a variant, as in en-us+f1
    speed: int  # words per minute
    pitch: int


class SynthesizerError(Exception):
    """The synthesizer is not installed, or failed. The message is the reason, in a line."""


def variants() -> list[str]:
    """Return the sorted names of all voices.

    Raises:
        SynthesizerError: The package is not installed or does not work.
    """
    return json.loads(_request({"variants": True}))["variants"]


def say(utterances: Sequence[Utterance], seed: int) -> list[bytes]:
    """Return a clip for each utterance, at about 1,000 words per second. Equal arguments give equal bytes.

    Returns:
        Mono clips with RATE samples per second, of 16 bits in this machine's byte order.

    Raises:
        SynthesizerError: The package is not installed or does not work.
    """
    output = _request({"seed": seed, "utterances": utterances})
    clips, offset = [], 0
    while offset < len(output):
        (size,) = struct.unpack_from("=I", output, offset)
        clips.append(output[offset + 4 : offset + 4 + size])
        offset += 4 + size
    if len(clips) != len(utterances):
        raise SynthesizerError(f"it returned {len(clips)} clips for {len(utterances)} utterances")
    return clips


def _request(request: dict[str, Any]) -> bytes:
    # -P keeps this folder out of sys.path, whose files could hide modules of the standard library.
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    process = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True)
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        raise SynthesizerError(lines[-1] if lines else f"its process exited with status {process.returncode}")
    return process.stdout


# -- the process that speaks


def _load_library() -> tuple[Any, Path]:
    """Load and initialize eSpeak NG, and return it with the folder of its data."""
    espeakng_loader = importlib.import_module("espeakng_loader")  # it has no types
    folder = Path(espeakng_loader.get_data_path())
    library = ctypes.CDLL(str(espeakng_loader.get_library_path()))
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), _DONT_EXIT)
    if rate != RATE:
        raise RuntimeError(f"espeak_Initialize returned {rate}, not {RATE}")
    return library, folder


def _speak(request: dict[str, Any]) -> None:
    """Write the clips of the request's utterances to stdout, each after its length in bytes."""
    library, _ = _load_library()
    chunks: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def on_samples(samples: int | None, count: int, events: int | None) -> int:
        if samples and count > 0:
            chunks.append(ctypes.string_at(samples, 2 * count))
        return 0  # continue

    library.espeak_SetSynthCallback(on_samples)
    seed = request["seed"] & 0x7FFF_FFFF
    library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
    ctypes.CDLL(None).srand(ctypes.c_uint(seed))
    for text, voice, speed, pitch in request["utterances"]:
        chunks.clear()
        if library.espeak_SetVoiceByName(voice.encode()):
            raise RuntimeError(f"there is no voice {voice}")
        library.espeak_SetParameter(_SPEED, speed, 0)
        library.espeak_SetParameter(_PITCH, pitch, 0)
        encoded = text.encode()
        library.espeak_Synth(encoded, ctypes.c_size_t(len(encoded) + 1), 0, _TEXT, 0, _UTF8, None, None)
        clip = b"".join(chunks)
        sys.stdout.buffer.write(struct.pack("=I", len(clip)) + clip)


if __name__ == "__main__":
    request = json.loads(sys.stdin.buffer.read())
    if "variants" in request:
        names = (path.name for path in (_load_library()[1] / "voices" / "!v").iterdir() if path.is_file())
        print(json.dumps({"variants": sorted(names)}))
    else:
        _speak(request)
