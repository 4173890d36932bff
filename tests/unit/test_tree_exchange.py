"""The tree exchange on one process, with sums that are exact, so that a missing leaf shows."""

from __future__ import annotations

import pytest
import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.plan.batch_order import cut_batch


@pytest.mark.parametrize("announced", [True, False], ids=["the last micro-batch is announced", "it is not announced"])
@pytest.mark.parametrize("virtual_ranks", range(2, 18))
def test_no_gradient_is_lost_where_virtual_ranks_are_empty(virtual_ranks: int, announced: bool) -> None:
    """In short steps an empty virtual rank may complete a subtree, so that two sums are added at once."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    tree = TreeExchange([p], virtual_ranks, ProcessGroup())
    for samples in [virtual_ranks, *range(1, virtual_ranks), 2 * virtual_ranks + 1]:
        shares = {v: cut_batch(samples, virtual_ranks, v) for v in range(virtual_ranks)}
        pieces = {v: stop - start for v, (start, stop) in shares.items()}
        tree.begin(((0, virtual_ranks),), pieces, lambda: torch.ones(virtual_ranks, dtype=torch.float64))
        rounds = [v for v in range(virtual_ranks) for _ in range(pieces[v])]
        for number, v in enumerate(rounds):
            tree.enter(v, last=announced and number + 1 == len(rounds))
            (p * 2.0**v).sum().backward()
            tree.leave()
        tree.launch()
        tree.finish(1.0)
        tree.commit()
        assert p.grad is not None
        assert p.grad.item() == sum(2.0**v for v in rounds), f"{samples} samples"
        tree.zero()
    tree.close()
