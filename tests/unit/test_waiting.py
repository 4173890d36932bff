"""Waits end when a peer is lost, also for messages that gloo has dropped; they may take long otherwise."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from unisono.distributed.membership.waiting import GlooWork, NcclWork, SendThread


class Notice:
    """A notice of lost peers that the test sets."""

    lost = False

    def has_lost_peer(self, seconds: float = 0.0) -> bool:
        return self.lost


class Work:
    """A gloo work that the test completes, because a test cannot make gloo drop a message."""

    def __init__(self, error: str = "") -> None:
        self.done, self.error = threading.Event(), error

    def wait(self, timeout: Any = None) -> None:
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_messages_are_waited_for_in_order() -> None:
    thread = SendThread(Notice())
    works = [Work(), Work()]
    first, second = map(thread.add, works)
    works[0].done.set()
    first.wait()
    threading.Timer(0.1, works[1].done.set).start()
    second.wait()
    first.wait()
    thread.close()


def test_an_error_is_raised_for_every_waiter() -> None:
    thread, work = SendThread(Notice()), Work("Connection reset by peer")
    sends = [thread.add(work), thread.add(Work())]
    work.done.set()
    for each in sends:
        with pytest.raises(RuntimeError, match="reset by peer"):
            each.wait()


def test_a_dropped_message_ends_when_a_peer_is_lost() -> None:
    notice = Notice()
    thread = SendThread(notice)
    sends = thread.add(Work())

    def die() -> None:
        notice.lost = True
        thread.on_peer_loss()

    threading.Timer(0.1, die).start()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="closed by peer"):
        sends.wait()
    assert 0.1 < time.monotonic() - began < 15


def test_a_slow_collective_is_waited_for_until_a_peer_is_lost() -> None:
    notice, slow = Notice(), Work()
    threading.Timer(1.2, slow.done.set).start()
    GlooWork(slow, notice).wait()
    notice.lost = True
    with pytest.raises(ConnectionError, match="closed by peer"):
        GlooWork(Work(), notice).wait()


class Queued:
    """A work like NCCL's: `wait` returns at once, and raises an error only when the work is completed."""

    def __init__(self, error: str = "") -> None:
        self.done, self.error = threading.Event(), error

    def wait(self) -> bool:
        if self.error and self.done.is_set():
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


def test_nccl_work_is_waited_for_although_its_wait_returns_at_once() -> None:
    slow, failed = Queued(), Queued("remote process exited or there was a network error")
    threading.Timer(0.2, slow.done.set).start()
    began = time.monotonic()
    assert NcclWork(slow, Notice()).wait()
    assert time.monotonic() - began > 0.15
    threading.Timer(0.1, failed.done.set).start()
    with pytest.raises(RuntimeError, match="remote process"):
        NcclWork(failed, Notice()).wait()


def test_unfinished_nccl_work_ends_when_a_peer_is_lost() -> None:
    notice, done = Notice(), Queued()
    threading.Timer(0.1, lambda: setattr(notice, "lost", True)).start()
    with pytest.raises(ConnectionError, match="closed by peer"):
        NcclWork(Queued(), notice).wait()
    done.done.set()
    assert NcclWork(done, notice).wait()  # completed before the loss
