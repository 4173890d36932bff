"""The order of messages on a connection, without the thread of the message loop."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from unisono.distributed.connections.message_frames import (
    CONTINUE,
    FRAME_BYTES,
    HEADER,
    SMALL_BYTES,
    Transfer,
    frames,
)
from unisono.distributed.connections.peer_stream import CHUNK_BYTES, LOW_WATER, PeerStream

LARGE = 4 * CHUNK_BYTES + 3


@pytest.fixture
def pair() -> Iterator[tuple[PeerStream, PeerStream]]:
    """Two streams with a connection between them, whose buffers hold much less than a large message."""
    one, other = socket.socketpair()
    ends = PeerStream("the receiver"), PeerStream("the sender")
    for stream, end in zip(ends, (one, other), strict=True):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
        stream.attach(end)
    yield ends
    one.close()
    other.close()


def arrivals(sender: PeerStream, receiver: PeerStream, messages: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Send messages, (tag, bytes) each, and return their numbers and tags in the order in which they are complete."""
    done: list[tuple[int, int]] = []
    for number, (tag, size) in enumerate(messages):
        into = Transfer(memoryview(bytearray(size)))

        def note(number: int = number, tag: int = tag, into: Transfer = into) -> None:
            assert into.error is None
            assert bytes(into.view) == bytes([number + 1]) * len(into.view)
            done.append((number, tag))

        into.then = note
        receiver.receive(tag, into)
    for number, (tag, size) in enumerate(messages):
        sender.send(tag, Transfer(memoryview(bytes([number + 1]) * size)))
        sender.write()
    for _ in range(1000):
        sender.write()
        receiver.read()
    assert not sender.wants_write
    return done


def test_a_small_message_overtakes_large_ones_that_wait(pair: tuple[PeerStream, PeerStream]) -> None:
    sent = [(0, LARGE), (0, LARGE), (7, LARGE), (-1, 8), (-2, SMALL_BYTES)]
    assert arrivals(*pair, sent) == [(3, -1), (4, -2), (0, 0), (1, 0), (2, 7)]


def test_a_small_message_overtakes_a_large_one_between_two_frames(pair: tuple[PeerStream, PeerStream]) -> None:
    sent = [(0, 2 * FRAME_BYTES + 1), (7, 3 * FRAME_BYTES), (-1, 8), (0, 8), (-2, 0), (7, 1)]
    assert arrivals(*pair, sent) == [(2, -1), (4, -2), (0, 0), (3, 0), (1, 7), (5, 7)]


def test_a_message_that_nothing_expects_is_kept_while_a_large_one_arrives(pair: tuple[PeerStream, PeerStream]) -> None:
    receiver, sender = pair[1], pair[0]
    size = 2 * FRAME_BYTES + 5
    large, small = Transfer(memoryview(bytearray(size))), Transfer(memoryview(bytearray(3)))
    receiver.receive(0, large)
    sender.send(0, Transfer(memoryview(b"l" * size)))
    sender.write()
    sender.send(1, Transfer(memoryview(b"abc")))
    for _ in range(1000):
        sender.write()
        receiver.read()
    assert bytes(large.view) == b"l" * size
    receiver.receive(1, small)
    assert bytes(small.view) == b"abc"


def test_a_lost_connection_fails_a_message_between_its_frames(pair: tuple[PeerStream, PeerStream]) -> None:
    sender, receiver = pair
    large = Transfer(memoryview(bytearray(2 * FRAME_BYTES)))
    receiver.receive(0, large)
    assert sender.socket is not None
    for part in list(frames(0, memoryview(bytes(2 * FRAME_BYTES))))[:2]:
        while part:
            with contextlib.suppress(BlockingIOError):
                part = part[sender.socket.send(part) :]
            receiver.read()
    receiver.fail("Connection closed by peer")
    assert str(large.error) == "Connection closed by peer (the sender)"


@pytest.mark.parametrize("header", [(CONTINUE, 8), (CONTINUE, 2**40)])
def test_a_continuation_of_nothing_ends_the_connection(pair: tuple[PeerStream, PeerStream], header: Any) -> None:
    sender, receiver = pair
    into = Transfer(memoryview(bytearray(8)))
    receiver.receive(0, into)
    assert sender.socket is not None
    sender.socket.send(HEADER.pack(*header))
    receiver.read()
    assert "continue a message that has not begun" in str(into.error)


def test_messages_with_one_tag_keep_their_order(pair: tuple[PeerStream, PeerStream]) -> None:
    sent = [(0, LARGE), (0, LARGE), (0, 8), (7, LARGE), (0, 16), (0, 0), (7, SMALL_BYTES + 1), (7, 1)]
    found = arrivals(*pair, sent)
    assert sorted(found) == [(number, tag) for number, (tag, _) in enumerate(sent)]
    for tag in (0, 7):
        assert [number for number, of in found if of == tag] == [n for n, (of, _) in enumerate(sent) if of == tag]


@pytest.mark.parametrize("size", [LOW_WATER // 2, 2 * LOW_WATER + 7])
def test_a_large_message_wakes_its_reader_a_few_times(size: int) -> None:
    packets = [bytes([number]) * 8192 for number in range(size // 8192)] + [b"x" * (size % 8192)]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        connection, _ = server.accept()
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send() -> None:
            for part in frames(0, memoryview(b"".join(packets))):
                for first in range(0, len(part), 8192):
                    time.sleep(0.001)
                    sender.sendall(part[first : first + 8192])
            time.sleep(0.05)
            sender.sendall(HEADER.pack(1, 1) + b"y")

        receiver, wakes = PeerStream("the sender"), 0
        receiver.attach(connection)
        large, small = Transfer(memoryview(bytearray(size))), Transfer(memoryview(bytearray(1)))
        receiver.receive(0, large)
        receiver.receive(1, small)
        thread = threading.Thread(target=send)
        thread.start()
        while not small.is_completed():
            assert select.select([connection], [], [], 10)[0], "waits for bytes that nothing sends"
            wakes += 1
            receiver.read()
            assert small.is_completed() <= large.is_completed()
        thread.join()
        connection.close()
    assert bytes(large.view) == b"".join(packets)
    assert bytes(small.view) == b"y"
    assert wakes <= 3 + 2 * size // LOW_WATER < len(packets)
