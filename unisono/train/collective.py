"""What all processes of a run do together between two steps: checked, and repeated if a process dies in it.

for attempt in collective.attempts("run.evaluate"):      check that every rank is here
    with attempt:
        ...                                              after a death: again, with the processes that are left
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
    """One attempt at a collective; enter it around the body. `repeat`: it has to be made again."""

    repeat = False

    def checking(self) -> AbstractContextManager[None]:
        """Return a block for the check that every rank is here, which comes before the body."""
        return nullcontext()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return None


class Recovery(Protocol):
    """How this process continues when a peer dies, and when a process joins."""

    def attempt(self, verb: str, *, again: bool) -> Attempt:
        """Return an attempt at a collective; not `again`: if it fails, the death is raised."""
        ...

    def resume_step(self, step: StepState, gradient: GradientPass, lost: Exception) -> Rounds | None:
        """Return the micro-batches that are missing after a death; None: the gradient is whole everywhere."""
        ...

    def refetch(self, step: StepState) -> None:
        """Fetch the micro-batches of another pass, if they are assigned otherwise than in the first one."""
        ...

    def completed(self) -> None:
        """Note that a collective or a pass is complete on all processes."""
        ...

    def admit_joiners(self) -> None:
        """Let waiting processes join, between two steps."""
        ...

    def join(self) -> None:
        """Wait until the others let this process join."""
        ...


class NoRecovery:
    """No process continues without a peer: the newest checkpoint is the way."""

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
            "A process was to join a run that is in the midst of it.",
            "Its settings ask for something that no process can join later.",
            "go on from the newest checkpoint: the same command with --resume.",
        )


class Collective:
    """Run collectives between two steps."""

    def __init__(self, step_sync: StepSync) -> None:
        self._step_sync = step_sync
        self.recovery: Recovery = NoRecovery()

    def survive_deaths(self, recovery: Recovery) -> None:
        """Repeat collectives, from now on, as `recovery` says."""
        self.recovery = recovery

    def attempts(self, verb: str, *, again: bool = True, checked: bool = True) -> Iterator[Attempt]:
        """Yield attempts until one is complete on all processes.

        Args:
            verb: one of step_sync.VERBS, or any words if it is not checked.
            again: whether the body may be made a second time, with the same effect. If not, a death is raised.
            checked: whether to check first that every rank is about to do this.

        Raises:
            LoopError: ranks are in different places.
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
        """Return what `body` returns, which all processes call together."""
        found: list[T] = []
        for attempt in self.attempts(verb, checked=checked):
            with attempt:
                found.append(body())
        return found[-1]
