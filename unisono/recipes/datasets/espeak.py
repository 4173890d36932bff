"""Words spoken by eSpeak NG, a speech synthesizer: about 100 voices in 10 MB, from `pip install 'unisono[recipes]'`.

It is asked in a process of its own that says one list of words from its start to its end, because a clip depends on
what was said before it in the same process (the voice flutters on), and because the noise in a voice comes from the C
library's random numbers, which eSpeak NG seeds from the clock unless it is told a seed. So equal lists are equal bytes,
whatever else this process or others have drawn or said. Its library is not made for threads either.

This file is that process's program too: a list comes in as JSON, clips go out as bytes. It then runs alone, without
torch, so that it starts in a blink.
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
"""Samples a second of what it says."""

_SYNCHRONOUS, _DONT_EXIT = 2, 0x8000  # of espeak_Initialize: return when all is said; never end the process
_TEXT, _UTF8 = 1, 1  # of espeak_Synth: position is in characters; the text is UTF-8
_SPEED, _PITCH = 1, 3  # of espeak_SetParameter: words a minute, 80 to 450; 0 to 100, where 50 is the voice's own


class Utterance(NamedTuple):
    """One thing to say."""

    text: str
    voice: str  # a language and a variant, as in en-us+f1
    speed: int  # words a minute
    pitch: int


class NoSpeech(Exception):
    """eSpeak NG could not be asked; the text is why, in a line."""


def variants() -> list[str]:
    """The names of all voices, sorted. Raises Silent where the package lacks or does not work."""
    return json.loads(_ask({"variants": True}))["variants"]


def say(utterances: Sequence[Utterance], seed: int) -> list[bytes]:
    """What each sounds like: mono, RATE samples a second, 16 bits, of this machine's byte order. About 1,000 words a
    second. Equal arguments give equal bytes. Raises Silent."""
    sound = _ask({"seed": seed, "utterances": utterances})
    clips, place = [], 0
    while place < len(sound):
        (size,) = struct.unpack_from("=I", sound, place)
        clips.append(sound[place + 4 : place + 4 + size])
        place += 4 + size
    if len(clips) != len(utterances):
        raise NoSpeech(f"it said {len(clips)} of {len(utterances)} words")
    return clips


def _ask(question: dict[str, Any]) -> bytes:
    # -P: this folder is no place to import from, whatever its files are called.
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    done = subprocess.run(command, input=json.dumps(question).encode(), capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise NoSpeech(said[-1] if said else f"its process ended with status {done.returncode}")
    return done.stdout


# -- the process that speaks


def _library() -> tuple[Any, Path]:
    """eSpeak NG, ready to speak, and the folder of its data."""
    espeakng_loader = importlib.import_module("espeakng_loader")  # it has no types
    folder = Path(espeakng_loader.get_data_path())
    library = ctypes.CDLL(str(espeakng_loader.get_library_path()))
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), _DONT_EXIT)
    if rate != RATE:
        raise RuntimeError(f"espeak_Initialize returned {rate} and not {RATE}")
    return library, folder


def _speak(question: dict[str, Any]) -> None:
    """Write the clips of the question's utterances to stdout, each behind its length in bytes."""
    library, _ = _library()
    heard: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def hear(samples: int | None, count: int, events: int | None) -> int:
        if samples and count > 0:
            heard.append(ctypes.string_at(samples, 2 * count))
        return 0  # go on

    library.espeak_SetSynthCallback(hear)
    seed = question["seed"] & 0x7FFF_FFFF
    library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
    ctypes.CDLL(None).srand(ctypes.c_uint(seed))
    for text, voice, speed, pitch in question["utterances"]:
        heard.clear()
        if library.espeak_SetVoiceByName(voice.encode()):
            raise RuntimeError(f"there is no voice {voice}")
        library.espeak_SetParameter(_SPEED, speed, 0)
        library.espeak_SetParameter(_PITCH, pitch, 0)
        words = text.encode()
        library.espeak_Synth(words, ctypes.c_size_t(len(words) + 1), 0, _TEXT, 0, _UTF8, None, None)
        clip = b"".join(heard)
        sys.stdout.buffer.write(struct.pack("=I", len(clip)) + clip)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.buffer.read())
    if "variants" in asked:
        names = (path.name for path in (_library()[1] / "voices" / "!v").iterdir() if path.is_file())
        print(json.dumps({"variants": sorted(names)}))
    else:
        _speak(asked)
