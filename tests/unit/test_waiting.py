"""What gloo forgets is not waited for when somebody has died; what fails, fails; what takes long may."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from unisono.distributed.membership.waiting import GlooWork, NcclWork, SendThread


class News:
    """Has somebody died?"""

    bad = False

    def has_lost_peer(self, seconds: float = 0.0) -> bool:
        return self.bad


class Work:
    """Done when somebody says so; as gloo's, which a test cannot make forget."""

    def __init__(self, error: str = "") -> None:
        self.done, self.error = threading.Event(), error

    def wait(self, timeout: Any = None) -> None:
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_messages_are_done_in_their_order() -> None:
    thread = SendThread(News())
    works = [Work(), Work()]
    first, second = map(thread.add, works)
    works[0].done.set()
    first.wait()
    threading.Timer(0.1, works[1].done.set).start()
    second.wait()
    first.wait()
    thread.close()


def test_one_that_fails_fails_for_whoever_waits() -> None:
    thread, work = SendThread(News()), Work("Connection reset by peer")
    posted = [thread.add(work), thread.add(Work())]
    work.done.set()
    for each in posted:
        with pytest.raises(RuntimeError, match="reset by peer"):
            each.wait()


def test_one_that_is_forgotten_is_left_behind_at_a_lost_peer() -> None:
    news = News()
    thread = SendThread(news)
    posted = thread.add(Work())

    def die() -> None:
        news.bad = True
        thread.on_peer_loss()

    threading.Timer(0.1, die).start()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="closed by peer"):
        posted.wait()
    assert 0.1 < time.monotonic() - began < 15


def test_a_collective_takes_its_time_until_somebody_dies() -> None:
    news, slow = News(), Work()
    threading.Timer(1.2, slow.done.set).start()
    GlooWork(slow, news).wait()
    news.bad = True
    with pytest.raises(ConnectionError, match="closed by peer"):
        GlooWork(Work(), news).wait()


class Queued:
    """As NCCL's: waiting for it returns at once; and that it has failed is told once it counts as completed."""

    def __init__(self, error: str = "") -> None:
        self.done, self.error = threading.Event(), error

    def wait(self) -> bool:
        if self.error and self.done.is_set():
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


def test_what_returns_at_once_is_waited_for_all_the_same() -> None:
    slow, failed = Queued(), Queued("remote process exited or there was a network error")
    threading.Timer(0.2, slow.done.set).start()
    began = time.monotonic()
    assert NcclWork(slow, News()).wait()
    assert time.monotonic() - began > 0.15
    threading.Timer(0.1, failed.done.set).start()
    with pytest.raises(RuntimeError, match="remote process"):
        NcclWork(failed, News()).wait()


def test_what_nobody_tells_of_is_waited_for_until_somebody_dies() -> None:
    news, done = News(), Queued()
    threading.Timer(0.1, lambda: setattr(news, "bad", True)).start()
    with pytest.raises(ConnectionError, match="closed by peer"):
        NcclWork(Queued(), news).wait()
    done.done.set()
    assert NcclWork(done, news).wait()  # it was over before, and is right
