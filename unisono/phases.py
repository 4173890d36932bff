"""The one list of phases, and who watches them.

A training process is always in exactly one phase. The loop says `enter("forward")`, which ends the phase before it;
a block says `with phase("evaluate"):`, which comes back to the phase it found. Whoever wants to know registers an
observer: the clock behind "where the time went", the timeline, profiler ranges, injected faults. One mechanism for
all of them, and about 100 ns a change when nobody watches.

Only the thread that trains changes phases: loader workers and autograd's threads do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("other", "data", "forward", "backward", "exchange", "update", "checkpoint", "evaluate")

Observer = Callable[[str, str], None]
"""Called as observer(left, entered) at every change; it must be quick and must not raise (faults excepted)."""


class CommWait:
    """How long this process has waited for messages of others, in whatever phase, in seconds since it began. Who looks
    at it twice knows what of a phase was its own work."""

    seconds = 0.0


class Position:
    """Where in the run this process is, beside its phase: for whoever asks which step, and whose share of it. Written
    where steps and micro-batches begin, read by faults, by the table of who is stuck, by a replay's debugger."""

    step: int | None = None
    """The step under way, or the last one that was; None: the first has not begun."""

    steps = 0
    """How many steps this process has begun."""

    virtual_rank: int | None = None
    """Whose micro-batch is in its round; None: no round is."""

    compiles = 0
    """How many compilations (torch.compile) are under way here."""

    moves = 0
    """How often anything has gone on here: a phase, a micro-batch. Whoever looks twice knows whether something does."""


_now = "other"
_observers: tuple[Observer, ...] = ()


def now() -> str:
    """The phase this process is in."""
    return _now


def enter(name: str) -> str:
    """End the phase we are in, begin `name` (one of PHASES), and return the phase that ended; or go on in it."""
    global _now
    left, _now = _now, name
    if left == name:
        return left
    Position.moves += 1
    for observer in _observers:
        observer(left, name)
    return left


def begin_step(number: int) -> None:
    """The step of this number begins here."""
    Position.step = number
    Position.steps += 1


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A block that is its own phase; afterwards the phase around it goes on."""
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
    """Stop calling `observer`. Unknown observers are ignored."""
    global _observers
    _observers = tuple(o for o in _observers if o is not observer)
