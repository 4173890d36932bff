"""Record numbers as TensorBoard's event files in `RUN/tensorboard/`, without TensorBoard.

A file is a sequence of records, each with two checksums (tensorflow/core/lib/io/record_writer.h):

    length (8 bytes) | masked CRC-32C of it (4) | an Event (length bytes) | masked CRC-32C of it (4)

An Event is a protocol buffer (tensorboard/compat/proto/event.proto, summary.proto). One holds all numbers of a step, so
a step is written whole or not at all. Every start of the run has a file of its own, and TensorBoard reads all of them.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.trackers.tracker import TrackedRun

FLOAT, LENGTH, DOUBLE = 5, 2, 1
"""Wire types of protocol buffers (https://protobuf.dev/programming-guides/encoding)."""

DT_STRING = 7
"""TensorFlow's number for strings (tensorboard/compat/proto/types.proto)."""


class TensorBoard:
    """Append to an event file of this start of the run."""

    def start(self, run: TrackedRun) -> int:
        folder = run.dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        files = sorted(folder.glob("events.out.tfevents.*"))
        last = max((step for file in files for step in _steps(file)), default=-1)
        now = time.time()
        self._file = (folder / f"events.out.tfevents.{now:.6f}.{os.getpid()}").open("ab")
        self._write(event(now, version="brain.Event:2"))
        if not files:
            for name, values in (("settings", run.settings), ("environment", run.environment)):
                self._write(event(now, text={name: f"```json\n{json.dumps(values, indent=2, default=str)}\n```"}))
        self.flush()
        return last

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._write(event(time, step, numbers))

    def flush(self) -> None:
        self._file.flush()

    def finish(self, result: Mapping[str, Any]) -> None:
        if result:
            shown = json.dumps(result, indent=2, default=str)
            self._write(event(time.time(), text={"result": f"```json\n{shown}\n```"}))
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.write(record(data))


def record(data: bytes) -> bytes:
    """Return data as a record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def event(
    wall_time: float,
    step: int | None = None,
    numbers: Mapping[str, float] | None = None,
    *,
    text: Mapping[str, str] | None = None,
    version: str = "",
) -> bytes:
    """Return an Event.

    Args:
        wall_time: seconds since 1970.
        step: the step, from 0.
        numbers: scalars by name.
        text: texts by name, in Markdown.
        version: of the file format, in the first event of a file.
    """
    values = b""
    for name, number in (numbers or {}).items():
        values += _field(1, _field(1, name.encode()) + _key(2, FLOAT) + struct.pack("<f", number))
    for name, words in (text or {}).items():
        metadata = _field(1, _field(1, b"text"))  # plugin_data.plugin_name
        tensor = _key(1, 0) + _varint(DT_STRING) + _field(2, _field(2, _key(1, 0) + _varint(1)))
        values += _field(
            1, _field(1, name.encode()) + _field(9, metadata) + _field(8, tensor + _field(8, words.encode()))
        )
    whole = _key(1, DOUBLE) + struct.pack("<d", wall_time)
    if step is not None:
        whole += _key(2, 0) + _varint(step)
    if version:
        whole += _field(3, version.encode())
    return whole + (_field(5, values) if values else b"")


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _field(number: int, content: bytes) -> bytes:
    """Return a field whose content has a length: a string, bytes or a message."""
    return _key(number, LENGTH) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def _steps(path: Path) -> Iterator[int]:
    """Yield the steps of the events with scalars in a file. A record that is cut off or damaged ends it."""
    data, at = path.read_bytes(), 0
    while at + 12 <= len(data):
        length = struct.unpack_from("<Q", data, at)[0]
        content = data[at + 12 : at + 12 + length]
        checksum = data[at + 12 + length : at + 16 + length]
        if len(checksum) < 4 or struct.unpack("<I", checksum)[0] != masked_crc(content):
            return
        if len(content) > 9 and content[9] == 2 << 3:  # after the time: the step
            yield _read_varint(content, 10)
        at += 16 + length


def _read_varint(data: bytes, at: int) -> int:
    number = shift = 0
    while data[at] > 127:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift


def masked_crc(data: bytes) -> int:
    """Return the checksum of a record: CRC-32C (RFC 3720, appendix B.4), rotated, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_TABLE = _table()
