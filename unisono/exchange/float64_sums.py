"""The float64 sums of a process in flat buffers, and their all-reduce: the library's, or host by host.

The library's all-reduce treats all processes alike. gloo's is a ring, so with P processes on each of H hosts a link
carries 2 (P H - 1) / (P H) of the sums. Host by host it carries 2 (H - 1) / H, whatever P is:

    host a   rank 0  [ a0 | a1 ]  adds b0 of rank 1 in shared memory   --+-- ring with rank 2: chunk 0
             rank 1  [ b0 | b1 ]  adds a1 of rank 0                    --|--+- ring with rank 3: chunk 1
    host b   rank 2  [ c0 | c1 ]  adds d0 of rank 3                    --+  |
             rank 3  [ d0 | d1 ]  adds c1 of rank 2                    -----+   then each writes its total to neighbors

This is for sums that are exact in any order (exchange/reproducible_sum.py): the order of additions is another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for
from unisono.distributed.ring_allreduce import ring_all_reduce_, transfer_thread
from unisono.distributed.shared_memory import SharedMemory, SharedName, map_shared_memory
from unisono.exchange.buckets import Bucket


class LibrarySums:
    """Sums that the library adds up over all processes.

    Attributes:
        flats: A flat tensor for each bucket, initially zero.
    """

    def __init__(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        self.group = group
        self.flats = [torch.zeros(b.size, dtype=torch.float64, device=b.device) for b in buckets]

    def all_reduce(self, bucket: int) -> Work:
        """Start to sum a bucket over all processes, in place."""
        return self.group.all_reduce(self.flats[bucket])

    def close(self) -> None:
        return


class HostSums(LibrarySums):
    """Sums in shared memory, which the processes of a host add up before they are sent to other hosts."""

    def __init__(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        self.group = group
        sizes = [b.size for b in buckets]
        self._memory = SharedMemory(8 * sum(sizes))
        self.flats = list(self._memory.bytes.view(torch.float64).split(sizes))
        self._sizes = sizes
        self._local = local = _ranks_on(group, group.hosts[group.rank])
        self._place = place = local.index(group.rank)
        self._column = _Column(group, [_ranks_on(group, host)[place] for host in sorted(set(group.hosts))])
        self._others: list[Sequence[torch.Tensor]] = []  # the sums of the neighbors, once they have named their memory
        self._carrier = transfer_thread(group)

    def all_reduce(self, bucket: int) -> Work:
        return self._carrier.begin(self.flats[bucket], partial(self._reduce, bucket))

    def close(self) -> None:
        self._carrier.close()
        self._others = []

    def _reduce(self, bucket: int, group: ProcessGroup, flat: torch.Tensor) -> None:
        if self._others:
            self._tell_neighbors()
        else:
            self._open()
        mine, *others = [each.tensor_split(len(self._local))[self._place] for each in (flat, *self._sums_of(bucket))]
        for other in others:
            mine.add_(other)
        ring_all_reduce_(self._column, mine)
        for other in others:
            other.copy_(mine)
        self._tell_neighbors()

    def _sums_of(self, bucket: int) -> list[torch.Tensor]:
        """Return the sums of the neighbors in a bucket."""
        return [sums[bucket] for sums in self._others]

    def _tell_neighbors(self) -> None:
        """Wait until all neighbors are here: no one reads or writes the memory of another before, or after."""
        ready = [Message(torch.zeros(1, dtype=torch.uint8), other) for other in self.group.neighbors]
        wait_for(self.group.send_and_receive(ready, [m._replace(tensor=m.tensor.clone()) for m in ready]))

    def _open(self) -> None:
        """Exchange the names of memory with the neighbors, and open theirs."""
        mine = torch.tensor(self._memory.name)
        names = {other: torch.empty_like(mine) for other in self.group.neighbors}
        sends = [Message(mine, other) for other in names]
        wait_for(self.group.send_and_receive(sends, [Message(name, other) for other, name in names.items()]))
        for other, name in names.items():
            size = len(self._memory.bytes)
            memory = map_shared_memory(self.group.neighbors[other], SharedName._make(name.tolist()), size)
            self._others.append(memory.view(torch.float64).split(self._sizes))


class _Column(NamedTuple):
    """The processes in the same place on each host, as a ring."""

    group: ProcessGroup
    ranks: list[int]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks.index(self.group.rank)

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
        """Start to send and to receive messages, whose peers are places in the ring."""
        return self.group.send_and_receive(
            [Message(tensor, self.ranks[peer]) for tensor, peer in sends],
            [Message(tensor, self.ranks[peer]) for tensor, peer in receives],
        )


def _ranks_on(group: ProcessGroup, host: int) -> list[int]:
    return [rank for rank, other in enumerate(group.hosts) if other == host]


def build_sums(buckets: Sequence[Bucket], group: ProcessGroup) -> LibrarySums:
    """Build the sums of a process. Hosts with equally many processes, at least two, are added up host by host."""
    processes = Counter(group.hosts)
    counts = set(processes.values())
    several = len(processes) > 1 and len(counts) == 1 and counts != {1}
    return (HostSums if several and group.on_gloo and group.neighbors else LibrarySums)(buckets, group)
