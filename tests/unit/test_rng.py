"""States of the global generators are compared, and a fetch does not change the loop's random numbers."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from unisono.data.loader import FetchTask, MicroBatchDataset
from unisono.data.rng import comparable_state, drawn_since, get_state, same_state, seed_everything, set_state
from unisono.plan.batch_order import MicroBatchId

DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand": lambda: torch.rand(1).item(),
    "torch.randn": lambda: torch.randn(1).item(),
    "numpy.rand": np.random.rand,
    "numpy.randn": np.random.randn,
    "numpy.permutation": lambda: np.random.permutation(30).tolist(),
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.getrandbits": lambda: random.getrandbits(32 * 624) % 1_000_003,
}
EACH_DRAW = pytest.mark.parametrize("draw", list(DRAWS.values()), ids=list(DRAWS))


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    state = get_state()
    seed_everything(3)
    yield
    set_state(state)


@EACH_DRAW
def test_a_draw_changes_the_state(draw: Callable[[], Any]) -> None:
    for _ in range(700):  # through several refills of a Mersenne Twister, and both halves of every pair of normals
        before = get_state()
        assert same_state(before, get_state())
        draw()
        assert not same_state(before, get_state())


@EACH_DRAW
def test_any_number_of_draws_is_noticed(draw: Callable[[], Any]) -> None:
    for draws in (1, 2, 311, 312, 313, 623, 624, 625, 1248):  # a Mersenne Twister has 624 words, and a float takes two
        seed_everything(7)
        before = comparable_state()
        assert drawn_since(before) is None
        for _ in range(draws):
            draw()
        assert drawn_since(before) is not None


def test_the_words_of_numpy_are_where_they_are_read() -> None:
    seed_everything(7)
    np.random.rand(5)
    state: Any = np.random.get_state()
    _, words, used, *_ = state
    assert comparable_state()[1] == words.tobytes() + int(used).to_bytes(4, sys.byteorder)


def test_only_generators_that_were_drawn_from_are_sent() -> None:
    seed_everything(7)
    before = comparable_state()
    assert drawn_since(before) is None
    random.random()
    drawn = drawn_since(before)
    assert drawn is not None
    assert drawn[:2] == (None, None)
    torch.rand(3)
    np.random.rand(3)
    after = get_state()
    found = pickle.loads(pickle.dumps(drawn_since(before)))
    assert all(part is not None for part in found)
    seed_everything(7)
    set_state(found)
    assert same_state(after, get_state())


def test_seeding_restores_equal_states() -> None:
    state = get_state()
    seed_everything(5)
    assert not same_state(state, get_state())
    seed_everything(3)
    assert same_state(state, get_state())


def test_python_is_seeded_as_by_random_seed() -> None:
    for key in (0, 3, 2**64 - 1):
        random.gauss(0, 1)  # keeps the other half of a pair of normals, which belongs to the state
        seed_everything(key)
        state = random.getstate()
        random.seed(key)
        assert random.getstate() == state


class Drawn(Dataset[Any]):
    """Samples that are random numbers."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 100

    def __getitem__(self, sample: int) -> Any:
        return self.draw()


def fetch(dataset: MicroBatchDataset, step: int) -> Any:
    return dataset.fetch(FetchTask(MicroBatchId(step, 0, 0), 7, [step]))


@EACH_DRAW
def test_a_fetch_draws_from_its_key_whatever_the_loop_draws(draw: Callable[[], Any]) -> None:
    dataset = MicroBatchDataset(Drawn(draw), lambda samples: samples, keyed=False)
    calm = [fetch(dataset, step) for step in range(5)]
    assert len({str(batch) for batch in calm}) == 5
    for step in (3, 1, 4):
        torch.rand(5), np.random.rand(3), random.random()
        assert str(fetch(dataset, step)) == str(calm[step])


@EACH_DRAW
def test_torch_numbers_of_the_loop_are_one_stream(draw: Callable[[], Any]) -> None:
    dataset = MicroBatchDataset(Drawn(draw), lambda samples: samples, keyed=False)
    drawn = []
    for step in range(5):
        fetch(dataset, step)
        drawn.append(torch.rand(()).item())
    seed_everything(3)
    assert drawn == [torch.rand(()).item() for _ in drawn]


@EACH_DRAW
def test_numpy_and_python_numbers_of_the_loop_follow_the_key(draw: Callable[[], Any]) -> None:
    dataset = MicroBatchDataset(Drawn(draw), lambda samples: samples, keyed=False)
    drawn = []
    for _ in range(2):
        np.random.rand(), random.random()
        fetch(dataset, 2)
        drawn.append((np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


def test_a_loop_draws_from_the_same_stream_after_a_fetch_with_an_error() -> None:
    def fail() -> None:
        torch.rand(1)
        raise ValueError

    state = torch.get_rng_state()
    with pytest.raises(ValueError):
        fetch(MicroBatchDataset(Drawn(fail), lambda samples: samples, keyed=False), 0)
    assert torch.equal(state, torch.get_rng_state())
