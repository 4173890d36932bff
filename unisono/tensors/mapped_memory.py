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

PAGE = mmap.PAGESIZE
"""Bytes: tensors begin at multiples of this, so that the pages of each can be replaced."""

WINDOW = 16 * 2**20
"""Bytes that operations may use before pages are dropped."""

LARGE = 256 * 2**10
"""Bytes from which a tensor is allocated in a file."""

MADV_PAGEOUT = 21
"""Linux 5.4. Module mmap does not have it, and only advises about memory that it has mapped itself."""

MAP_FIXED = 0x10
"""Linux: map at this address, in place of what is there. Module mmap has neither the flag nor an address."""

PUNCH_HOLE = 0x03
"""Linux: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""

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
        self.is_full = LIBC is None
        self._arenas: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._numbers: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, Any]] = weakref.WeakKeyDictionary()
        self._arena: mmap.mmap | None = None
        self._used = self._allocated = self._touched = 0

    def empty(self, nbytes: int) -> torch.Tensor | None:
        """Return `nbytes` bytes [nbytes] that are zero; None if the disk has no room for them."""
        size = _whole_pages(nbytes)
        if self._arena is None or self._used + size > len(self._arena):
            # files grow with the model: each takes two file numbers, and a process may have 1024
            self._arena = (
                None if self.is_full else self._add_arena(max(size, ARENA, _whole_pages(self._allocated // 8)))
            )
        if self._arena is None:
            return None
        found = torch.frombuffer(self._arena, dtype=torch.uint8, count=nbytes, offset=self._used)
        self._used += size
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
        self._numbers[arena] = number, weakref.finalize(arena, os.close, number)
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
            if is_plain(tensor):
                self.touch(tensor.nbytes)

    def move_in(self, params: Iterable[torch.Tensor]) -> None:
        """Move parameters into files that a library has mapped from files of its own: weights of a checkpoint.

        Each stays the same object, and parameters that share memory still do. Other parameters that operators did not
        allocate (from numpy, say) stay where they are, because other objects may refer to their memory.
        """
        foreign = mapped_ranges()
        moved: dict[tuple[int, int], torch.UntypedStorage] = {}
        for tensor in self.releasing(list(params)):
            address = _address(tensor) if _is_large(tensor) and not tensor.is_shared() else 0
            if not any(first <= address < end for first, end in foreign) or self.holds(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage.data_ptr(), storage.nbytes()
            if key not in moved:
                room = self.empty(storage.nbytes())
                if room is None:
                    continue
                whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                for first in range(0, whole.nbytes, WINDOW):
                    piece = whole[first : first + WINDOW]
                    room[first : first + WINDOW].copy_(piece)
                    page_out(piece)
                    self.touch(piece.nbytes)
                moved[key] = room.untyped_storage()
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(moved[key], *place)

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move these tensors from the files to ordinary memory at the same addresses.

        So whatever refers to their memory still does. Other tensors (attributes of modules, say) remain in the files.
        From now on what is written to them stays in this process: processes that it forks, the workers of a loader, do
        not share them. A file is removed when no tensor uses it.
        """
        self._arena = None
        replaced: dict[int, int] = {}  # the ends of ranges by their beginnings
        for tensor in tensors:
            if is_plain(tensor) and self.holds(tensor):
                storage = tensor.untyped_storage()
                first, size = storage.data_ptr(), _whole_pages(storage.nbytes())
                if first not in replaced:
                    replaced[first] = first + size
                    for begin in range(first, first + size, WINDOW):
                        part = min(WINDOW, first + size - begin)
                        content = ctypes.string_at(begin, part)
                        _map(begin, part, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
                        ctypes.memmove(begin, content, part)
        for arena, (number, close) in list(self._numbers.items()):
            start, size = _span(arena)
            begin = start
            inside = sorted((first, end) for first, end in replaced.items() if start <= first < start + size)
            for first, end in [*inside, (start + size, start + size)]:
                if begin < first:
                    _map(begin, first - begin, mmap.MAP_PRIVATE, number, begin - start)
                if first < end:  # give the room on the disk back
                    LIBC.fallocate(number, PUNCH_HOLE, ctypes.c_long(first - start), ctypes.c_long(end - first))
                begin = end
            close()
        self._numbers.clear()
        self._arenas.clear()  # no page is dropped any more


def _span(arena: mmap.mmap) -> tuple[int, int]:
    """Return the address and the size of a file in memory."""
    return torch.frombuffer(arena, dtype=torch.uint8, count=1).data_ptr(), len(arena)


def _whole_pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _map(address: int, size: int, flags: int, number: int, offset: int) -> None:
    """Map pages in place of those at an address: mmap(2) with MAP_FIXED."""
    LIBC.mmap.restype = ctypes.c_void_p
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    place = ctypes.c_void_p(address), ctypes.c_size_t(size)
    if LIBC.mmap(*place, rights, flags | MAP_FIXED, number, ctypes.c_long(offset)) != address:
        raise MemoryError(f"cannot map {size} bytes")


def mapped_ranges() -> list[tuple[int, int]]:
    """Return the ranges [first, end) of addresses at which files are mapped."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, _, _, _, node, *path = line.split(maxsplit=5)
            if node != "0" and path and path[0].startswith("/"):
                first, _, end = addresses.partition("-")
                found.append((int(first, 16), int(end, 16)))
    return found


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

    supports_higher_order_operators = True  # torch.cond, flex_attention

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
        # others than aten's may return what they write later (collectives), or keep (an operator of the script)
        returns = schema.returns if schema is not None and func.namespace == "aten" else []
        is_new = bool(returns) and all(returned.alias_info is None for returned in returns)
        if is_new and func not in _KEPT and not kwargs.get("pin_memory"):
            # torch fills what is empty, if it is to be deterministic
            is_empty = func in _EMPTY and not torch.are_deterministic_algorithms_enabled()
            known = {address for t in inputs if (address := _address(t))}
            result = tree_map_only(torch.Tensor, lambda t: self._moved(t, known, has_content=not is_empty), result)
        if large or _is_large(result):
            self.memory.touch(large or result.nbytes)
        return result

    def _moved(self, tensor: torch.Tensor, known: set[int], *, has_content: bool) -> torch.Tensor:
        """Return a new tensor in a file; a tensor that is small, or shares its memory, as it is."""
        address = _address(tensor) if _is_large(tensor) else 0
        if not address or address in known or tensor.untyped_storage().nbytes() != tensor.nbytes:
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
    odd = tensor.is_nested or tensor.is_quantized or any(getattr(tensor, "names", ()))
    return usual and not (odd or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


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
