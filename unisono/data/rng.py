"""The global generators of torch, numpy and Python's random, as one: seed them, take their state, give it back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = tuple[torch.Tensor, Any, Any]
"""Of the three generators; about 10 kB."""


def seed_everything(key: int, device: torch.device | None = None) -> None:
    """Seed torch's, numpy's and Python's global generators, and that of `device`, an accelerator: 9 microseconds.

    torch.manual_seed would walk all back ends (70 microseconds); the default generator alone takes one.
    """
    torch.default_generator.manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)
    np.random.seed(key & 0xFFFF_FFFF)
    random.seed(key)
    if device is not None:
        torch.get_device_module(device).manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)


def get_state() -> State:
    """Where the generators of the CPU stand."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def set_state(state: State) -> None:
    """Put the generators of the CPU where they stood."""
    torch.default_generator.set_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Whoever draws in this block: behind it all generators, that of `device` too, stand where they stood before."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    stood, of_device = get_state(), accelerator.get_rng_state() if accelerator else None
    try:
        yield
    finally:
        set_state(stood)
        if accelerator:
            accelerator.set_rng_state(of_device)


class RngStates:
    """The generators as a thing that a checkpoint can hold. What was loaded is given back when `give` says so, since a
    script draws (its model's weights, say) between its checkpoint's loading and its loop."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._loaded: dict[str, Any] | None = None
        self._held: dict[str, Any] | None = None

    def hold(self) -> None:
        """Where they stand now is what a checkpoint gets, whoever draws from here on."""
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

    def give(self) -> bool:
        """Put the generators where the checkpoint says they were; False: there was none."""
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


def same_state(a: State, b: State) -> bool:
    """Has nobody drawn between the two?"""
    (_, keys_a, *rest_a), (_, keys_b, *rest_b) = a[1], b[1]
    return torch.equal(a[0], b[0]) and np.array_equal(keys_a, keys_b) and rest_a == rest_b and a[2] == b[2]
