"""The client of the rendezvous server (launcher/rendezvous_server.py), as a torch store over a Unix socket.

torch accepts any subclass of its store
(https://docs.pytorch.org/docs/2.13/distributed.html#torch.distributed.Store). A wait for a key fails if the process
that would set it is lost.

gloo asks for the address of each peer, one after the other: "0//cpu//0/0", "0//cpu//0/1", and so on. So the server
answers a wait with the addresses of all peers that are known by then, and this client keeps them. W processes then
connect with O(W) requests instead of O(W^2).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOST_PEER = "Connection closed by peer: a process of the run is gone"


class RendezvousStore(dist.Store):
    """One connection to the rendezvous server, or to a private store (distributed/connections/private_store.py).

    Args:
        connection: the connection.
        timeout: the default time limit of a wait.
        reconnect: returns another connection to the same store, for `clone`.

    Attributes:
        generation: the generation of the group that this process forms or is in. A wait ends when the server's differs.
        calls: number of calls by torch so far. While it grows, connecting continues.
        requests: number of requests to the server so far.
        waits_for_peer: whether the current request waits for a key that a peer sets.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout: timedelta,
        reconnect: Callable[[], socket.socket] | None = None,
    ) -> None:
        super().__init__()
        self._reconnect = reconnect
        self.generation = 0
        self._timeout = timeout
        self.calls, self.requests, self.waits_for_peer = 0, 0, False
        self._values: dict[str, str] = {}  # received with others, each until it is read
        self._connection = connection
        self._rest = b""
        self._lock = threading.Lock()  # gloo uses the store from several threads

    @classmethod
    def at(cls, path: str, timeout: timedelta) -> RendezvousStore:
        """Connect to the rendezvous server at a Unix socket."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return cls(connection, timeout)

    def _request(self, op: str, **arguments: Any) -> Any:
        with self._lock:
            new = op != "check"  # NCCL's own thread sends it once a second
            self.calls, self.requests = self.calls + new, self.requests + new
            self.waits_for_peer = op == "wait"
            self._connection.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            while b"\n" not in self._rest:
                data = self._connection.recv(1 << 16)
                if not data:
                    raise ConnectionError("Connection closed by peer: the rendezvous server of the run is gone")
                self._rest += data
            reply, _, self._rest = self._rest.partition(b"\n")
            self.waits_for_peer = False
        return json.loads(reply)["value"]

    def close(self) -> None:
        self._connection.close()

    # -- torch's interface

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        self._request("set", key=key, value=text)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values.pop(key).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", key=key, amount=amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self._request("compare_set", key=key, expected=expected, value=desired)).encode("latin-1")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if all(key in self._values for key in keys):
            self.calls += 1
            return
        seconds = (timeout or self._timeout).total_seconds()
        found = self._request("wait", keys=list(keys), generation=self.generation, seconds=seconds)
        if not isinstance(found, dict):
            raise RuntimeError(LOST_PEER if found is False else f"Wait timeout: {seconds:g} s for {', '.join(keys)}")
        self._values.update(found)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", keys=list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", key=key))

    def num_keys(self) -> int:
        return int(self._request("count"))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> RendezvousStore:
        """Return the same store with a connection of its own, for another thread. Waits of this one do not block it."""
        if self._reconnect is None:
            raise NotImplementedError("this store has one connection")
        return RendezvousStore(self._reconnect(), self._timeout, self._reconnect)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return False
