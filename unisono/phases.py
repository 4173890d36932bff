"""The phases of training, and their observers.

A training process is always in exactly one phase. The loop calls `enter("forward")`, which ends the previous phase; a
block `with phase("evaluate"):` returns to the phase around it. Observers are called at every change: the clock behind
"where the time went", the timeline, profiler ranges, injected faults. A change takes about 100 ns without observers.

Only the training thread changes phases; loader workers and autograd's threads do not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PHASES = ("other", "data", "forward", "backward", "exchange", "update", "checkpoint", "evaluate")

Observer = Callable[[str, str], None]
"""Called as observer(left, entered) at every change. It must be fast and must not raise (injected faults may)."""


WaitObserver = Callable[[float], None]
"""Called as observer(seconds) after a wait for messages, by the thread that has waited. It must not raise."""


class CommWait:
    """Seconds that this process has waited for messages of others, in any phase, since its start.

    The difference of two readings tells how much of a phase was this process's own work.
    """

    seconds = 0.0


class GcPause:
    """Seconds that this process has spent in collections of Python's oldest generation, once `time_gc` was called."""

    seconds = 0.0


def time_gc() -> None:
    """Measure collections of the oldest generation from now on. The others take microseconds, and are ignored."""
    if _time_collection not in gc.callbacks:
        gc.callbacks.append(_time_collection)


def _time_collection(phase: str, about: Mapping[str, int]) -> None:
    global _collection_began
    if about["generation"] < 2:
        return
    if phase == "start":
        _collection_began = time.perf_counter()
    else:
        GcPause.seconds += time.perf_counter() - _collection_began


_collection_began = 0.0


class Position:
    """The position of this process in the run: the step and the virtual rank.

    Written where steps and micro-batches begin. Read by injected faults, hang reports and the debugger of a replay.

    step          the step in progress, or the last one; None before the first
    steps         the number of steps that this process has begun
    virtual_rank  the virtual rank whose micro-batch is being computed; None outside a micro-batch
    compiles      the number of compilations (torch.compile) in progress in this process
    moves         a count of changes (phases, micro-batches); while it does not change, nothing makes progress
    """

    __slots__ = ("compiles", "moves", "step", "steps", "virtual_rank")

    def __init__(self) -> None:
        self.step: int | None = None
        self.virtual_rank: int | None = None
        self.steps = self.compiles = self.moves = 0


position = Position()
"""The position of this process."""

_now = "other"
_observers: tuple[Observer, ...] = ()
_wait_observers: tuple[WaitObserver, ...] = ()


def now() -> str:
    """Return the phase of this process."""
    return _now


def enter(name: str) -> str:
    """End the present phase, begin `name` (one of PHASES), and return the ended phase. The same phase continues."""
    global _now
    left, _now = _now, name
    if left == name:
        return left
    position.moves += 1
    for observer in _observers:
        observer(left, name)
    return left


def begin_step(number: int) -> None:
    """Begin the step with this number."""
    position.step = number
    position.steps += 1


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Run a block in a phase; afterward the phase around it continues."""
    before = enter(name)
    try:
        yield
    finally:
        enter(before)


def observe(observer: Observer) -> None:
    """Call `observer(left, entered)` at every change from now on."""
    global _observers
    _observers = (*_observers, observer)


def unobserve(observer: Observer) -> None:
    """Stop calling `observer`. Does nothing for an unknown observer."""
    global _observers
    _observers = tuple(o for o in _observers if o is not observer)


def count_wait(seconds: float) -> None:
    """Add the seconds of a wait for messages, which has just ended."""
    CommWait.seconds += seconds
    for observer in _wait_observers:
        observer(seconds)


def observe_waits(observer: WaitObserver) -> None:
    """Call `observer(seconds)` after every wait from now on."""
    global _wait_observers
    _wait_observers = (*_wait_observers, observer)


def unobserve_waits(observer: WaitObserver) -> None:
    """Stop calling `observer`. Does nothing for an unknown observer."""
    global _wait_observers
    _wait_observers = tuple(o for o in _wait_observers if o is not observer)
