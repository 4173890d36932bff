"""Allocate tensors in memory-mapped files, to build a model that is larger than the memory of a process.

A process can drop the pages of a file at any time, and the operating system reads them again when a tensor is used. If
memory becomes scarce, it writes them to the disk. The files are unlinked, so nothing remains when the last tensor is
freed, or the process dies.

    allocated in files         layer 0 | layer 1 | layer 2 | layer 3        by the constructor, with the bits of memory
    resident at a time                   -------                            WINDOW, and the tensor in use
    moved to ordinary memory             part of this process               when the model is divided
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ARENA = 256 * 2**20
"""Bytes of a file at least. A larger tensor has a file of its own."""

ALIGNMENT = 64
"""Bytes: tensors begin at multiples of this, as those in torch's own memory do."""

WINDOW = 16 * 2**20
"""Bytes that operations may use before pages are dropped."""

LARGE = 256 * 2**10
"""Bytes from which a tensor is allocated in a file."""

MADV_PAGEOUT = 21
"""Linux 5.4. Module mmap does not have it, and only advises about memory that it has mapped itself."""

MAP_FIXED = 0x10
"""Linux: map at this address, in place of what is there. Module mmap has neither the flag nor an address."""

LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None

_aten = torch.ops.aten

_EMPTY = {
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default),
}
"""Operators whose results have no content yet."""

_KEPT = {_aten.from_file.default, _aten.pin_memory.default, _aten._pin_memory.default}  # noqa: SLF001  (operators)
"""Operators whose results are in a certain kind of memory."""


