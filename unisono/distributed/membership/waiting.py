"""Waiting for the others, so that a death does not leave us waiting for ever.

A connection that breaks fails whatever waits for it, nearly always. What gloo is just about to write in that moment it
forgets: the send is never done and never fails, though all that comes after it does (torch 2.13; pair.cc). It may be a
message of ours, or one within a collective, and nothing wakes a thread that waits for it. So where processes go on
after a death, none waits like that that is still needed:

    a collective   waits in its own thread; we look every second whether somebody has died
    a message      is waited for by a thread of ours, and we wait for that thread, or for bad news:

        send 1, 2 ----> |thread| 1 done .. 2 (forgotten)                 left behind with the group that is gone
        we      wait 2 ........................ lost! --> an error

An accelerator's back end (NCCL) tells nobody of a death, and its `wait` returns at once: what comes next on the device
waits, for ever if a peer is gone; and who aborts the group finds it all completed, with whatever lies in the results.
Where processes go on after a death, `NcclWork` makes of this what gloo's waiting is: an end with the result, or an
error.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from unisono.distributed.membership.membership import Membership

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for a silent peer. A peer that dies is noticed at once: its connections break."""

POLL_SECONDS = timedelta(seconds=1)
"""Between two looks at whether somebody has died, while a collective waits."""

NCCL_POLL_SECONDS = 1e-4
"""The same where the back end waits for nothing: it is we who see that a collective is over."""

GRACE_SECONDS = 0.5
"""After a death whatever waits fails by itself in this time, or never."""


class SendWork(NamedTuple):
    """A message under way, of gloo's. By itself it would wait no longer than connecting may take: it keeps the timeout
    that the group was made with, whatever `_set_pg_timeout` says later (torch 2.13)."""

    work: Any

    def wait(self) -> Any:
        return self.work.wait(TIMEOUT)


class GlooWork(NamedTuple):
    """A collective under way. (It may be waited for again and again, which a message may not: its group breaks.)"""

    work: Any
    company: Membership

    def wait(self) -> Any:
        looks = TIMEOUT // POLL_SECONDS
        for look in range(looks):
            try:
                return self.work.wait(POLL_SECONDS)
            except RuntimeError as error:
                if "peration timed out" not in str(error) or look + 1 == looks:
                    raise
                if self.company.has_lost_peer(GRACE_SECONDS):
                    raise dropped_send_error() from error
        return None


class NcclWork(NamedTuple):
    """A collective or message under way, of a back end whose own `wait` returns at once: it makes the device wait, and
    with it whoever looks at any later result (https://docs.pytorch.org/docs/2.13/distributed.html). It is called when
    nothing is to be waited for any more: a loss that a script looks at must not hang on a dead peer."""

    work: Any
    company: Membership

    def wait(self) -> Any:
        until = time.monotonic() + TIMEOUT.total_seconds()
        while not self.work.is_completed():
            if self.company.has_lost_peer():
                raise dropped_send_error()
            if time.monotonic() > until:
                raise ConnectionError(f"Timed out waiting {TIMEOUT.total_seconds():g} s for a peer")
            time.sleep(NCCL_POLL_SECONDS)
        return self.work.wait()  # completed may mean failed, and that is raised here


class SendThread:
    """Waits for what we send, in the order in which it was sent, in a thread of its own."""

    def __init__(self, company: Membership) -> None:
        self.company = company
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._sent = self._done = 0
        self._error: Exception | None = None
        threading.Thread(target=self._wait, name="messenger", daemon=True).start()

    def take(self, work: Any) -> QueuedSend:
        """Wait for this message too."""
        self._queue.put(work)
        self._sent += 1
        return QueuedSend(self, self._sent)

    def close(self) -> None:
        """Nothing more is sent. What is forgotten stays with the thread."""
        self._queue.put(None)

    def heard(self) -> None:
        """There is news: whoever waits looks at it."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self) -> None:
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
        """Until so many are done."""
        over = lambda: self._done >= number or self._error is not None  # noqa: E731
        with self._changed:
            self._changed.wait_for(lambda: over() or self.company.has_lost_peer(), TIMEOUT.total_seconds())
            self._changed.wait_for(over, GRACE_SECONDS)
        if self._error is not None:
            raise self._error
        if self._done < number:
            raise dropped_send_error()


class QueuedSend(NamedTuple):
    """The `number`th message that this messenger has taken."""

    messenger: SendThread
    number: int

    def wait(self) -> None:
        if self.messenger._done < self.number:
            self.messenger.wait_for(self.number)


def dropped_send_error() -> ConnectionError:
    """Who waited has been forgotten."""
    return ConnectionError("Connection closed by peer: what was being sent at that moment is neither done nor failed")
