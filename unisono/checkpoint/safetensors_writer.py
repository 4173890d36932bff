"""A sheet: the one safetensors file that a process writes, laid out so that memory goes to the disk as it is.

    8 bytes                the length n of the header
    n bytes                JSON: {"model.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest               the tensors, one behind the other, row after row

(https://huggingface.co/docs/safetensors, "Format".) It is written here and not by that library because of two things
that it does not do: take the bytes from memory that was laid out beforehand, and add up the sha256 on their way. It is
read with the library, which checks every header before it believes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from unisono.tensors.spec import as_bytes

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""What the format calls torch's dtypes. Another one goes as bytes: state.json knows what they are."""

SUFFIX = ".safetensors"

CHUNK = 1 << 24
"""Bytes that are handed on at once. Between two of them the writer looks whether it is still wanted."""


LARGE = 1 << 26
"""Bytes from which several threads copy, up to THREADS of them, and so many numbers at once."""

THREADS, PIECE = 4, 1 << 20


class FileLayout(NamedTuple):
    """Where everything goes: `head` comes first, then `size` bytes with each tensor from its place on."""

    head: bytes
    places: Mapping[str, int]
    size: int


def file_layout(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    """The sheet of these tensors. The widest numbers come first: then all begin where their kind likes to, and there
    are no gaps, which the format forbids."""
    places, header, end = {}, {}, 0
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        places[name], begin = end, end
        end += t.nbytes
        kind, shape = NAMES.get(t.dtype, "U8"), [*t.shape] if t.dtype in NAMES else [t.nbytes]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, places, end)


class StagingBuffer:
    """Memory in which a state waits to be written, while training goes on with its own. It is made once and used again;
    with an accelerator it is pinned, so that the copy out of the device runs at the speed of the bus."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sheet: FileLayout | None = None
        self._rooms: dict[str, torch.Tensor] = {}

    def take(self, sheet: FileLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
        """Copy them in, and return what is to be written. This is all that training waits for."""
        away = next((t.device for t in tensors.values() if t.device.type != "cpu"), None)
        if sheet != self._sheet:
            if sheet.size > len(self._memory):
                self._memory = torch.empty(0, dtype=torch.uint8)  # the old one may go before there is a new one
                self._memory = torch.empty(sheet.size, dtype=torch.uint8, pin_memory=away is not None)
            self._rooms = {name: _room(self._memory, sheet.places[name], t) for name, t in tensors.items()}
            self._sheet = sheet
        if away is None and sheet.size >= LARGE:
            self._copy_side_by_side(tensors)
        else:
            for name, tensor in tensors.items():
                self._rooms[name].copy_(tensor, non_blocking=True)
        if away is not None:
            torch.accelerator.synchronize(away)
        return _chunks(sheet.head, [self._memory[: sheet.size]])

    def _copy_side_by_side(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Within the CPU's memory one thread copies less than memory could take; torch's own threads are a setting of
        the mathematics, so these are others."""
        rows = [(self._rooms[name].reshape(-1), tensor.reshape(-1)) for name, tensor in tensors.items()]
        pieces = [pair for row in rows for pair in zip(row[0].split(PIECE), row[1].split(PIECE), strict=True)]
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda first: _copy(pieces[first::threads]), range(threads)):
                pass


def _copy(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for room, piece in pieces:
        room.copy_(piece)


def chunks_in_place(sheet: FileLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """What is to be written, from where it lies: nothing may be changed until it is."""
    return _chunks(sheet.head, (tensors[name].cpu() for name in sheet.places))


def _room(memory: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _chunks(head: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        if not tensor.numel():
            continue
        row = memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]
        for begin in range(0, len(row), CHUNK):
            yield row[begin : begin + CHUNK]
