"""What Unisono says when it cannot go on.

Every message has three parts: what was asked, what is true (with numbers), and what to type next. The constructor
takes the three parts apart, so that none can be forgotten:

    raise DataError("The training set was asked for its first sample.", "It has length 0.", "Check the path you pass.")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Problem(NamedTuple):
    """One thing that is wrong, in three sentences: what was asked, what is true, what to do next."""

    asked: str
    true: str
    do: str

    def __str__(self) -> str:
        return f"{self.asked}\n  {self.true}\n  Next: {self.do}"


class UnisonoError(Exception):
    """The root of all our errors. `exit_status` is what the process returns when nobody catches it."""

    exit_status = 1

    def __init__(self, asked: str, true: str = "", do: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(asked, true, do),)
        super().__init__(asked, true, do)

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> UnisonoError:
        """One error that tells several problems at once (at least one)."""
        error = cls(*problems[0])
        error.problems = tuple(problems)
        return error

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class SettingsError(UnisonoError):
    """The request was wrong: a setting, a flag, or several of them together. Nothing was started."""

    exit_status = 2


class WorldError(UnisonoError):
    """The processes of this run do not fit together, or cannot reach each other."""


class UnreachableHostError(WorldError):
    """A host's name does not resolve, so the processes of this run cannot meet. Its message needs no traceback."""


class DataError(UnisonoError):
    """The data cannot be read, or is not what the loop needs."""


class LoopError(UnisonoError):
    """The contract of the training loop was broken (docs/guide/loop.md lists its lines)."""


class CheckpointError(UnisonoError):
    """A checkpoint cannot be written, read, or is not the state of this run."""


class PeerLostError(WorldError):
    """Another process of this run died, or its host is gone."""


class DivergenceError(UnisonoError):
    """Processes that must hold the same, or have computed the same, do not: a fault of a machine, or of the loop."""


class PromiseBrokenError(UnisonoError):
    """A computation that was made twice has other bits the second time, so the promise of equal bits does not hold."""


class StuckError(WorldError):
    """Nothing in the run has gone on for longer than the settings allow."""


class RankFailedError(UnisonoError):
    """A run that `unisono.launch` started has failed: `rank` with an exception of the type `kind` ("": it died)."""

    def __init__(self, asked: str, true: str = "", do: str = "", rank: int = 0, kind: str = "") -> None:
        super().__init__(asked, true, do)
        self.rank, self.kind = rank, kind


class RunStopped(BaseException):
    """A signal asked the run to stop; its state is saved. Not an error, so `except Exception` lets it pass."""


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
"""Words of gloo, of NCCL and of a store in the errors that they raise when a peer is lost."""


def is_connection_error(message: str) -> bool:
    """Return whether this message may tell that a peer is lost. Only together with a death does it prove anything."""
    return any(sign in message for sign in CONNECTION_SIGNS)
