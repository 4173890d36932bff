"""Detect that this process hangs between a group that has lost a peer and the next group.

    computes, detects         leaves       sends "ready", waits    connects       computes ...
    |-- as long as it takes --|-- limit --|-- for the others --|-- limit --|

A forward pass may take minutes, on this process or on a peer for which it waits. But leaving a group and connecting
consist of our own code and gloo's, and take milliseconds. No process waits long in a collective of a group whose
sockets are shut down. A process that does will not return: gloo drops a message that was half written (membership.py),
and nothing wakes its waiter until the timeout of half an hour. So the thread that sends this process's heartbeats
examines its main thread once a second, and reports a hang. The rendezvous server then counts the process as dead, and
the launcher kills it, like a process without heartbeats.
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
"""Time limit for leaving a group, for connecting, and for waiting in a lost group. These take 30 ms on a quiet machine
and a second or two on a busy one, and all processes wait meanwhile."""

DEVICE_SECONDS = 120.0
"""Time limit at one place of the script's own code, which may wait for a device."""

GROUP_CODE = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}unisono{os.sep}distributed{os.sep}")
"""Code in which a main thread calls into a back end and waits."""


class Activity(NamedTuple):
    """An activity that may take `limit` seconds, and its place in the code if that matters. `name` is a predicate."""

    name: str
    limit: float
    at: tuple[int, int] = (0, 0)


class RegroupTimeout:
    """Watch the main thread of this process. Create the object in that thread.

    Args:
        requests: returns the number of requests to the rendezvous server so far. While it grows, connecting continues.
        waits_for_peer: returns whether a request waits for a peer.
        lost_peer: returns whether the current group has lost a peer.
        anywhere: watch the script's own code too, which may wait for a device that waits for the group.
    """

    def __init__(
        self,
        requests: Callable[[], int],
        waits_for_peer: Callable[[], bool],
        lost_peer: Callable[[], bool],
        *,
        anywhere: bool = False,
    ) -> None:
        self._requests, self._waits_for_peer, self._lost_peer = requests, waits_for_peer, lost_peer
        self._anywhere = anywhere
        self._main = threading.get_ident()
        self._doing: Activity | None = None
        self._seen: tuple[Activity, int] | None = None  # at the previous check
        self._since = 0.0

    @contextmanager
    def doing(self, name: str, limit: float | None = None) -> Iterator[None]:
        """Limit the time of this block to `limit` seconds, by default FORM_SECONDS. `name` follows "Process 3 "."""
        before, self._doing = self._doing, Activity(name, FORM_SECONDS if limit is None else limit)
        try:
            yield
        finally:
            self._doing = before

    def check(self) -> str:
        """Return the activity of this process that has taken too long, or "". Call it about once a second."""
        now, activity = time.monotonic(), self._limited_activity()
        seen = (activity, self._requests()) if activity is not None else None
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        return activity.name if activity is not None and now - self._since > activity.limit else ""

    def _limited_activity(self) -> Activity | None:
        if self._doing is not None:
            return None if self._waits_for_peer() else self._doing
        frames = sys._current_frames()  # noqa: SLF001  (documented by Python in spite of its name)
        frame = frames.get(self._main) if self._lost_peer() else None
        if frame is None:
            return None
        if any(path in frame.f_code.co_filename for path in GROUP_CODE):
            return Activity("hangs in a collective of a group that lost a process", FORM_SECONDS)
        if self._anywhere:
            at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return Activity(f"hangs at {at} since a process was lost", DEVICE_SECONDS, (id(frame), frame.f_lasti))
        return None
