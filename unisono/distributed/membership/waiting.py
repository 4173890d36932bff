"""Works that end when a peer is lost, so that a death does not leave this process waiting forever.

A broken connection nearly always fails the operations that wait for it. There is one exception: gloo drops a message
that it is just about to write at that moment. The send is neither done nor failed, although all later ones fail (torch
2.13; pair.cc), and nothing wakes a thread that waits for it. It may be a message of ours, or one inside a collective.
So if training continues after a death, no thread that is still needed waits in this way:

    a collective   the calling thread waits for it, and polls every second whether a peer is lost
    a message      a thread of its own waits for it; the caller waits for that thread, or for the loss of a peer:

        send 1, 2 ----> |SendThread| 1 done .. 2 (dropped)               left behind with the old group
        caller  wait 2 ........................ peer lost --> an error

NCCL reports no deaths, and its `wait` returns at once: later work on the device then waits, forever if a peer is gone.
When the group is aborted, all collectives count as completed, whatever their results contain. `NcclWork` turns this
into the behavior of gloo: `wait` ends with the result, or with an error.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from unisono.distributed.process_group import TIMEOUT

POLL_SECONDS = timedelta(seconds=1)
"""Time between two polls for a lost peer, while a collective waits."""

NCCL_POLL_SECONDS = 1e-4
"""Seconds between two polls if the back end's own `wait` does not block, so that polling detects the end."""

GRACE_SECONDS = 0.5
"""After a death, operations fail within this time or never."""


class LossNotice(Protocol):
    """Detects whether a peer was lost."""

    def has_lost_peer(self, seconds: float = 0.0) -> bool: ...


class GlooWork(NamedTuple):
    """A gloo collective in progress. (Waiting repeatedly is allowed. For a message it would break the group.)"""

    work: Any
    notice: LossNotice

    def wait(self) -> Any:
        polls = TIMEOUT // POLL_SECONDS
        for poll in range(polls):
            try:
                return self.work.wait(POLL_SECONDS)
            except RuntimeError as error:
                if "peration timed out" not in str(error) or poll + 1 == polls:
                    raise
                if self.notice.has_lost_peer(GRACE_SECONDS):
                    raise dropped_send_error() from error
        return None


class NcclWork(NamedTuple):
    """A collective or message in progress, of a back end whose own `wait` only makes the device wait.

    https://docs.pytorch.org/docs/2.13/distributed.html. The back end's `wait` is called only when the work is done: a
    script that reads a loss must not hang because of a dead peer.
    """

    work: Any
    notice: LossNotice

    def wait(self) -> Any:
        until = time.monotonic() + TIMEOUT.total_seconds()
        while not self.work.is_completed():
            if self.notice.has_lost_peer():
                raise dropped_send_error()
            if time.monotonic() > until:
                raise ConnectionError(f"Timed out waiting {TIMEOUT.total_seconds():g} s for a peer")
            time.sleep(NCCL_POLL_SECONDS)
        return self.work.wait()  # a failed work counts as completed and raises here


class SendThread:
    """Wait for sent messages, in the order in which they were sent, in a thread."""

    def __init__(self, notice: LossNotice) -> None:
        self._notice = notice
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._sent = self._done = 0
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="send", daemon=True).start()

    def add(self, work: Any) -> QueuedSend:
        """Wait for this message, too."""
        self._queue.put(work)
        self._sent += 1
        return QueuedSend(self, self._sent)

    def close(self) -> None:
        """Stop after the messages so far. A dropped one blocks the thread, which has no other use."""
        self._queue.put(None)

    def on_peer_loss(self) -> None:
        """Wake the callers of `wait_for`, which check whether a peer is lost."""
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work.wait(TIMEOUT)
            except RuntimeError as error:
                self._error = error
            with self._changed:
                self._done += 1
                self._changed.notify_all()
            if self._error is not None:
                return

    def wait_for(self, number: int) -> None:
        """Wait until the first `number` messages are sent."""
        if self._done >= number:
            return
        over = lambda: self._done >= number or self._error is not None  # noqa: E731
        with self._changed:
            self._changed.wait_for(lambda: over() or self._notice.has_lost_peer(), TIMEOUT.total_seconds())
            self._changed.wait_for(over, GRACE_SECONDS)
        if self._error is not None:
            raise self._error
        if self._done < number:
            raise dropped_send_error()


class QueuedSend(NamedTuple):
    """Message number `number` of a SendThread."""

    thread: SendThread
    number: int

    def wait(self) -> None:
        self.thread.wait_for(self.number)


def dropped_send_error() -> ConnectionError:
    """Return the error for an operation that a closing connection dropped."""
    return ConnectionError("Connection closed by peer: an operation in progress was neither done nor failed")
