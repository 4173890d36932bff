"""One thread that sends and receives the messages of all groups of this process.

One thread, because a connection with TLS must not be used by two. It encrypts without the interpreter lock, so the main
thread computes meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from unisono.distributed.connections.message_frames import Transfer
from unisono.distributed.connections.peer_stream import CLOSED, PeerStream

CLOSE_SECONDS = 10.0
"""Time limit for closing connections, which takes no time unless the thread is starved."""

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class MessageLoop:
    """The thread. It starts with the first connection."""

    def __init__(self) -> None:
        self._requests: deque[Callable[[], None]] = deque()
        self._streams: weakref.WeakSet[PeerStream] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._unread: set[PeerStream] = set()  # streams with more to read than the kernel knows of
        self._selector: selectors.BaseSelector | None = None
        self._wake_end = self._wake_begin = -1
        self._awake = False
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._disconnect_fork)

    def _disconnect_fork(self) -> None:
        """Close everything in a forked child (a loader worker): peers must notice the end of its parent."""
        for connection in (*self._listeners, *(stream.socket for stream in self._streams)):
            if connection is not None:
                connection.close()
        if self._selector is not None:
            self._selector.close()
            os.close(self._wake_end)
            os.close(self._wake_begin)
        self._selector, self._lock, self._awake = None, threading.Lock(), False
        self._streams, self._listeners = weakref.WeakSet(), weakref.WeakSet()
        self._requests.clear()
        self._unread.clear()

    # -- for other threads

    def add(self, streams: Iterable[PeerStream]) -> None:
        """Serve these streams from now on. They may have no connection yet."""
        with self._lock:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                self._wake_end, self._wake_begin = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                self._selector.register(self._wake_end, READ)
                threading.Thread(target=self._run, args=(self._selector,), name="messages", daemon=True).start()
        self._streams.update(streams)

    def close_in_forks(self, listeners: Iterable[socket.socket]) -> None:
        """Close these sockets in forked children as well: the port of a process that has ended must not answer."""
        self._listeners.update(listeners)

    def attach(self, stream: PeerStream, connection: socket.socket) -> None:
        """Give a stream its connection, which belongs to the stream from now on."""
        read = partial(self._read, stream)
        self._request(partial(self._progress, stream, partial(stream.attach, connection), stream.write, read))

    def send(self, stream: PeerStream, tag: int, transfer: Transfer) -> None:
        """Start to send a message."""
        self._request(partial(self._progress, stream, partial(stream.send, tag, transfer), stream.write))

    def receive(self, stream: PeerStream, tag: int, transfer: Transfer) -> None:
        """Start to receive a message."""
        receive, read = partial(stream.receive, tag, transfer), partial(self._read, stream)
        self._request(partial(self._progress, stream, receive, read))

    def close(self, streams: Iterable[PeerStream]) -> None:
        """Close these streams. Messages in progress fail. Returns when it is done."""
        if self._selector is None:  # no stream has been added, or this is a forked child
            return
        self.fail(streams, CLOSED)
        closed = threading.Event()
        self._request(closed.set)
        closed.wait(CLOSE_SECONDS)

    def fail(self, streams: Iterable[PeerStream], reason: str) -> None:
        """End all messages of these streams with an error, at both ends."""
        for stream in streams:
            self._request(partial(self._progress, stream, partial(stream.fail, reason)))

    def _request(self, request: Callable[[], None]) -> None:
        if self._selector is None:
            return
        self._requests.append(request)
        if not self._awake:
            self._awake = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_begin, b"1")

    # -- the thread

    def _run(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, events in selector.select(0 if self._unread else None):
                stream = key.data
                if stream is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_end, 4096)
                    continue
                steps = [stream.write] if events & WRITE else []
                self._progress(stream, *steps, *([partial(self._read, stream)] if events & READ else []))
            self._awake = False  # a request after this writes to the pipe again
            while self._requests:
                self._requests.popleft()()
            for stream in tuple(self._unread):
                self._progress(stream, partial(self._read, stream))

    def _progress(self, stream: PeerStream, *steps: Callable[[], None]) -> None:
        """Serve a stream. An error is an error of its messages: the thread serves all others."""
        try:
            for step in steps:
                step()
        except Exception as error:
            stream.fail(f"{type(error).__name__}: {error}. {CLOSED}")
        self._update(stream)

    def _read(self, stream: PeerStream) -> None:
        if stream.read():
            self._unread.add(stream)
        else:
            self._unread.discard(stream)

    def _update(self, stream: PeerStream) -> None:
        """Wait for what this stream needs; stop serving it if it has failed."""
        selector, connection = self._selector, stream.socket
        if connection is None:
            return
        assert selector is not None
        known = selector.get_map().get(connection) if connection.fileno() >= 0 else None
        if stream.error is not None:
            self._unread.discard(stream)
            if known is not None:
                selector.unregister(connection)
            connection.close()
            return
        events = READ * stream.wants_read | WRITE * stream.wants_write
        if known is None:
            if events:
                selector.register(connection, events, stream)
        elif not events:
            selector.unregister(connection)
        elif known.events != events:
            selector.modify(connection, events, stream)


LOOP = MessageLoop()
"""That of this process."""
