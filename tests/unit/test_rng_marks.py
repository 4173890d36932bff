"""Every draw shows, from every global generator, also the one that only uses up what an earlier draw has kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from unisono.data import rng_marks
from unisono.data.rng import get_state, seed_everything, set_state
from unisono.data.rng_marks import mark

DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand": lambda: torch.rand(1),
    "torch.randn": lambda: torch.randn(1),
    "numpy.rand": np.random.rand,
    "numpy.randn": np.random.randn,
    "numpy.permutation": lambda: np.random.permutation(3),
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: random.shuffle([1, 2]),
}


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    state = get_state()
    seed_everything(3)
    yield
    set_state(state)


@pytest.mark.parametrize("draw", list(DRAWS.values()), ids=list(DRAWS))
def test_a_draw_moves_the_mark(draw: Callable[[], Any]) -> None:
    for _ in range(1300):  # over several fillings, and both halves of every pair
        before = mark()
        assert mark() == before
        draw()
        assert mark() != before


def test_seeding_moves_the_mark() -> None:
    before = mark()
    seed_everything(5)
    assert mark() != before
    seed_everything(3)
    assert mark() == before


def test_as_many_draws_as_a_filling_has_words_show() -> None:
    before = mark()
    for _ in range(rng_marks.WORDS):
        random.getrandbits(32)
    assert mark() != before
    before = mark()
    np.random.bytes(4 * rng_marks.WORDS)
    assert mark() != before


def test_a_number_that_numpy_has_kept_shows() -> None:
    """Normal numbers come in pairs: the second moves nothing but its own flag."""
    np.random.randn()
    before = mark()
    np.random.randn()
    assert mark() != before


def test_another_generator_under_numpy_shows() -> None:
    theirs = rng_marks._bit_generator()
    put = getattr(np.random, "set_bit_generator")  # noqa: B009
    try:
        put(np.random.PCG64(1))
        before = mark()
        assert mark() == before
        np.random.rand()
        assert mark() != before
    finally:
        put(theirs)


def test_pythons_state_tells_as_well_where_memory_is_laid_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng_marks, "_of_python", random.getstate)
    before = mark()
    assert mark() == before
    random.random()
    assert mark() != before


@pytest.mark.parametrize("at", [rng_marks._lies_in_torch(), None], ids=["in memory", "by its state"])
def test_torchs_generator_shows_its_draws_wherever_it_lies(at: int | None) -> None:
    generator = torch.Generator()
    generator.manual_seed(7)
    tell = rng_marks._Torch(generator, at)
    for draw in (torch.rand, torch.randn, torch.randn, torch.rand):
        before = tell()
        assert tell() == before
        draw((), generator=generator)
        assert tell() != before
    state, before = generator.get_state(), tell()
    torch.rand(2 * rng_marks.WORDS, generator=generator)
    assert tell() != before
    generator.set_state(state)
    assert tell() == before


def test_torchs_generator_is_found_in_this_torch() -> None:
    """If this fails after an update of torch, marks still are right, and take three times as long."""
    assert rng_marks._lies_in_torch() is not None
