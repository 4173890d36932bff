"""Average gradients with an all-reduce around a ring, made of sends and receives (distributed/ring_allreduce.py).

Everything but the sum is as in allreduce.py: buckets leave while the last backward runs, carried by a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.ring_allreduce import transfer_thread
from unisono.exchange.allreduce import AllReduce


class RingAllReduce(AllReduce):
    """Average gradients with our own ring all-reduce."""

    promise = "tolerance"
    reason = (
        "exchange=ring adds in the order of the ring, which depends on the number of processes; exchange=tree does not"
    )

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        super().__init__(params, virtual_ranks, group)
        self.carrier = transfer_thread(group)

    def _launch(self, bucket: int) -> None:
        # .data has a version counter of its own: what the ring writes is not mistaken for a change by the loop
        self._works.append(self.carrier.begin(self.sum.flats[bucket].data))

    def close(self) -> None:
        self.carrier.close()
        super().close()
