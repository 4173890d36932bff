"""Phases: one phase at a time, and observers are called at every change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from unisono import phases
from unisono.phases import enter, observe, phase, unobserve


@pytest.fixture
def changes() -> Iterator[list[tuple[str, str]]]:
    """Yield a list of every change of phase during the test, which starts in "other"."""
    enter("other")
    seen: list[tuple[str, str]] = []

    def observer(left: str, entered: str) -> None:
        seen.append((left, entered))

    observe(observer)
    yield seen
    unobserve(observer)
    enter("other")


def test_enter_ends_the_phase_before(changes: list[tuple[str, str]]) -> None:
    assert enter("data") == "other"
    assert phases.now() == "data"
    assert enter("forward") == "data"
    assert changes == [("other", "data"), ("data", "forward")]


def test_a_block_comes_back_to_the_phase_around_it(changes: list[tuple[str, str]]) -> None:
    enter("update")
    with phase("evaluate"):
        assert phases.now() == "evaluate"
        with phase("data"):
            pass
        assert phases.now() == "evaluate"
    assert phases.now() == "update"
    assert changes[1:] == [
        ("update", "evaluate"),
        ("evaluate", "data"),
        ("data", "evaluate"),
        ("evaluate", "update"),
    ]


def test_a_block_comes_back_from_an_exception_as_well(changes: list[tuple[str, str]]) -> None:
    with pytest.raises(KeyError), phase("checkpoint"):
        raise KeyError
    assert phases.now() == "other"


def test_each_change_begins_where_the_one_before_ended(changes: list[tuple[str, str]]) -> None:
    for name in phases.PHASES:
        enter(name)
        with phase("data"):
            enter("forward")  # a block need not end in the phase it began with
    assert all(before[1] == after[0] for before, after in pairwise(changes))


def test_observers_are_called_in_order_until_they_unsubscribe() -> None:
    said: list[str] = []

    def first(left: str, entered: str) -> None:
        said.append(f"first {entered}")

    def second(left: str, entered: str) -> None:
        said.append(f"second {entered}")

    observe(first)
    observe(second)
    try:
        enter("data")
        unobserve(first)
        enter("forward")
    finally:
        unobserve(first)
        unobserve(second)
        unobserve(second)  # an unknown observer is ignored
    enter("other")
    assert said == ["first data", "second data", "second forward"]


def test_an_observer_may_unsubscribe_while_it_is_called() -> None:
    said: list[str] = []

    def once(left: str, entered: str) -> None:
        said.append(entered)
        unobserve(once)

    def always(left: str, entered: str) -> None:
        said.append(entered)

    observe(once)
    observe(always)
    try:
        enter("data")
        enter("other")
    finally:
        unobserve(once)
        unobserve(always)
    assert said == ["data", "data", "other"]


def test_a_fault_that_an_observer_raises_reaches_the_loop() -> None:
    def fault(left: str, entered: str) -> None:
        if entered == "exchange":
            raise RuntimeError("injected")

    observe(fault)
    try:
        with pytest.raises(RuntimeError, match="injected"):
            enter("exchange")
    finally:
        unobserve(fault)
        enter("other")
