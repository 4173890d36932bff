"""The private functions of torch's storages that Unisono uses: they send tensors to other processes."""

from __future__ import annotations

from typing import Any

import torch


def share_descriptor(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Move a storage of the CPU into shared memory if it is not there, and return its descriptor and its bytes.

    The storage owns the descriptor. The public `share_memory_` does not return it.
    """
    private: Any = storage
    descriptor, size = private._share_fd_cpu_()
    return int(descriptor), int(size)


def shared_bytes(size: int) -> torch.Tensor:
    """Return a tensor of this many bytes in shared memory. The public way allocates private memory, and copies it.

    Raises:
        OSError: The file system of shared memory is full.
    """
    private: Any = torch.UntypedStorage
    try:
        storage = private._new_shared(size)
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return torch.empty(0, dtype=torch.uint8).set_(storage)
