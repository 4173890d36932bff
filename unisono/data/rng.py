"""The global random number generators of torch, numpy and Python: seed them, and save and restore their states."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

_python: Any = cast(Any, random.seed).__self__  # the generator of the functions of `random`
_seed_python = super(random.Random, _python).seed  # its part in C; the rest allows for other types of keys

_numpy: Any = np.random  # its types lack get_bit_generator
_seed_numpy = _numpy.random_sample.__self__.seed  # np.random.seed allows for other bit generators first

State = tuple[torch.Tensor, Any, Any]
"""The states of torch's, numpy's and Python's generator on the CPU; about 10 kB."""

ComparableState = tuple[torch.Tensor, bytes, Any]
"""The states of torch's, numpy's and Python's generator, which can be compared and not restored."""

MT19937_BYTES = 4 * 625
"""Bytes of numpy's generator: 624 words, and the number of words that are used up."""

Drawn = tuple[np.ndarray[Any, Any] | None, Any, Any]
"""The states of the generators that were drawn from, and None for the others. It is for another process, so it has no
tensor: each would be sent through a file of shared memory."""


def seed_everything(key: int, device: torch.device | None = None) -> None:
    """Seed torch's, numpy's and Python's global generators, and that of `device`, an accelerator.

    Takes 5 microseconds. torch.manual_seed would visit all back ends (70 microseconds); the default generator takes 1.
    """
    torch.default_generator.manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)
    seed_others(key)
    if device is not None:
        seed_device(key, device)


def seed_device(key: int, device: torch.device) -> None:
    """Seed the generator of an accelerator."""
    torch.get_device_module(device).manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)


def seed_others(key: int) -> None:
    """Seed numpy's and Python's global generators."""
    _seed_numpy(key & 0xFFFF_FFFF)
    _seed_python(key)
    _python.gauss_next = None


def get_state() -> State:
    """Return the states of the CPU's generators."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def set_state(state: State | Drawn) -> None:
    """Restore the states of the CPU's generators, of those that have one."""
    if state[0] is not None:
        torch.default_generator.set_state(torch.as_tensor(state[0]))
    set_others(state)


def set_others(state: State | Drawn) -> None:
    """Restore the states of numpy's and Python's generators, of those that have one."""
    if state[1] is not None:
        np.random.set_state(state[1])
    if state[2] is not None:
        random.setstate(state[2])


def get_device_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of an accelerator's generator; None for the CPU."""
    state: torch.Tensor | None = None
    if device.type != "cpu":
        state = torch.get_device_module(device).get_rng_state(device)
    return state


def set_device_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Restore the state of an accelerator's generator."""
    if state is not None:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore all generators after the block, that of `device` included."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    state, device_state = get_state(), accelerator.get_rng_state() if accelerator else None
    try:
        yield
    finally:
        set_state(state)
        if accelerator:
            accelerator.set_rng_state(device_state)


class RngStates:
    """The generators as an object with a state_dict, for checkpoints.

    A loaded state is applied by `apply`, not by `load_state_dict`, since a script draws (initial weights, say) between
    the loading of its checkpoint and its training loop.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._loaded: dict[str, Any] | None = None
        self._held: dict[str, Any] | None = None

    def hold(self) -> None:
        """Let `state_dict` return the present states from now on, whatever is drawn later."""
        self._held = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        if self._held is not None:
            return self._held
        of_torch, (_, keys, *of_numpy), (version, words, gauss) = get_state()
        return {
            "torch": of_torch,
            "numpy": [torch.from_numpy(keys.astype(np.int64)), *of_numpy],
            "random": [version, torch.tensor(words), gauss],
            "device": None if self._module is None else self._module.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def apply(self) -> bool:
        """Set the generators to the loaded states. Return False if none were loaded."""
        state, self._loaded = self._loaded, None
        if state is None:
            return False
        keys, *of_numpy = state["numpy"]
        version, words, gauss = state["random"]
        of_numpy = ("MT19937", keys.numpy().astype(np.uint32), *of_numpy)
        set_state((state["torch"], of_numpy, (version, tuple(words.tolist()), gauss)))
        if self._module is not None and state["device"] is not None:
            self._module.set_rng_state(state["device"])
        return True


def comparable_state() -> ComparableState:
    """Return the states of the CPU's generators for `drawn_since`. Call it right after `seed_everything`."""
    return torch.default_generator.get_state(), _numpy_words(), random.getstate()


def drawn_since(before: ComparableState) -> Drawn | None:
    """Return the states of the generators that were drawn from since `before`; None: no number was drawn."""
    now = torch.default_generator.get_state()
    of_torch = None if torch.equal(before[0], now) else now.numpy()
    of_numpy = None if before[1] == _numpy_words() else np.random.get_state()
    of_python = None if before[2] == (state := random.getstate()) else state
    found = (of_torch, of_numpy, of_python)
    return None if all(each is None for each in found) else found


def _numpy_words() -> bytes:
    """Return the words of numpy's generator. np.random.get_state takes 40 microseconds, and this takes 1.

    They are at the address that numpy publishes for other languages. It is a Mersenne Twister, since no other generator
    can be seeded by np.random.seed. The cached number of a normal distribution is not among its words: a generator that
    was just seeded has none, and a draw that caches one changes the words.
    """
    return ctypes.string_at(_numpy.get_bit_generator().ctypes.state_address, MT19937_BYTES)


def same_state(a: State, b: State) -> bool:
    """Return whether no random number was drawn between the two."""
    (_, words_a, *rest_a), (_, words_b, *rest_b) = a[1], b[1]
    same_numpy = rest_a == rest_b and words_a.tobytes() == words_b.tobytes()
    return torch.equal(a[0], b[0]) and same_numpy and a[2] == b[2]
