"""Does this process stand still on its way from a group that has lost somebody to the next one?

    computes, notices        leaves       says "ready", waits      connects       computes ...
    |-- as long as it takes --|-- limit --|-- for the others --|-- limit --|

A forward pass may take minutes, and so may that of somebody else, for whom we wait. But leaving a group and connecting
are our own code's and gloo's, and take a few milliseconds; and nobody waits long in a collective of a group whose
sockets are shut. Who does will not come back: gloo forgets a message that was half on its way (membership.py), and
until its timeout, half an hour later, nothing wakes who waits for that one. So the thread that gives this process's
signs of life looks at its main thread once a second, and says so; the meeting place then takes it for dead, and the
launcher kills it, as one that gives no sign at all.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

FORM_SECONDS = 30.0
"""Leaving a group may take no longer, nor connecting, nor waiting in a group that is gone. On a quiet machine it takes
30 ms, on a busy one a second or two; and training stands still meanwhile, for all."""

DEVICE_SECONDS = 120.0
"""The same at one place of the script's own, where it may wait for a device: some take their time."""

IN_GROUP = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}unisono{os.sep}distributed{os.sep}")
"""Whose code a main thread is in that waits for others in compiled code."""


class Activity(NamedTuple):
    """What is done for no longer than `limit` seconds, and where in the code, if that matters."""

    what: str
    limit: float
    at: tuple[int, int] = (0, 0)


class RegroupTimeout:
    """moves     counts what goes on while we connect: whoever asks the others something is not stuck
    waits     is that an answer of others that we wait for?
    torn      has our group lost somebody, so that nothing can be waited for in it?
    anywhere  may it wait for a device that waits for the group, wherever it is?
    """

    def __init__(
        self, moves: Callable[[], int], waits: Callable[[], bool], torn: Callable[[], bool], *, anywhere: bool = False
    ) -> None:
        self._moves, self._waits, self._torn, self._anywhere = moves, waits, torn, anywhere
        self._main = threading.get_ident()
        self._doing = ""
        self._seen: tuple[Activity, int] | None = None  # what it did when we looked last
        self._since = 0.0

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A block that has a limit; or has none, if `what` begins with "waits"."""
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    def stuck(self) -> str:
        """What this process has been doing for too long; nothing: it is well. To be asked every now and then."""
        now, still = time.monotonic(), self._still()
        seen = (still, self._moves()) if still is not None else None
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        return still.what if still is not None and now - self._since > still.limit else ""

    def _still(self) -> Activity | None:
        if self._doing:
            return None if self._doing.startswith("waits") or self._waits() else Activity(self._doing, FORM_SECONDS)
        frame = sys._current_frames().get(self._main) if self._torn() else None
        if frame is None:
            return None
        if any(room in frame.f_code.co_filename for room in IN_GROUP):
            return Activity("waits in a collective of a group that is gone", FORM_SECONDS)
        if self._anywhere:
            at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return Activity(f"stands still at {at} since another one died", DEVICE_SECONDS, (id(frame), frame.f_lasti))
        return None
