"""Tickets: numbers that the processes of a run draw, each once, from the store where they have met."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.distributed.process_group import ProcessGroup


class SharedCounter:
    """1, 2, 3, ... for every name and process, to whoever asks next.

    A rival of all other ways to agree: no process has to answer, so it does not matter what the others are doing.
    """

    def __init__(self, group: ProcessGroup) -> None:
        assert group.size > 1
        self._rank = group.rank
        self._store = dist.PrefixStore("tickets", distributed_c10d._get_default_store())

    def next(self, name: str, process: int) -> int:
        """The next number of this name of that process."""
        return int(self._store.add(f"{name} {process}", 1))

    def renew(self, *names: str) -> None:
        """Ours of these names begin anew. Nobody may be drawing them."""
        for name in names:
            self._store.set(f"{name} {self._rank}", "0")
