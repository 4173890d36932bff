"""The store of the rendezvous server: gloo's addresses arrive together, and every other value is read anew."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from unisono.distributed.rendezvous.store import RendezvousStore
from unisono.launcher.rendezvous_server import RendezvousServer

Open = Callable[[], RendezvousStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Return a function that connects to a server."""
    stores: list[RendezvousStore] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        server = RendezvousServer(listener, 2, silence=60.0, notify=lambda event: None)
        thread = threading.Thread(target=server.serve)
        thread.start()

        def open_store() -> RendezvousStore:
            stores.append(RendezvousStore.at(str(tmp_path / "s"), timedelta(seconds=30)))
            return stores[-1]

        yield open_store
        for store in stores:
            store.close()
        server.close()
        thread.join()


def test_addresses_of_gloo_arrive_together(open_store: Open) -> None:
    writer, reader = open_store(), open_store()
    for rank in range(100):
        writer.set(f"0//cpu//0/{rank}", f"address {rank}")
    found = []
    for rank in range(100):
        reader.wait([f"0//cpu//0/{rank}"])
        found.append(reader.get(f"0//cpu//0/{rank}"))
    assert found == [f"address {rank}".encode() for rank in range(100)]
    assert (reader.requests, reader.calls) == (1, 200)


def test_an_address_that_comes_later_is_waited_for(open_store: Open) -> None:
    writer, reader = open_store(), open_store()
    writer.set("0//cpu//0/0", "a")
    assert reader.get("0//cpu//0/0") == b"a"
    later = threading.Timer(0.2, lambda: writer.set("0//cpu//0/1", "b"))
    later.start()
    assert reader.get("0//cpu//0/1") == b"b"
    later.join()  # it waits for an answer, too
    assert reader.get("0//cpu//0/0") == b"a"  # again
    assert reader.requests == 3


@pytest.mark.parametrize("key", ["mine/7", "0//mine/7", "count"])
def test_a_value_that_changes_is_read_anew(open_store: Open, key: str) -> None:
    writer, reader = open_store(), open_store()
    beside = key.replace("7", "8")
    for value in (b"first", b"second"):
        writer.set(key, value)
        writer.set(beside, value)
        assert [reader.get(key), reader.get(beside)] == [value, value]
