"""All-reduce around a ring (distributed/ring_allreduce.py draws it), with nothing of a library but sending and
receiving.

As allreduce.py in everything but the sum itself: buckets leave while the last backward runs, carried by a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.distributed.process_group import ProcessGroup, Work
from unisono.distributed.ring_allreduce import transfer_thread
from unisono.exchange.allreduce import AllReduce


class RingAllReduce(AllReduce):
    promise = "tolerance"
    reason = (
        "exchange=ring adds in the order of the ring, which depends on the number of processes; exchange=tree does not"
    )

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        super().__init__(params, virtual_ranks, group)
        self.carrier = transfer_thread(group)

    def _begin(self, flat: torch.Tensor) -> Work:
        # .data has a version of its own: what the ring writes is not taken for the loop's doing
        return self.carrier.begin(flat.data)

    def close(self) -> None:
        self.carrier.close()
        super().close()
