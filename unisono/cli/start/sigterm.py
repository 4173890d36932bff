"""SIGTERM to `unisono run` while it supervises no processes: as an agent, or before it has started any.

The first process of a container, which has the number 1, ignores SIGTERM unless it has a handler. Kubernetes would kill
it after the grace period.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 128 + signal.SIGTERM
"""Exit status of a program that SIGTERM has ended, as shells report it."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process with STATUS, after all `finally` blocks. The supervisor has handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(STATUS)
