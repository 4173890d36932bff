"""Has anybody drawn a random number in between? Asked in every step, so it may not cost what taking states costs.

Taking the states of torch's, numpy's and Python's global generators and comparing them takes 100 microseconds, seeding
them 10 to 25; a mark takes one or two. All three are an MT19937: 624 words, made anew when they are used up, and the
place in them. A draw moves the place; a word tells one filling from the next. No library has a cheap method that says
it, so all three are read where they lie in memory: numpy's at the address that it gives out for this
(numpy.random.BitGenerator.ctypes), torch's and Python's inside their objects, after a trial where they lie there.

Normal numbers come in pairs, and torch and numpy keep the second where only the whole state shows it. Whoever has not
drawn since it was seen that there is none, has none.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from ctypes import c_uint32, c_uint64
from typing import Any

import numpy as np
import torch

Mark = tuple[Any, Any, Any]
"""Two that are equal: nobody has drawn between them, nor seeded."""

WORDS = 624
LOOK = 64
"""Words of torch's generator in which its first filling must begin."""


def mark() -> Mark:
    """Where the three generators stand."""
    return _of_torch(), _of_numpy(), _of_python()


class _Torch:
    """Where a generator of torch stands. `at`: at which word of the object its filling begins, right after the place;
    None: it was not found there, and every mark is a copy of the state."""

    def __init__(self, generator: torch.Generator, at: int | None) -> None:
        self._generator = generator
        self._seen = None if at is None else c_uint64.from_address(generator._cdata + 4 * (at - 1))  # type: ignore[attr-defined]
        self._without: int | None = None  # where it stood without a kept number

    def __call__(self) -> Any:
        if self._seen is not None:
            place = self._seen.value
            if place == self._without:
                return place
        state = self._generator.get_state().numpy()
        if self._seen is None or state[8 * (WORDS + 3) :].any():  # behind the words
            return state.tobytes()
        self._without = place
        return place


def _lies_in_torch() -> int | None:
    """Draw from a generator of our own, and look whether and where that shows in it."""
    trial = torch.Generator()
    if not hasattr(trial, "_cdata"):
        return None
    trial.manual_seed(1)
    begins = trial.get_state().numpy().view(np.uint64)[3:11].tolist()
    words = (c_uint32 * LOOK).from_address(trial._cdata)
    at = next((i for i in range(1, LOOK - 8) if words[i : i + 8] == begins), None)
    if at is None:
        return None
    places = [words[at - 1]]
    for _ in range(2):
        torch.rand((), generator=trial)
        places.append(words[at - 1])
    filled = trial.get_state().numpy().view(np.uint64)[3]
    return at if places == [0, 1, 2] and words[at] == filled else None


_bit_generator = getattr(np.random, "get_bit_generator")  # noqa: B009 (numpy's type stubs do not know it)


class _Numpy:
    """Where numpy's generator stands, whichever it is."""

    def __init__(self) -> None:
        self._bits: Any = None  # the generator that `_words` are of
        self._words: Any = None
        self._without: Any = None  # where it stood without a kept number

    def __call__(self) -> Any:
        bits = _bit_generator()
        if bits is not self._bits:
            if type(bits) is not np.random.MT19937:
                return pickle.dumps(np.random.get_state(legacy=False))
            self._bits = bits
            self._words = (c_uint32 * (WORDS + 1)).from_address(bits.ctypes.state_address)
        place = (self._words[0], self._words[WORDS])
        if place != self._without:
            whole = np.random.get_state(legacy=False)
            if whole["has_gauss"]:
                return pickle.dumps(whole)
            self._without = place
        return place


def _pythons(generator: random.Random) -> Callable[[], Any]:
    """A function that tells where a generator of Python stands: by a look at its place and first word, if it lies in
    memory as CPython lays it out, otherwise by its state."""
    seen = c_uint64.from_address(id(generator) + object.__basicsize__)
    return lambda: (seen.value, generator.gauss_next)  # type: ignore[attr-defined]


def _lies_as_in_cpython() -> bool:
    """Draw from a generator of our own, and look whether that shows where it should."""
    trial = random.Random(1)
    if type(trial).__basicsize__ < object.__basicsize__ + 4 * (WORDS + 1):
        return False
    tell = _pythons(trial)
    places = [tell()[0] & 0xFFFF_FFFF]
    for _ in range(2):
        trial.getrandbits(32)
        places.append(tell()[0] & 0xFFFF_FFFF)
    return places == [WORDS, 1, 2] and tell()[0] >> 32 == trial.getstate()[1][0]


_of_torch = _Torch(torch.default_generator, _lies_in_torch())
_of_numpy = _Numpy()
_global = random.getstate.__self__  # type: ignore[attr-defined]
_of_python = _pythons(_global) if _lies_as_in_cpython() else random.getstate
