"""Cases in which load balancing moves virtual ranks, and cases in which it does not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from unisono.plan.assignment import assign_evenly
from unisono.plan.load_balance import LONGEST_PAUSE, PAUSE, WARMUP_STEPS, WINDOW, LoadBalancer, end


def after(dealer: LoadBalancer, steps: int, seconds: list[float]) -> list[int]:
    """Return the steps, of `steps` with the same times, at which the assignment changed."""
    return [n for n in range(steps) if dealer.record(seconds) is not None]


def test_a_slow_process_gets_fewer_virtual_ranks() -> None:
    dealer = LoadBalancer(16, assign_evenly(16, 2))
    assert after(dealer, 100, [1.0, 3.0]) == [max(PAUSE, WARMUP_STEPS + WINDOW) - 1]
    assert dealer.spans == ((0, 12), (12, 16))
    assert dealer.slow == ()
    assert end(dealer.spans, [1.0, 3.0]) == 12.0


@pytest.mark.parametrize("virtual_ranks", [4, 8, 16, 32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_noise_moves_nothing(virtual_ranks: int, size: int) -> None:
    """Processes of equal speed, of which a random one is sometimes slow."""
    dealer, chance = (
        LoadBalancer(virtual_ranks, assign_evenly(virtual_ranks, size)),
        random.Random(virtual_ranks * size),
    )
    for _ in range(500):
        seconds = [chance.uniform(0.97, 1.03) for _ in range(size)]
        seconds[chance.randrange(4 * size) % size] *= chance.choice([1.0, 1.0, 1.0, 3.0])
        assert dealer.record(seconds) is None


def test_a_process_that_delays_the_others_gets_nothing_and_is_named() -> None:
    dealer = LoadBalancer(4, assign_evenly(4, 4))
    after(dealer, 40, [1.0, 1.0, 9.0, 1.0])
    assert dealer.slow == (2,)
    assert end(dealer.spans, [1.0, 1.0, 9.0, 1.0]) == 2.0


def test_a_formerly_slow_process_is_tried_again() -> None:
    dealer = LoadBalancer(4, assign_evenly(4, 4))
    after(dealer, 40, [1.0, 1.0, 9.0, 1.0])
    for _ in range(6 * PAUSE):
        idle = dealer.slow
        dealer.record([0.0 if rank in idle else 1.0 for rank in range(4)])
    assert dealer.slow == ()
    assert dealer.spans == assign_evenly(4, 4)


def test_alternating_speeds_change_the_assignment_less_and_less_often() -> None:
    """A machine that is slow for 30 steps and fast for 30: past times do not predict future ones."""
    dealer = LoadBalancer(16, assign_evenly(16, 2))
    dealt = [n for n in range(6000) if dealer.record([1.0, 3.0 if n // 30 % 2 else 1.0]) is not None]
    assert len(dealt) < 20
    assert max(b - a for a, b in pairwise(dealt)) >= LONGEST_PAUSE / 2


def test_all_processes_decide_alike() -> None:
    """Equal times lead to equal decisions."""
    chance = random.Random(5)
    measured = [[chance.uniform(1, 4), chance.uniform(1, 2), chance.uniform(0.5, 1)] for _ in range(300)]
    dealers = [LoadBalancer(12, assign_evenly(12, 3)) for _ in range(3)]
    for seconds in measured:
        assert len({dealer.record(seconds) for dealer in dealers}) == 1
