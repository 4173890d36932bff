"""The tree exchange in one process, with numbers that no addition rounds: a leaf that is lost is seen."""

from __future__ import annotations

import pytest
import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.tree.tree_fold import TreeExchange
from unisono.plan.batch_order import cut_batch


@pytest.mark.parametrize("told", [True, False], ids=["the last is told", "nobody knows which is the last"])
@pytest.mark.parametrize("virtual_ranks", range(2, 18))
def test_no_gradient_is_lost_whichever_virtual_ranks_have_nothing(virtual_ranks: int, told: bool) -> None:
    """A short step: so many samples for all of them. Where one without work completes a subtree, two sums meet."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    tree = TreeExchange([p], virtual_ranks, ProcessGroup())
    for samples in [virtual_ranks, *range(1, virtual_ranks), 2 * virtual_ranks + 1]:
        shares = {v: cut_batch(samples, virtual_ranks, v) for v in range(virtual_ranks)}
        pieces = {v: stop - start for v, (start, stop) in shares.items()}
        tree.begin(((0, virtual_ranks),), pieces, lambda: torch.ones(virtual_ranks, dtype=torch.float64))
        rounds = [v for v in range(virtual_ranks) for _ in range(pieces[v])]
        for number, v in enumerate(rounds):
            tree.enter(v, last=told and number + 1 == len(rounds))
            (p * 2.0**v).sum().backward()
            tree.leave()
        tree.launch()
        tree.finish(1.0)
        tree.commit()
        assert p.grad is not None
        assert p.grad.item() == sum(2.0**v for v in rounds), f"{samples} samples"
        tree.zero()
    tree.close()
