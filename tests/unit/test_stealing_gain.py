"""Cases in which work stealing is switched on and off."""

from __future__ import annotations

import random

from unisono.plan.assignment import assign_evenly
from unisono.plan.stealing_gain import WINDOW, StealingGain

SPANS = assign_evenly(32, 4)


def jittery(chance: random.Random) -> list[float]:
    seconds = [1.0] * 4
    seconds[chance.randrange(4)] = 3.0
    return seconds


def plain(seconds: list[float]) -> float:
    """Return the time of a step without work stealing."""
    return max(8 * s for s in seconds)


def test_work_stealing_is_tried_if_processes_wait_and_kept_if_it_saves_time() -> None:
    mode, chance = StealingGain(), random.Random(1)
    modes = []
    for _ in range(200):
        seconds = jittery(chance)
        modes.append(mode.record(SPANS, seconds, plain(seconds) / 2 if mode.on else plain(seconds)))
    assert not any(modes[:WINDOW])
    assert all(modes[2 * WINDOW :])


def test_work_stealing_without_a_gain_is_tried_less_and_less_often() -> None:
    mode, chance = StealingGain(), random.Random(2)
    modes = []
    for _ in range(20000):
        seconds = jittery(chance)
        modes.append(mode.record(SPANS, seconds, plain(seconds)))
    assert 0 < sum(modes) < 0.02 * len(modes)
    begun = [i for i in range(1, len(modes)) if modes[i] and not modes[i - 1]]
    assert begun[-1] - begun[-2] > begun[1] - begun[0]


def test_work_stealing_is_not_tried_if_no_process_is_slow() -> None:
    mode, chance = StealingGain(), random.Random(3)
    for _ in range(1000):
        seconds = [chance.uniform(0.95, 1.05) for _ in range(4)]
        assert not mode.record(SPANS, seconds, plain(seconds))


def test_work_stealing_ends_when_no_process_is_slow_any_more() -> None:
    mode, chance = StealingGain(), random.Random(4)
    for _ in range(100):
        seconds = jittery(chance)
        mode.record(SPANS, seconds, plain(seconds) / 2 if mode.on else plain(seconds))
    assert mode.record(SPANS, [3.0, 1.0, 1.0, 1.0], 12.0)
    for _ in range(2 * WINDOW):
        mode.record(SPANS, [1.0] * 4, 8.0)
    assert not mode.on
