"""Messages between the launcher and its agent on another host, over two pipes or a socket.

A message is a line of JSON. If it has the key `bytes`, that many bytes follow the line:

    {"output": 3, "bytes": 12}
    step 1 of 90
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, NamedTuple

CHUNK = 1 << 16
"""Bytes that are read at once."""

MOST_LINE, MOST_DATA = 1 << 26, 1 << 28
"""Most bytes of a line, and of the data after it: far more than any message has."""


class Message(NamedTuple):
    """A message: its values, and the bytes after it."""

    values: dict[str, Any]
    data: bytes


class MessageStream:
    """The messages of one connection.

    Args:
        reader: the descriptor to read from.
        writer: the descriptor to write to.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self._writer = reader, writer
        self._rest = b""
        self._lock = threading.Lock()  # several threads may send

    def send(self, data: bytes = b"", **values: Any) -> None:
        """Send a message, with `data` after it if there is any.

        Raises:
            OSError: the connection has ended.
        """
        if data:
            values["bytes"] = len(data)
        view = memoryview(json.dumps(values).encode() + b"\n" + data)
        with self._lock:
            while view:
                view = view[os.write(self._writer, view) :]

    def receive(self) -> list[Message] | None:
        """Return the messages that are complete after one read, which may wait; None at the end of the connection.

        Raises:
            ValueError: what arrives is no message, as when a shell prints a greeting.
        """
        try:
            data = os.read(self.reader, CHUNK)
        except OSError:
            data = b""
        if not data:
            return None
        self._rest += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> Message | None:
        """Return the next message if all of it has arrived."""
        line, newline, behind = self._rest.partition(b"\n")
        if len(line) > MOST_LINE:
            raise ValueError(f"a message of more than {MOST_LINE} bytes")
        if not newline:
            return None
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError(line.decode(errors="replace"))
        length = int(values.get("bytes", 0))
        if not 0 <= length <= MOST_DATA:
            raise ValueError(f"a message with {length} bytes of data")
        if len(behind) < length:
            return None
        self._rest = behind[length:]
        return Message(values, behind[:length])