class MappedMemory:
    """Memory-mapped, unlinked files in a folder for temporary files.

    Attributes:
        is_full: Whether the disk had no room for a tensor. Later ones are allocated in ordinary memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Create memory without files yet; `folder`: by default that of `scratch_folder`."""
        self.folder = folder
        self.is_full = False
        self._arenas: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._numbers: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
        self._arena: mmap.mmap | None = None
        self._used = self._allocated = self._touched = 0

    def empty(self, nbytes: int) -> torch.Tensor | None:
        """Return `nbytes` bytes [nbytes] that are zero; None if the disk has no room for them."""
        if self._arena is None or self._used + nbytes > len(self._arena):
            # files grow with the model: each takes two file numbers, and a process may have 1024
            self._arena = None if self.is_full else self._add_arena(max(nbytes, ARENA, self._allocated // 8))
        if self._arena is None:
            return None
        found = torch.frombuffer(self._arena, dtype=torch.uint8, count=nbytes, offset=self._used)
        self._used = -(-(self._used + nbytes) // ALIGNMENT) * ALIGNMENT
        return found

    def _add_arena(self, size: int) -> mmap.mmap | None:
        self._used = 0
        try:
            with tempfile.TemporaryFile(dir=self.folder or scratch_folder()) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # or a full disk would kill the process at a later write
                arena, number = mmap.mmap(file.fileno(), size), os.dup(file.fileno())
        except OSError:
            self.is_full = True
            return None
        self._arenas.add(arena)
        self._numbers[arena] = number
        weakref.finalize(arena, os.close, number)
        self._allocated += size
        return arena

    def allocating(self) -> AllocateInFiles:
        """Return a context in which operators allocate their large results in the files."""
        return AllocateInFiles(self)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor on the CPU is in one of the files."""
        address = tensor.untyped_storage().data_ptr()
        return any(first <= address < first + size for first, size in self._spans())

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Return the address and the size of every file in memory."""
        return map(_span, list(self._arenas))

    def touch(self, nbytes: int) -> None:
        """Count bytes that were used, and drop pages from this process when they are many."""
        self._touched += nbytes
        if self._touched > WINDOW:
            self.release_pages()

    def release_pages(self) -> None:
        """Drop the pages of all files from this process. Their content stays."""
        self._touched = 0
        for arena in list(self._arenas):
            arena.madvise(mmap.MADV_DONTNEED)  # of a file that is mapped as shared, it loses nothing

    def releasing(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield these tensors, and drop pages while they are used one after the other."""
        for tensor in tensors:
            yield tensor
            self.touch(tensor.nbytes)

    def move_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move these tensors into files, if operators did not allocate them: weights that a library has mapped, say.

        Each stays the same object, and tensors that share memory still do.
        """
        moved: dict[int, torch.UntypedStorage] = {}
        for tensor in self.releasing(list(tensors)):
            if not _is_large(tensor) or self.holds(tensor):
                continue
            key = tensor.untyped_storage().data_ptr()
            if key not in moved:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                room = self.empty(whole.nbytes)
                if room is None:
                    return
                for first in range(0, whole.nbytes, WINDOW):
                    piece = whole[first : first + WINDOW]
                    room[first : first + WINDOW].copy_(piece)
                    page_out(piece)
                    self.touch(piece.nbytes)
                moved[key] = room.untyped_storage()
            _use_storage(tensor, moved[key])

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move these tensors from the files to ordinary memory. Each stays the same object; shared memory is shared.

        A file is removed when no other tensor uses it. Other tensors remain in the files (attributes of modules, say).
        From now on what is written to them stays in this process, as in ordinary memory: processes that it forks, the
        workers of a loader, do not share them.
        """
        self._arena = None
        moved: dict[int, torch.UntypedStorage] = {}
        for tensor in self.releasing(list(tensors)):
            if is_plain(tensor) and self.holds(tensor):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                moved[key] = moved.get(key) or storage.clone()
                _use_storage(tensor, moved[key])
        self._make_private()

    def _make_private(self) -> None:
        """Map the files again at their addresses, as private memory with the same content."""
        for arena, number in list(self._numbers.items()):
            first, size = _span(arena)
            if LIBC is not None:
                LIBC.mmap.restype = ctypes.c_void_p
                rights, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED
                LIBC.mmap(ctypes.c_void_p(first), ctypes.c_size_t(size), rights, how, number, ctypes.c_long(0))
        self._numbers.clear()
        self._arenas.clear()


def _span(arena: mmap.mmap) -> tuple[int, int]:
    """Return the address and the size of a file in memory."""
    return torch.frombuffer(arena, dtype=torch.uint8, count=1).data_ptr(), len(arena)


def _use_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Let a tensor use a copy of its storage."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def page_out(tensor: torch.Tensor) -> None:
    """Drop the pages of a contiguous tensor from this process, if they are of a file that another library has mapped.

    Memory of another kind is swapped, if there is a swap device. Its content stays in any case: madvise(2).
    """
    if LIBC is not None:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_PAGEOUT)


class AllocateInFiles(TorchDispatchMode):
    """Allocate the large results of operators in files, and drop pages while they compute.

    Only results in new memory of the CPU are replaced, before anything refers to them, so tensors share memory as they
    do without this mode. Their content has the same bits.
    """

    def __init__(self, memory: MappedMemory) -> None:
        super().__init__()
        self.memory = memory

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a constructor that calls a compiled function computes as it does without this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        large = sum(t.nbytes for t in inputs if _is_large(t))
        if func is _aten.clone.default and _is_large(args[0]):  # not by way of ordinary memory, which malloc may keep
            copy = self._moved(_aten.empty_like.default(*args, **kwargs), set(), has_content=False).copy_(args[0])
            self.memory.touch(large + copy.nbytes)
            return copy
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)  # it has no public name; a higher-order operator has none
        is_new = schema is not None and all(returned.alias_info is None for returned in schema.returns)
        if is_new and func not in _KEPT and not kwargs.get("pin_memory"):
            known = {address for t in inputs if (address := _address(t))}
            result = tree_map_only(
                torch.Tensor, lambda t: self._moved(t, known, has_content=func not in _EMPTY), result
            )
        if large or _is_large(result):
            self.memory.touch(large or result.nbytes)
        return result

    def _moved(self, tensor: torch.Tensor, known: set[int], *, has_content: bool) -> torch.Tensor:
        """Return a new tensor in a file; a tensor that is small, or shares its memory, as it is."""
        storage = tensor.untyped_storage() if _is_large(tensor) else None
        if storage is None or storage.data_ptr() in known or storage.nbytes() != tensor.nbytes:
            return tensor
        room = self.memory.empty(tensor.nbytes)
        if room is None:
            return tensor
        moved = room.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return moved.copy_(tensor) if has_content else moved


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0: it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_plain(value) and value.nbytes >= LARGE


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary one, dense and in memory of the CPU."""
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    usual = type(tensor) in kinds and tensor.device.type == "cpu" and tensor.layout is torch.strided
    # torch up to 2.12 had tensors with names
    return usual and not (tensor.is_nested or tensor.is_quantized or any(getattr(tensor, "names", ())))


def scratch_folder() -> Path:
    """Return a folder for temporary files that are on a disk, and not in memory like a tmpfs."""
    folders = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    in_memory = {Path(words[1]) for words in _mounts() if words[2] in ("tmpfs", "ramfs")}
    for folder in folders:
        mounted = next((p for p in [folder, *folder.parents] if p.is_mount()), None)
        if mounted not in in_memory and os.access(folder, os.W_OK):
            return folder
    return folders[0]


def _mounts() -> list[list[str]]:
    with suppress(OSError):
        return [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return []
