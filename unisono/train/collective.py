"""Run operations of all processes between two steps: checked, and repeated if a process dies.

for attempt in collective.attempts("run.evaluate"):      check that every rank makes the same call
    with attempt:
        ...                                              after a death: again, with the remaining processes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from unisono.errors import PeerLostError, WorldError

if TYPE_CHECKING:
    from unisono.plan.batch_order import MicroBatchId
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.step_state import StepState
    from unisono.train.step_sync import StepSync

T = TypeVar("T")

Rounds = Iterator[tuple["MicroBatchId", Any, bool]]
"""(place, batch, whether it is this process's last one) of micro-batches that this process computes."""

PEER_ERRORS = (PeerLostError, RuntimeError, ConnectionError)
"""Errors that a collective raises when a peer is gone."""


class Attempt:
    """One attempt at a collective; enter it around the body. `repeat`: another attempt has to follow."""

    repeat = False

    def checking(self) -> AbstractContextManager[None]:
        """Return a block for the check that every rank makes the same call. The check comes before the body."""
        return nullcontext()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return None


class Recovery(Protocol):
    """Continue a run when a peer dies, and when a process joins."""

    def attempt(self, verb: str, *, again: bool) -> Attempt:
        """Return an attempt at a collective. Without `again`, a failed attempt raises the death."""
        ...

    def resume_step(self, step: StepState, gradient: GradientPass, lost: Exception) -> Rounds | None:
        """Return the micro-batches that are missing after a death, or None if the gradient is complete everywhere."""
        ...

    def refetch(self, step: StepState) -> None:
        """Fetch the micro-batches of another pass, if their assignment has changed since the first one."""
        ...

    def completed(self) -> None:
        """Record that a collective or a pass is complete on all processes."""
        ...

    def admit_joiners(self) -> None:
        """Let waiting processes join, between two steps."""
        ...

    def join(self) -> None:
        """Wait until the other processes admit this process."""
        ...


class NoRecovery:
    """No recovery: after a death, a run continues from the newest checkpoint."""

    def attempt(self, verb: str, *, again: bool) -> Attempt:
        return Attempt()

    def resume_step(self, step: StepState, gradient: GradientPass, lost: Exception) -> Rounds | None:
        raise lost

    def refetch(self, step: StepState) -> None:
        return

    def completed(self) -> None:
        return

    def admit_joiners(self) -> None:
        return

    def join(self) -> None:
        raise WorldError(
            "A process cannot join this run.",
            "Its settings use a feature that does not support joining processes.",
            "continue from the newest checkpoint: the same command with --resume.",
        )


class Collective:
    """Run collectives between two steps."""

    def __init__(self, step_sync: StepSync) -> None:
        self._step_sync = step_sync
        self.recovery: Recovery = NoRecovery()

    def survive_deaths(self, recovery: Recovery) -> None:
        """Repeat collectives with `recovery` from now on."""
        self.recovery = recovery

    def attempts(self, verb: str, *, again: bool = True, checked: bool = True) -> Iterator[Attempt]:
        """Yield attempts until one is complete on all processes.

        Args:
            verb: one of step_sync.VERBS, or any text if it is not checked.
            again: whether the body may run a second time, with the same effect. If not, a death is raised.
            checked: whether to check first that every rank makes the same call.

        Raises:
            LoopError: the ranks make different calls.
        """
        while True:
            attempt = self.recovery.attempt(verb, again=again)
            if not checked or self._is_agreed(verb, attempt):
                yield attempt
            if not attempt.repeat:
                return

    def _is_agreed(self, verb: str, attempt: Attempt) -> bool:
        with attempt.checking():
            self._step_sync.require_same_call(verb)
            return True
        return False  # type: ignore[unreachable]  # the block swallows the death of a peer

    def run(self, verb: str, body: Callable[[], T], *, checked: bool = False) -> T:
        """Return the value of `body`, which all processes call together."""
        found: list[T] = []
        for attempt in self.attempts(verb, checked=checked):
            with attempt:
                found.append(body())
        return found[-1]
