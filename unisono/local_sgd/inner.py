"""Local training within a site: the exact tree over the site's own virtual ranks, between two synchronizations.

    site 0                                        site 1
    v0 + v1 + v2 + v3 = a     a / its weight      v4 + v5 + v6 + v7 = b     b / its weight
    its own optimizer step                        its own optimizer step
                        no traffic between the sites
    ...                                           ...
                        a synchronization: outer.py, site_transport.py, local_sgd/sites.py

The result of a site depends on its virtual ranks, not on its processes: the bits are the same on any number of them. Up
to `local_sgd.warmup_steps` all processes are one site, and this is the tree over all virtual ranks (post-local SGD: Lin
et al., Don't Use Large Mini-Batches, Use Local SGD, arXiv 1808.07217).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError
from unisono.exchange.base import Spans, Weights
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.exchange.wrappers.exchange_wrapper import ExchangeWrapper


class InnerExchange(ExchangeWrapper):
    """`group`: the processes that run a step together, which are a site or all processes."""

    promise = "depends on the number of sites"
    reason = (
        "exchange=local_sgd: each site trains independently between synchronizations, so the number of sites and "
        "when they synchronize change the result; the number of processes per site does not"
    )

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        self.params, self.group = params, group
        self.tree: TreeExchange | None = None
        self.first = 0  # the first virtual rank of this site

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """Begin a pass. `spans` is for all processes of the run; the tree has those of the site, counted from 0."""
        ours = [spans[rank] for rank in self.group.members] if self.group.members else spans
        first, last = ours[0][0], ours[-1][1]
        if self.tree is None:
            self.tree, self.first = TreeExchange(self.params, last - first, self.group), first
        if (first, last) != (self.first, self.first + self.tree.virtual_ranks):
            raise LoopError(
                "The virtual ranks of a site have changed.",
                f"This site has the virtual ranks {self.first} to {self.first + self.tree.virtual_ranks - 1}, and was "
                f"given {first} to {last - 1}: the result depends on which virtual ranks a site has.",
                "assign them within each site.",
            )
        self.tree.begin([(a - first, b - first) for a, b in ours], {v - first: n for v, n in pieces.items()}, weights)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self.inner.enter(virtual_rank - self.first, last=last)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the state that sites keep between synchronizations is in local_sgd/sites.py

    def close(self) -> None:
        if self.tree is not None:
            self.tree.close()

    @property
    def inner(self) -> TreeExchange:  # type: ignore[override]  # it is built when a step begins
        assert self.tree is not None, "a step begins with `begin`"
        return self.tree
