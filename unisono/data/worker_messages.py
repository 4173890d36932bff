"""Messages of loader workers: small tensors are sent as bytes, and large ones as files of shared memory.

torch sends every tensor of a worker as a file of shared memory. For each file, the receiver connects to a thread of the
worker, both authenticate each other, and the thread sends the descriptor of the file. While the worker computes in
Python, this thread also waits for the interpreter lock. Here the worker sends each descriptor at once, over a socket
that is created before the worker is forked.

    small      bytes in the message                      labels, states of random number generators
    large      a number in the message, and the descriptor of that number in the socket
    others     as torch sends them: workers that were not forked, a socket that is full

Pickle sends each storage once, so tensors that share memory still share it when they arrive. Large numpy arrays are
sent as tensors, and copied when they arrive.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import rebuild_storage_fd, reduce_storage

from unisono.torch_compat.storages import share_descriptor, shared_bytes

MOST_BYTES = 1 << 15
"""Size of the largest memory that is sent as bytes: half of what Linux keeps in a pipe until it is read."""

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""What pickle sends for an object: a function that makes it, and the arguments."""

_NUMBER = struct.Struct("=Q")
_channel_ids = count()
_channels: weakref.WeakValueDictionary[int, DescriptorChannel] = weakref.WeakValueDictionary()
"""Channels of this process by id. A message contains the id."""


class WorkerMessages:
    """How the workers of one loader send batches to this process. Create it before they are forked.

    Args:
        workers: The number of workers.
    """

    def __init__(self, workers: int) -> None:
        if multiprocessing.get_start_method() != "fork" or get_sharing_strategy() != "file_descriptor":
            workers = 0
        sockets = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(workers)]
        self._channels = [DescriptorChannel(*pair) for pair in sockets]

    def outgoing(self, worker: int, value: Any) -> OutgoingMessage:
        """Return a message of a worker, which arrives as the value."""
        return OutgoingMessage(value, self._channels[worker] if self._channels else None)

    def close(self) -> None:
        """Close the sockets. Call it after the workers have ended."""
        for channel in self._channels:
            channel.close()


class OutgoingMessage:
    """A value that a worker sends. Other objects that the worker pickles are sent as torch sends them.

    The value is pickled at once, so that an error is one of the fetch. torch pickles it in a thread that prints the
    error, and the process that waits for the batch waits forever.
    """

    def __init__(self, value: Any, channel: DescriptorChannel | None) -> None:
        content = io.BytesIO()
        pickler = ForkingPickler(content)
        pickler.dispatch_table[torch.UntypedStorage] = partial(_reduce, channel)
        if channel is not None:
            pickler.dispatch_table[np.ndarray] = _reduce_array
        pickler.dump(value)
        self.content = content.getvalue()

    def __reduce__(self) -> Reduced:
        return ForkingPickler.loads, (self.content,)


class DescriptorChannel:
    """Sends descriptors of files from a worker to its parent, with numbers.

    Args:
        receiver: The end of a socket that the parent uses.
        sender: The end that the worker uses.
    """

    def __init__(self, receiver: socket.socket, sender: socket.socket) -> None:
        self._receiver, self._sender = receiver, sender
        self._sender.setblocking(False)
        self._sent = count()
        self._waiting: dict[int, int] = {}
        self.id = next(_channel_ids)
        _channels[self.id] = self

    def send(self, descriptor: int) -> int:
        """Send a descriptor, and return its number. Raises OSError if too many were sent that were not received."""
        number = next(self._sent)
        socket.send_fds(self._sender, [_NUMBER.pack(number)], [descriptor])
        return number

    def receive(self, number: int) -> int:
        """Return the descriptor that was sent with a number; each once."""
        while number not in self._waiting:
            content, descriptors, *_ = socket.recv_fds(self._receiver, _NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise ConnectionError(f"The descriptor {number} of a loader worker is missing.")
            self._waiting[_NUMBER.unpack(content)[0]] = descriptors[0]
        return self._waiting.pop(number)

    def close(self) -> None:
        """Close the socket, with what was not received."""
        self._sender.close()
        self._receiver.close()
        while self._waiting:
            os.close(self._waiting.popitem()[1])

    def __del__(self) -> None:
        self.close()


class SentDescriptor(NamedTuple):
    """A descriptor that the parent finds in a channel, in place of torch's own object that connects to the worker."""

    channel: int
    number: int

    def detach(self) -> int:
        """Return the descriptor, in the parent. The caller closes it."""
        return _channels[self.channel].receive(self.number)


def _reduce(channel: DescriptorChannel | None, storage: torch.UntypedStorage) -> Reduced:
    """Return what pickle sends for the memory of a tensor."""
    size = storage.nbytes()
    if storage.device.type == "cpu" and size > 0:
        if size <= MOST_BYTES and not storage.is_shared():
            return _of_bytes, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes(),)
        if channel is not None:
            descriptor, size = share_descriptor(storage)
            with suppress(OSError):
                sent = SentDescriptor(channel.id, channel.send(descriptor))
                return rebuild_storage_fd, (torch.UntypedStorage, sent, size)
    reduced: Reduced = reduce_storage(storage)
    return reduced


def _reduce_array(array: np.ndarray[Any, Any]) -> Reduced:
    """Return what pickle sends for an array: a tensor in shared memory if it is large, and there is space."""
    flags = array.flags
    reduce_as_numpy: Any = array.__reduce_ex__
    if array.nbytes <= MOST_BYTES or array.dtype.hasobject or not (flags.c_contiguous or flags.f_contiguous):
        return reduce_as_numpy(4)
    try:
        memory = shared_bytes(array.nbytes)
    except OSError:
        return reduce_as_numpy(4)
    rows = array if flags.c_contiguous else array.T
    memory.numpy()[:] = rows.reshape(-1).view(np.uint8)
    return _array_of, (memory, array.dtype, array.shape, "C" if flags.c_contiguous else "F")


def _array_of(memory: torch.Tensor, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    """Return an array with a copy of these bytes. The copy keeps no file of shared memory open."""
    return memory.clone().numpy().view(dtype).reshape(shape, order=order)


def _of_bytes(content: bytes) -> torch.UntypedStorage:
    """Return a storage with this content, in memory that torch allocates."""
    memory = torch.empty(len(content), dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
    return memory.untyped_storage()
