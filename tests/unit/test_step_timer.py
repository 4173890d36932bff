"""The time of a pass on an asynchronous device. The test sets the clocks of process and device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono import phases
from unisono.train.balance.step_timer import StepTimer


class Clock:
    """The times of the process and of its device, in seconds."""

    process = device = 0.0


class Event:
    """An event in the queue of the device, which reaches it at time `at`."""

    waited_for: list[float] = []

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Clock.device = max(Clock.device, Clock.process)
        self.at = Clock.device

    def synchronize(self) -> None:
        self.waited_for.append(self.at)
        Clock.process = max(Clock.process, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert Clock.process >= end.at, "torch raises, if the second event has not come yet"
        return 1000 * (end.at - self.at)


@pytest.fixture(autouse=True)
def fake_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock.process = Clock.device = 0.0
    Event.waited_for = []
    monkeypatch.setattr("unisono.train.balance.step_timer.time.perf_counter", lambda: Clock.process)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(phases.CommWait, "seconds", 0.0)


def passes(pace: StepTimer, count: int, *, orders: float, work: float, keep_up: bool = False) -> None:
    """Run `count` micro-batches that take `orders` seconds on the process and `work` on the device."""
    pace.begin()
    for _ in range(count):
        Clock.process += orders
        Clock.device = max(Clock.device, Clock.process) + work
        pace.done()
        if keep_up:
            pace.keep_up()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_pass_without_micro_batches_takes_no_time(kind: str) -> None:
    pace = StepTimer(torch.device(kind))
    assert pace.seconds() == 0.0
    pace.begin()
    assert pace.seconds() == 0.0


def test_the_cpu_ends_with_its_process() -> None:
    pace = StepTimer(torch.device("cpu"))
    passes(pace, 3, orders=1.0, work=0.0)
    Clock.process += 5.0  # the time after the pass
    assert pace.seconds() == 3.0
    assert Event.waited_for == []


def test_a_device_is_waited_for() -> None:
    pace = StepTimer(torch.device("cuda"))
    for _ in range(2):
        passes(pace, 4, orders=0.1, work=2.0)
        assert pace.seconds() == pytest.approx(8.1)


def test_a_device_that_is_never_busy_is_as_slow_as_its_process() -> None:
    pace = StepTimer(torch.device("cuda"))
    passes(pace, 4, orders=1.0, work=0.01)
    assert pace.seconds() == pytest.approx(4.01)


def test_waiting_for_others_is_no_work() -> None:
    for kind in ("cpu", "cuda"):
        pace = StepTimer(torch.device(kind))
        pace.begin()
        Clock.process += 3.0
        phases.CommWait.seconds += 2.0
        pace.done()
        assert pace.seconds() == pytest.approx(1.0)


def test_keep_up_limits_the_process_to_one_micro_batch_ahead() -> None:
    pace: Any = StepTimer(torch.device("cuda"))
    passes(pace, 1, orders=0.1, work=2.0, keep_up=True)
    assert Clock.process == pytest.approx(0.1)
    pace.begin()
    before = Clock.device
    for count in range(1, 4):
        Clock.process += 0.1
        Clock.device = max(Clock.device, Clock.process) + 2.0
        pace.done()
        pace.keep_up()
        assert Clock.device - Clock.process <= 2.0 or count == 1
    assert Clock.device == pytest.approx(before + 6.0)
