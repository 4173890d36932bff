"""Counters that all processes of a run share, in torch's rendezvous store."""

from __future__ import annotations

import torch.distributed as dist

from unisono.distributed.process_group import ProcessGroup
from unisono.torch_compat.process_groups import default_store


class SharedCounter:
    """Counters 1, 2, 3, ..., one for each name and process. Each number is returned once.

    Unlike a collective, counting needs no answer from any process, so the other processes may do anything meanwhile.
    """

    def __init__(self, group: ProcessGroup) -> None:
        assert group.size > 1
        self._rank = group.rank
        self._store = dist.PrefixStore("counters", default_store())

    def next(self, name: str, process: int) -> int:
        """Return the next number of the counter `name` of that process."""
        return int(self._store.add(f"{name} {process}", 1))

    def renew(self, *names: str) -> None:
        """Reset these counters of this process. No process may be counting meanwhile."""
        for name in names:
            self._store.set(f"{name} {self._rank}", "0")
