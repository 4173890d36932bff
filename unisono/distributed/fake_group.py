"""A group in which all the others do and say what this process does: one process tries what several will do together.

    process 0 ── this one        sums are its own, times the size
    process 1 ┐
       ...    ├─ nobody          whatever is gathered is its own, once for each
    process 3 ┘

Nothing travels: torch's back end for dry runs ("fake") returns from every collective at once, with what it finds there.
What is computed in such a group means nothing. What is refused in it is refused by the code that a run goes through.

It serves twice: in a dry run, before there is anybody (train/diagnostics/dry_run.py); and for a process that is to join
others with whom it will share a model (distributed/membership/membership.py). Until they let it in it places its part
in a group like theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (it makes the back end known; a millisecond)

from unisono.distributed.process_group import ProcessGroup

if TYPE_CHECKING:
    from unisono.distributed.membership.membership import Membership


class FakeGroup(ProcessGroup):
    """The group of this process, and of others that are not there; until it becomes another one."""

    there = False

    @property
    def decides(self) -> bool:
        return super().decides if self.there else True

    def regroup(self, *about: Any, **more: Any) -> None:
        self.there = True
        super().regroup(*about, **more)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().sum_(tensor) if self.there else tensor.mul_(self.size)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().max_(tensor) if self.there else tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        return super().all_gather_object(value) if self.there else [value] * self.size

    def broadcast_object(self, value: Any) -> Any:
        return super().broadcast_object(value) if self.there else value


class _EchoStore(dist.Store):
    """Where processes meet, if all of them always say the same: each number comes `size` times."""

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
        assert all(key in self.values for key in keys), "all have said what they say"


@contextmanager
def dry_run_group(size: int) -> Iterator[ProcessGroup]:
    """A group of so many processes on the CPU, of which this one is the first and the only one."""
    if size == 1:
        yield ProcessGroup()
        return
    group, _ = fake_group(0, size)
    yield group
    dist.destroy_process_group()


def fake_group(rank: int, size: int, company: Membership | None = None) -> tuple[ProcessGroup, object]:
    """A group of so many processes, of which this one is there alone, as rank `rank`; and what must live as long."""
    store = _EchoStore(size)  # torch keeps what is C++ of it, and that alone
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    return FakeGroup(rank, size, company=company), store
