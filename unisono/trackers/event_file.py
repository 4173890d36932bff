"""TensorBoard's event files, without TensorBoard.

A file is a sequence of records, each with two checksums (tensorflow/core/lib/io/record_writer.h):

    length (8 bytes) | masked CRC-32C of it (4) | an Event (length bytes) | masked CRC-32C of it (4)

An Event is a protocol buffer (tensorboard/compat/proto/event.proto). It holds a summary (summary.proto): any number of
values with names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

VARINT, DOUBLE, LENGTH, FLOAT = 0, 1, 2, 5
"""Wire types of protocol buffers (https://protobuf.dev/programming-guides/encoding)."""

DT_STRING = 7
"""TensorFlow's number for strings (tensorboard/compat/proto/types.proto)."""

CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
"""Channels of a PNG file by its color type (https://www.w3.org/TR/png-3/#3colourType)."""


def record(data: bytes) -> bytes:
    """Return data as a record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def event(wall_time: float, values: bytes = b"", *, step: int | None = None, version: str = "") -> bytes:
    """Return an Event.

    Args:
        wall_time: seconds since 1970.
        values: the values of its summary, one after the other (`number`, `text`, `image`, `histogram`).
        step: the step, from 0.
        version: of the file format, in the first event of a file.
    """
    whole = _key(1, DOUBLE) + struct.pack("<d", wall_time)
    if step is not None:
        whole += _key(2, VARINT) + _varint(step)
    if version:
        whole += _field(3, version.encode())
    return whole + (_field(5, values) if values else b"")


def number(name: str, value: float) -> bytes:
    """Return a scalar of a summary. Values beyond the range of float32 become infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _value(name, _key(2, FLOAT) + packed)


def text(name: str, words: str) -> bytes:
    """Return a text of a summary, in Markdown."""
    metadata = _field(1, _field(1, b"text"))  # plugin_data.plugin_name
    shape = _field(2, _field(2, _key(1, VARINT) + _varint(1)))
    tensor = _key(1, VARINT) + _varint(DT_STRING) + shape + _field(8, _utf8(words))
    return _value(name, _field(9, metadata) + _field(8, tensor))


def image(name: str, png: bytes) -> bytes:
    """Return an image of a summary. `png`: a PNG file, whose header names the size at bytes 16 to 23."""
    width, height = struct.unpack_from(">II", png, 16)
    sizes = ((1, height), (2, width), (3, CHANNELS[png[25]]))
    return _value(name, _field(4, b"".join(_key(n, VARINT) + _varint(size) for n, size in sizes) + _field(4, png)))


def histogram(name: str, counts: Sequence[int], edges: Sequence[float]) -> bytes:
    """Return a histogram of a summary: counts of bins, and their edges. Sums are those of the middles of the bins.

    A sum beyond the range of float64 is infinite.
    """
    middles = [low / 2 + high / 2 for low, high in pairwise(edges)]
    total = sum(count * middle for count, middle in zip(counts, middles, strict=True))
    squares = sum(count * middle * middle for count, middle in zip(counts, middles, strict=True))
    numbers = enumerate((edges[0], edges[-1], sum(counts), total, squares), start=1)
    content = b"".join(_key(field, DOUBLE) + struct.pack("<d", value) for field, value in numbers)
    for field, bins in ((6, edges[1:]), (7, counts)):
        content += _field(field, struct.pack(f"<{len(bins)}d", *bins))
    return _value(name, _field(5, content))


def _value(name: str, content: bytes) -> bytes:
    return _field(1, _field(1, _utf8(name)) + content)


def _utf8(text: str) -> bytes:
    """Return text as UTF-8. Half a surrogate pair is escaped."""
    return text.encode(errors="backslashreplace")


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


def steps_of(path: Path) -> list[int]:
    """Return the steps of the events in a file.

    A record that is cut off, or whose length is damaged, ends it. The last record must be right as a whole.
    """
    data, at = path.read_bytes(), 0
    found: list[int] = []
    last = b""  # the last record's content and checksum
    while at + 12 <= len(data):
        length, checksum = struct.unpack_from("<QI", data, at)
        content = data[at + 12 : at + 16 + length]
        if checksum != masked_crc(data[at : at + 8]) or len(content) < length + 4:
            break
        last = content
        found.append(_read_varint(content, 10) if length > 9 and content[9] == 2 << 3 else -1)  # after the time
        at += 16 + length
    if last and struct.unpack("<I", last[-4:])[0] != masked_crc(last[:-4]):
        found.pop()
    return [step for step in found if step >= 0]


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
