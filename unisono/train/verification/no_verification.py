"""The verification of a run that verifies nothing: its promise is less than exact, or the settings say so."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

NOTHING = nullcontext()


class NoVerification:
    """Stand where a Verification would, and do nothing."""

    steps: int | None = None
    broken = ""
    active = False

    def before(self, *_: Any) -> Iterable[Any]:
        return ()

    def watched(self, step: Any, gradient: Any, rounds: Any) -> Any:
        return rounds

    def heard(self, *_: Any) -> None:
        return

    def agree(self, count: int, size: int) -> None:
        return

    def after(self, *_: Any) -> Iterable[Any]:
        return ()

    def stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        return NOTHING

    def discard(self) -> None:
        return

    def end(self, step: int) -> None:
        return

    def close(self) -> None:
        return


NOT_VERIFIED = NoVerification()
