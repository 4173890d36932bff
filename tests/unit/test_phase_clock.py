"""The phase clock: every second is counted once, for the phase in which it was spent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import phases
from unisono.monitor.phase_clock import PhaseClock
from unisono.phases import enter


class Hands:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    enter("other")
    yield
    enter("other")


def test_seconds_are_counted_for_their_phase() -> None:
    hands = Hands()
    clock = PhaseClock(hands).start()
    for name, seconds in [("data", 1.0), ("forward", 2.0), ("data", 4.0), ("other", 1.0)]:
        enter(name)
        hands.at += seconds
    clock.stop()
    assert {phase: s for phase, s in clock.seconds.items() if s} == {"other": 1.0, "data": 5.0, "forward": 2.0}
    assert clock.total == 8.0
    assert clock.share("data") == 5 / 8
    assert clock.share("exchange") == 0


def test_the_current_phase_is_counted_until_now() -> None:
    hands = Hands()
    clock = PhaseClock(hands).start()
    enter("exchange")
    hands.at += 3
    assert clock.seconds["exchange"] == 3
    hands.at += 3
    assert (clock.total, clock.seconds["exchange"]) == (6, 6)
    clock.stop()


def test_a_stopped_clock_may_continue() -> None:
    hands = Hands()
    clock = PhaseClock(hands)
    assert clock.share("data") == 0.0
    clock.stop()  # it was not running
    clock.start().start()
    enter("data")
    hands.at += 1
    clock.stop()
    enter("forward")
    hands.at += 100
    clock.stop()
    assert clock.total == 1
    clock.start()
    hands.at += 2
    clock.stop()
    assert clock.seconds["forward"] == 2
    assert clock.total == 3


def test_a_lap_counts_from_the_last_lap() -> None:
    hands = Hands()
    clock = PhaseClock(hands).start()
    enter("data")
    hands.at += 1
    assert clock.lap() == {"data": 1}
    assert clock.lap() == {}
    enter("forward")
    hands.at += 2
    enter("data")
    hands.at += 3
    assert clock.lap() == {"forward": 2, "data": 3}
    clock.stop()


def test_seconds_are_a_copy() -> None:
    clock = PhaseClock(Hands())
    clock.seconds["data"] = 7.0
    assert clock.seconds["data"] == 0.0


def test_a_stopped_clock_does_not_observe() -> None:
    before = phases._observers
    PhaseClock().start().stop()
    assert phases._observers == before


@given(st.lists(st.tuples(st.sampled_from(phases.PHASES), st.integers(0, 100)), max_size=50))
def test_seconds_add_up(way: list[tuple[str, int]]) -> None:
    hands = Hands()
    clock = PhaseClock(hands).start()
    laps: dict[str, float] = {}
    for name, seconds in way:
        enter(name)
        hands.at += seconds
        for phase, s in clock.lap().items():
            laps[phase] = laps.get(phase, 0.0) + s
    clock.stop()
    assert clock.total == hands.at - 100
    assert laps == {phase: s for phase, s in clock.seconds.items() if s}
