"""Memory that the processes of one host share, which saves messages.

Linux gives a process anonymous memory (memfd_create, https://man7.org/linux/man-pages/man2/memfd_create.2.html) that
other processes of the same user open through /proc. It is in no file system, so no file remains, and the size of
/dev/shm, which containers keep small, does not matter. A process that has opened the memory keeps it, even if its owner
dies.

Processes of different hosts, users, containers or operating systems cannot open each other's memory. A group detects
this when it is formed (`find_neighbors`), and sends messages instead.
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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unisono.errors import WorldError

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup

LABEL = "unisono"
"""The name of such memory in /proc/PID/maps."""

_serial = itertools.count()


class SharedName(NamedTuple):
    """The name by which neighbors identify a memory of a process. A descriptor may be reused; `number` is unique."""

    descriptor: int
    number: int


class SharedMemory:
    """`size` bytes that neighbors can open, initially zero. Freed when no process has them open.

    Writes of a forked child are private to it, as for any other memory.
    """

    def __init__(self, size: int) -> None:
        try:
            descriptor = os.memfd_create(LABEL)
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, max(size, 1))
            # not from_file: this storage keeps a descriptor, which torch.multiprocessing needs to send a tensor
            create: Any = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # noqa: SLF001
            storage = create(descriptor, max(size, 1))
        except (OSError, RuntimeError) as error:
            raise _memory_error(size, error) from error
        self.name = SharedName(descriptor, next(_serial))
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)[:size]
        _libc()
        _instances.add(self)

    def make_private(self) -> None:
        """Make later writes private to this process, which is a forked child."""
        begin, size = self.bytes.data_ptr(), max(len(self.bytes), 1)
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        if _libc().mmap(begin, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self.name.descriptor, 0) != begin:
            os.abort()  # otherwise it would write into its parent's gradient


MAP_FIXED = 0x10
"""Linux's constant on every processor (asm-generic/mman-common.h). Python's mmap module does not have it."""

_instances: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


@cache
def _libc() -> ctypes.CDLL:
    """Load the C library and register the fork handler, before the first fork."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    os.register_at_fork(after_in_child=_make_all_private)
    return libc


def _make_all_private() -> None:
    for memory in list(_instances):
        memory.make_private()


def map_shared_memory(pid: int, name: SharedName, size: int) -> torch.Tensor:
    """Map `size` bytes that process `pid` identifies by `name`, for reading and writing.

    https://docs.pytorch.org/docs/2.13/generated/torch.from_file.html

    Raises:
        ConnectionError: the process is gone.
        WorldError: the system refuses.
    """
    path = _path(pid, name.descriptor)
    try:
        return torch.from_file(path, shared=True, size=max(size, 1), dtype=torch.uint8)[:size]
    except RuntimeError as error:
        if os.path.lexists(path):
            raise _memory_error(size, error) from error
        raise ConnectionError(f"memory closed by peer: process {pid} is gone ({error})") from error


def _memory_error(size: int, error: Exception) -> WorldError:
    return WorldError(
        f"Cannot share {size} bytes of memory with the other processes of this host.",
        f"The system refused: {error}",
        "check the limits of this shell (ulimit -a): open files, file size, virtual memory.",
    )


def _path(pid: int, descriptor: int) -> str:
    return f"/proc/{pid}/fd/{descriptor}"


@dataclass(frozen=True)
class _Probe:
    """Shared memory with a secret. A process that can read the secret is a neighbor."""

    pid: int
    descriptor: int
    secret: str

    def is_readable(self) -> bool:
        path = _path(self.pid, self.descriptor)
        try:  # in another container the process id may be any process's, so only memory with our label is opened
            if not os.readlink(path).startswith(f"/memfd:{LABEL}"):
                return False
            found = map_shared_memory(self.pid, SharedName(self.descriptor, 0), len(self.secret))
        except (OSError, WorldError):  # no such process, or no permission
            return False
        return bytes(found.tolist()) == self.secret.encode()


class Neighbors(NamedTuple):
    """The processes that share memory with this one.

    Attributes:
        pids: {rank: process id} of them.
        hosts: For every rank the lowest rank that shares memory with it: equal numbers are one host.
    """

    pids: Mapping[int, int] = {}
    hosts: tuple[int, ...] = ()


def find_neighbors(group: ProcessGroup) -> Neighbors:
    """Find the processes whose memory this one can open and that can open its own. Collective.

    Only processes whose gradients are in the CPU's memory have neighbors. If processes share memory with some of their
    neighbors' neighbors only, none is a neighbor.
    """
    memory, secret = None, secrets.token_hex(16)
    if group.device.type == "cpu" and hasattr(os, "memfd_create"):
        with contextlib.suppress(WorldError):  # some containers forbid memfd_create
            memory = SharedMemory(len(secret))
            memory.bytes.copy_(torch.frombuffer(bytearray(secret.encode()), dtype=torch.uint8))
    all_probes = group.all_gather_object(memory and (os.getpid(), memory.name.descriptor, secret))
    probes = {rank: _Probe(*probe) for rank, probe in enumerate(all_probes) if probe and memory and rank != group.rank}
    readable = group.all_gather_object([rank for rank, probe in probes.items() if probe.is_readable()])
    del memory  # no process reads it any more
    shared = [{rank, *(other for other in others if rank in readable[other])} for rank, others in enumerate(readable)]
    hosts = tuple(map(min, shared))
    if any(shared[host] != shared[rank] for rank, host in enumerate(hosts)):
        return Neighbors({}, tuple(range(group.size)))
    return Neighbors({rank: probes[rank].pid for rank in sorted(shared[group.rank] - {group.rank})}, hosts)
