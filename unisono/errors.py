"""Exceptions of the library.

Every message has three parts: the error, the facts (with numbers), and what to do or type next. The constructor takes
them separately, so that none is forgotten:

    raise DataError("The training set is empty.", "Its length is 0.", "check the path that you pass.")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.security.masking import mask_text


class Problem(NamedTuple):
    """One problem: the error in one sentence, the facts, and what to do next."""

    error: str
    facts: str
    remedy: str

    def __str__(self) -> str:
        parts = (self.error, self.facts and f"  {self.facts}", self.remedy and f"  Next: {self.remedy}")
        return "\n".join(part for part in parts if part)  # torch repeats a worker's error as one part

    def without_secrets(self) -> Problem:
        """Return it with `***` in place of keys and passwords."""
        return Problem(mask_text(self.error), mask_text(self.facts), mask_text(self.remedy))


class UnisonoError(Exception):
    """The base class of all exceptions of the library.

    Attributes:
        exit_status: the exit status of a process that does not catch the exception.
        problems: the problems that it reports.
    """

    exit_status = 1

    def __init__(self, error: str, facts: str = "", remedy: str = "") -> None:
        problem = Problem(error, facts, remedy).without_secrets()
        self.problems: tuple[Problem, ...] = (problem,)
        super().__init__(*problem)

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> UnisonoError:
        """Return one exception for several problems, at least one."""
        error = cls(*problems[0])
        error.problems = tuple(problem.without_secrets() for problem in problems)
        return error

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class SettingsError(UnisonoError):
    """A setting or a flag is wrong, or several of them do not fit together. Nothing was computed."""

    exit_status = 2


class WorldError(UnisonoError):
    """The processes of the run do not match, or cannot reach each other."""


class UnreachableHostError(WorldError):
    """A host cannot be reached, or its name does not resolve. It is reported without a traceback."""


class CertificateError(WorldError):
    """The certificate of a peer, or that of this process, is not accepted. A restart would fail again."""


class DataError(UnisonoError):
    """The data cannot be read, or does not fit the loop."""


class LoopError(UnisonoError):
    """The script violates the contract of the training loop (docs/guide/loop.md)."""


class NotFiniteError(LoopError):
    """A loss or a gradient has an element that is infinite or NaN, on all processes."""


class CheckpointError(UnisonoError):
    """A checkpoint cannot be written or read, or belongs to another run."""


class PeerLostError(WorldError):
    """Another process of the run died, or its host cannot be reached."""


class DivergenceError(UnisonoError):
    """Processes have different weights or gradients that must be equal, because of faulty hardware or of the loop."""


class PromiseBrokenError(UnisonoError):
    """A repeated computation gives other bits, so the promise of equal bits does not hold."""


class OutOfMemoryError(UnisonoError):
    """A device has no memory left. The message lists what holds how much, and settings that need less."""


class StudyError(UnisonoError):
    """A study of `unisono tune` cannot continue: its database is locked or gone, or has other trials."""


class StuckError(WorldError):
    """The run made no progress for longer than watchdog.timeout."""


class RankFailedError(UnisonoError):
    """A run that `unisono.launch` started failed.

    Attributes:
        rank: the rank that failed first.
        kind: the type of its exception; "" if the process died.
    """

    def __init__(self, error: str, facts: str = "", remedy: str = "", rank: int = 0, kind: str = "") -> None:
        super().__init__(error, facts, remedy)
        self.rank, self.kind = rank, kind


class RunStopped(BaseException):
    """End the loop early: a signal stopped the run and its state is saved, or an inspection has its result.

    It is not an Exception, so `except Exception` does not catch it.
    """


CONNECTION_SIGNS = (
    "closed",
    "reset",
    "Broken pipe",
    "broken",
    "refused",
    "imed out",
    "onnect",
    "gone",
    "Wait timeout",
    "emote process",
)
"""Parts of the messages of gloo, NCCL and stores when a peer is lost."""


def is_connection_error(message: str) -> bool:
    """Return whether a message may mean that a peer is lost. It is evidence only if a process has died."""
    return any(sign in message for sign in CONNECTION_SIGNS)
