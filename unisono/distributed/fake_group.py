"""A group of which only this process exists: one process tries a computation of several.

    process 0 ── this one        sums are its own, times the size
    process 1 ┐
       ...    ├─ do not exist    gathered values are its own, once for each
    process 3 ┘

No data is sent: torch's back end for dry runs ("fake") returns from every collective at once and changes nothing. The
numbers computed in such a group are meaningless. The errors raised in it are those that a real run would raise.

It has two uses: in a dry run, before other processes exist (train/diagnostics/dry_run.py); and in a process that joins
others to share a model with them (distributed/membership/membership.py). Until they admit it, it builds its part of the
model in a group like theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the back end; takes a millisecond)

from unisono.distributed.process_group import PeerMonitor, ProcessGroup


class FakeGroup(ProcessGroup):
    """A group whose other processes do not exist, until `regroup` makes it a real one."""

    is_real = False

    @property
    def is_main(self) -> bool:
        return super().is_main if self.is_real else True

    def regroup(self, *args: Any, **kwargs: Any) -> None:
        self.is_real = True
        super().regroup(*args, **kwargs)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().sum_(tensor) if self.is_real else tensor.mul_(self.size)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().max_(tensor) if self.is_real else tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        return super().all_gather_object(value) if self.is_real else [value] * self.size

    def broadcast_object(self, value: Any) -> Any:
        return super().broadcast_object(value) if self.is_real else value


class _EchoStore(dist.Store):
    """A rendezvous store that counts each call of this process as one of every process."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.counts: dict[str, int] = {}
        self.values: dict[str, Any] = {}

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount * self.size
        return self.counts[key]

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        assert all(key in self.values for key in keys), "no other process will set it"


@contextmanager
def dry_run_group(size: int) -> Iterator[ProcessGroup]:
    """Join a group of `size` processes on the CPU, of which this one is rank 0 and the only one that exists."""
    if size == 1:
        yield ProcessGroup()
        return
    group, _ = fake_group(0, size)
    yield group
    dist.destroy_process_group()


def fake_group(rank: int, size: int, monitor: PeerMonitor | None = None) -> tuple[ProcessGroup, object]:
    """Create a group of `size` processes, of which this one is rank `rank` and the only one that exists.

    Returns:
        The group, and an object that must live as long as the group.
    """
    store = _EchoStore(size)  # torch keeps a reference to its C++ part only
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    return FakeGroup(rank, size, monitor=monitor), store
