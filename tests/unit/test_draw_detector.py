"""Random draws in a block are detected for every global generator, whatever the code between blocks draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from unisono.data.loader import FetchTask, MicroBatchDataset
from unisono.data.rng import CALM_BLOCKS, DrawDetector, get_state, same_state, seed_everything, set_state
from unisono.plan.batch_order import MicroBatchId

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
EACH_DRAW = pytest.mark.parametrize("draw", list(DRAWS.values()), ids=list(DRAWS))


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    state = get_state()
    seed_everything(3)
    yield
    set_state(state)


def drew(detector: DrawDetector, draw: Callable[[], Any] = lambda: None) -> bool:
    detector.start()
    draw()
    return not detector.nothing_drawn()


@EACH_DRAW
@pytest.mark.parametrize("blocks", [0, CALM_BLOCKS + 2], ids=["first block", "later block"])
def test_a_draw_in_a_block_is_detected(draw: Callable[[], Any], blocks: int) -> None:
    detector = DrawDetector()
    assert not any(drew(detector) for _ in range(blocks))
    for _ in range(700):  # through several refills of a Mersenne Twister, and both halves of every pair of normals
        assert drew(detector, draw)
    assert not drew(detector)


@EACH_DRAW
def test_draws_between_blocks_are_not_taken_for_draws_in_a_block(draw: Callable[[], Any]) -> None:
    detector = DrawDetector()
    for _ in range(2 * CALM_BLOCKS):
        draw()
        assert not drew(detector)


def test_a_first_draw_between_later_blocks_is_ambiguous_once() -> None:
    detector = DrawDetector()
    assert not any(drew(detector) for _ in range(CALM_BLOCKS + 2))
    np.random.rand()
    assert drew(detector)
    detector.blame_code_between()
    for _ in range(3):
        np.random.rand()
        assert not drew(detector)


def test_a_block_that_draws_a_whole_refill_is_detected() -> None:
    detector = DrawDetector()
    assert drew(detector, lambda: [random.getrandbits(32) for _ in range(624)])
    assert drew(detector, lambda: np.random.bytes(4 * 624))


class CountedReads(Dataset[float]):
    """Data without random numbers, which counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, sample: int) -> float:
        self.reads += 1
        return float(sample)


def test_the_stream_of_a_loop_survives_an_ambiguous_fetch() -> None:
    """The loop's numbers are those of a loop without a loader, and at most one micro-batch is read twice."""
    data = CountedReads()
    dataset = MicroBatchDataset(data, lambda samples: samples, keyed=False)
    drawn = []
    for step in range(12):
        assert dataset.fetch(FetchTask(MicroBatchId(step, 0, 0), 7, [step])) == [float(step)]
        if step >= CALM_BLOCKS + 2:
            drawn.append((np.random.rand(), random.random(), torch.rand(()).item()))
    assert data.reads == 13
    seed_everything(3)
    assert drawn == [(np.random.rand(), random.random(), torch.rand(()).item()) for _ in drawn]


def test_seeding_restores_equal_states() -> None:
    state = get_state()
    seed_everything(5)
    assert not same_state(state, get_state())
    seed_everything(3)
    assert same_state(state, get_state())
