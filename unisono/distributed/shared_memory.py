"""Memory that the processes of one host share: what one has written there, the others read without a message.

Linux gives a process memory without a name (memfd_create, https://man7.org/linux/man-pages/man2/memfd_create.2.html),
which other processes of the same user open through /proc. Nothing of it lies in a file system, so nothing is left
behind, and /dev/shm, which containers keep small, has no say in it. Who has opened it keeps it, even if its maker dies.

Processes of other hosts, users and containers do not see each other there, nor do those of other systems: that is found
out when a group is joined (`find_neighbours`), and messages are sent instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from unisono.errors import WorldError

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup

LABEL = "unisono"
"""What such memory is called in /proc/PID/maps."""

_serial = itertools.count()


class SharedName(NamedTuple):
    """What memory is called between its maker and its neighbours. `number` is never used again, a descriptor may be."""

    descriptor: int
    number: int


class SharedMemory:
    """`size` bytes that neighbours can open, zeros at first. Given back when nobody holds them any more.

    A fork of this process may write to it as to any other memory: nobody else sees that.
    """

    def __init__(self, size: int) -> None:
        try:
            descriptor = os.memfd_create(LABEL)
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, max(size, 1))
            # not from_file: this storage keeps a descriptor, with which torch.multiprocessing can send a tensor
            storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, max(size, 1))  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as error:
            raise _refused(size, error) from error
        self.name = SharedName(descriptor, next(_serial))
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)[:size]
        _libc()
        _made.add(self)

    def part_from_parent(self) -> None:
        """In a fork, which has this memory open as well: what is written to it from now on stays there."""
        begin, size = self.bytes.data_ptr(), max(len(self.bytes), 1)
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        if _libc().mmap(begin, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self.name.descriptor, 0) != begin:
            os.abort()  # rather than let it write into its parent's gradient


MAP_FIXED = 0x10
"""Linux's, on every processor (asm-generic/mman-common.h); Python's mmap does not name it."""

_made: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


@cache
def _libc() -> ctypes.CDLL:
    """Made before the first fork, and what is to be done in one is noted."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    os.register_at_fork(after_in_child=_part_from_parent)
    return libc


def _part_from_parent() -> None:
    for memory in list(_made):
        memory.part_from_parent()


def map_shared_memory(pid: int, name: SharedName, size: int) -> torch.Tensor:
    """The memory [size] bytes that process `pid` calls `name`: reading and writing, they are the same bytes there.

    Raises ConnectionError if the process is gone, WorldError if the system refuses.
    https://docs.pytorch.org/docs/2.13/generated/torch.from_file.html
    """
    path = _path(pid, name.descriptor)
    try:
        return torch.from_file(path, shared=True, size=max(size, 1), dtype=torch.uint8)[:size]
    except RuntimeError as error:
        if os.path.lexists(path):
            raise _refused(size, error) from error
        raise ConnectionError(f"memory closed by peer: process {pid} is gone ({error})") from error


def _refused(size: int, error: Exception) -> WorldError:
    return WorldError(
        f"{size} bytes of memory were to be shared with the other processes of this host.",
        f"The system refused: {error}",
        "look at the limits of this shell (ulimit -a): open files, file size, virtual memory.",
    )


def _path(pid: int, descriptor: int) -> str:
    return f"/proc/{pid}/fd/{descriptor}"


@dataclass(frozen=True)
class _Probe:
    """A little memory with a secret in it: who can read it there is a neighbour."""

    pid: int
    descriptor: int
    secret: str

    def seen(self) -> bool:
        path = _path(self.pid, self.descriptor)
        try:  # in another container the number may be anybody's: nothing is opened that was not made here
            if not os.readlink(path).startswith(f"/memfd:{LABEL}"):
                return False
            found = map_shared_memory(self.pid, SharedName(self.descriptor, 0), len(self.secret))
        except (OSError, WorldError):  # nobody's, or not ours to look at
            return False
        return bytes(found.tolist()) == self.secret.encode()


def find_neighbours(group: ProcessGroup) -> Mapping[int, int]:
    """{rank: process id} of those whose memory this process can open, and who can open its own.

    Only processes whose gradients lie in the CPU's memory have neighbours. Every process of the group must call this.
    """
    memory, secret = None, secrets.token_hex(16)
    if group.device.type == "cpu" and hasattr(os, "memfd_create"):
        with contextlib.suppress(WorldError):  # some containers forbid it
            memory = SharedMemory(len(secret))
            memory.bytes.copy_(torch.frombuffer(bytearray(secret.encode()), dtype=torch.uint8))
    said = group.all_gather_object(memory and (os.getpid(), memory.name.descriptor, secret))
    probes = {rank: _Probe(*about) for rank, about in enumerate(said) if about and memory and rank != group.rank}
    everybody = group.all_gather_object(
        [rank for rank, probe in probes.items() if probe.seen()]
    )  # until here `memory` is needed
    return {rank: probes[rank].pid for rank in everybody[group.rank] if group.rank in everybody[rank]}
