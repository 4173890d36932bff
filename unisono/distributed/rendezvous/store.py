"""The store that torch asks, where a run has a meeting place (launcher/rendezvous_server.py): keys and values over a
Unix socket.

torch takes any store that inherits from its own (https://docs.pytorch.org/docs/2.13/distributed.html#torch.distributed.Store).
Who waits for a key that a process was to set which is gone is told so, instead of waiting on.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

GONE = "Connection closed by peer: a process of the run is gone"


class RendezvousStore(dist.Store):
    """One connection to the meeting place. `generation`: those who wait for the same thing are in the same one.

    asked  how many questions were asked; waits: is one of them now waiting for what another process is to set?
    """

    def __init__(self, path: str, limit: timedelta) -> None:
        super().__init__()
        self.generation = 0
        self.limit = limit
        self.asked, self.waits = 0, False
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(path)
        self._rest = b""
        self._one = threading.Lock()  # at a time: gloo asks from wherever it connects

    def _ask(self, do: str, **words: Any) -> Any:
        with self._one:
            self.asked += do != "check"  # which NCCL's own thread asks once a second
            self.waits = do == "wait"
            self._line.sendall(json.dumps({"do": do, **words}).encode() + b"\n")
            while b"\n" not in self._rest:
                data = self._line.recv(1 << 16)
                if not data:
                    raise ConnectionError("Connection closed by peer: the meeting place of the run is gone")
                self._rest += data
            answer, _, self._rest = self._rest.partition(b"\n")
            self.waits = False
        return json.loads(answer)["value"]

    def close(self) -> None:
        self._line.close()

    # -- what torch asks

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        self._ask("set", key=key, value=text)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return str(self._ask("get", key=key)).encode("latin-1")

    def add(self, key: str, by: int) -> int:
        return int(self._ask("add", key=key, by=by))

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        return str(self._ask("compare", key=key, old=old, value=new)).encode("latin-1")

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        seconds = (limit or self.limit).total_seconds()
        found = self._ask("wait", keys=list(keys), generation=self.generation, seconds=seconds)
        if not found:
            raise RuntimeError(GONE if found is False else f"Wait timeout: {seconds:g} s for {', '.join(keys)}")

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys=list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def set_timeout(self, limit: timedelta) -> None:
        self.limit = limit

    @property
    def timeout(self) -> timedelta:
        return self.limit

    def has_extended_api(self) -> bool:
        return False
