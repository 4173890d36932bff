"""Write the one safetensors file of a process, in a layout that takes memory to the disk without another copy.

    8 bytes                the length n of the header
    n bytes                JSON: {"model.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest               the tensors, one after another, in row-major order

(https://huggingface.co/docs/safetensors, "Format".) The safetensors library writes the format too, but not from memory
that was laid out beforehand, and without the sha256 of the file, which is computed here while it is written. Files are
read with the library, which validates every header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from unisono.checkpoint.contents import DTYPES
from unisono.machine.host_load import usable_cores
from unisono.tensors.spec import as_bytes

NAMES = {getattr(torch, name): kind for name, (kind, _) in DTYPES.items() if kind}
"""Names of dtypes in the format. A tensor of another dtype is stored as bytes; state.json states its dtype."""

CHUNK = 1 << 24
"""Bytes that are written at once. Between two chunks the writer checks whether the save was canceled."""

LARGE = 1 << 26
"""Bytes of a file from which on several threads copy it."""

THREADS, PIECE = 4, 1 << 20
"""Maximum number of threads that copy, and elements that one copies at once."""


class FileLayout(NamedTuple):
    """The header, the offset of each tensor after it, and the size of all tensors in bytes."""

    head: bytes
    places: Mapping[str, int]
    size: int


def file_layout(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    """Return the layout of a file of these tensors.

    The widest dtypes come first: then every tensor is aligned, without gaps, which the format forbids.
    """
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
    """Memory that holds a copy of the state while it is written and training continues.

    It is allocated at the first save and reused. With an accelerator it is pinned, so that the copy from the device
    runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None
        self._views: dict[str, torch.Tensor] = {}

    def stage(self, layout: FileLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
        """Copy the tensors, and return the chunks to write. Training waits for nothing else."""
        device = next((t.device for t in tensors.values() if t.device.type != "cpu"), None)
        if layout != self._layout:
            if layout.size > len(self._memory):
                self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
                self._memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=device is not None)
            self._views = {name: _view(self._memory, layout.places[name], t) for name, t in tensors.items()}
            self._layout = layout
        if device is None and layout.size >= LARGE:
            self._copy_in_threads(tensors)
        else:
            for name, tensor in tensors.items():
                self._views[name].copy_(tensor, non_blocking=True)
        if device is not None:
            torch.accelerator.synchronize(device)
        return _chunks(layout.head, [self._memory[: layout.size]])

    def _copy_in_threads(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy with threads of our own: one thread does not use the whole bandwidth of the memory, and the number of
        torch's threads is a setting that affects bits."""
        rows = [(self._views[name].reshape(-1), tensor.reshape(-1)) for name, tensor in tensors.items()]
        pieces = [pair for row in rows for pair in zip(row[0].split(PIECE), row[1].split(PIECE), strict=True)]
        threads = min(THREADS, len(usable_cores()))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda first: _copy(pieces[first::threads]), range(threads)):
                pass


def chunks_in_place(layout: FileLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Return the chunks to write, without a copy: the tensors must not change until they are written."""
    return _chunks(layout.head, (tensors[name].cpu() for name in layout.places))


def _copy(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pieces:
        target.copy_(source)


def _view(memory: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _chunks(head: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        if not tensor.numel():
            continue
        row = as_bytes(tensor).numpy().data
        for begin in range(0, len(row), CHUNK):
            yield row[begin : begin + CHUNK]
