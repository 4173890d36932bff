"""The tree, when nobody knows beforehand who computes which leaf: in a step in which virtual ranks are claimed.

The sum is the tree's, to the bit. But what a process holds in the end are patches, and which ones is known when all
leaves are done; so all that is exchanged goes out then, and nothing of it while backward still runs:

    process 0   v0 v1 v2 v3 . . v6       (0,4) (6,7)   "who had what"    as in tree_fold.py, with these partial sums
    process 1   v4 v5 . .                (4,6)         ------------->
    process 2   v7 (slow)                (7,8)

train/balance/work_stealing.py says who takes what. So does a death: those who are left hold some partial sums of the
step, and deal what is missing among them (`continue_after_death`; train/recovery/step_recovery.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.base import Spans, Weights
from unisono.exchange.buckets import FlatGradient
from unisono.exchange.tree.tree_fold import TreeExchange
from unisono.plan.reduction_tree import Node, NodeHeap, ScatteredPlan


class DynamicTree(TreeExchange):
    """A tree that also knows steps without spans: `begin` with none of them."""

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        super().__init__(params, virtual_ranks, group)
        self._racing = self._goes_on = False
        self._heap: NodeHeap[FlatGradient | None] = NodeHeap(virtual_ranks, self._sum)
        self._leaf: FlatGradient | None = None

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self._racing, self._goes_on = not spans, False
        if not self._racing:
            super().begin(spans, pieces, weights)
            return
        self.pieces, self._weights = pieces, weights
        self._heap, self._mine = NodeHeap(self.virtual_ranks, self._sum), [0.0] * self.virtual_ranks
        self._roots, self._broken = None, None
        self.ready.begin()

    def continue_after_death(
        self, held: Mapping[Node, FlatGradient | None], used: Sequence[bool], empty: Sequence[int]
    ) -> None:
        """After `begin` without spans: these partial sums are there already. They come from another exchange over the
        same parameters, which found these `used`; `empty` virtual ranks have nothing to do, and are ours."""
        self._goes_on = True
        self.ready.used = list(used)
        for node, old in held.items():
            copy = None if old is None else self.pool.take()
            if copy is not None and old is not None:
                copy.take_over(old)
            self._push(node, copy)
        for leaf in empty:
            self._push(Node(leaf, leaf + 1), None)

    def _push(self, node: Node, copy: FlatGradient | None) -> None:
        self._mine[node.lo : node.hi] = [self.group.rank + 1.0] * (node.hi - node.lo)
        self._heap.push(node, copy)

    def held(self) -> Mapping[Node, FlatGradient | None]:
        if not self._racing:
            return super().held()
        copies = [copy for copy in self._heap.held.values() if copy is not None]
        return {} if any(copy.is_modified for copy in copies) else dict(self._heap.held)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        if not self._racing:
            super().enter(virtual_rank, last=last)
            return
        if self._leaf is None:
            self._leaf, self._number, self._to_come = self.pool.take(), virtual_rank, self.pieces[virtual_rank]
        self._to_come -= 1
        self.ready.enter(self._leaf, tell=False, last=False, launch=False)

    def leave(self) -> None:
        if not self._racing:
            super().leave()
            return
        self.ready.leave()
        if self._to_come:
            return
        for leaf in [self._number] if self._goes_on else self._with_empty(self._number):
            self._push(Node(leaf, leaf + 1), self._leaf if leaf == self._number else None)
        self._leaf = None

    def _with_empty(self, leaf: int) -> range:
        """A leaf, and those after it that have nothing to do; they are whose it is. (The first one has those before it,
        too.)"""
        busy = [v for v in range(self.virtual_ranks) if self.pieces[v]]
        place = busy.index(leaf)
        end = busy[place + 1] if place + 1 < len(busy) else self.virtual_ranks
        return range(leaf if place else 0, end)

    def _sum(self, left: FlatGradient | None, right: FlatGradient | None) -> FlatGradient | None:
        """x + 0 = x, since no sum is ever -0."""
        if left is None or right is None:
            return right if left is None else left
        left.add_from(right)
        self.pool.give([right])
        return left

    def launch(self) -> None:
        if not self._racing:
            super().launch()
            return
        told = torch.cat([torch.tensor(self._mine, dtype=torch.float64, device=self.group.device), self._weights()])
        owners, row = self.group.sum_(told).split(self.virtual_ranks)  # one writer each: exact
        plan = ScatteredPlan(
            self.virtual_ranks, ((0, 0),) * self.group.size, tuple(int(n) - 1 for n in owners.tolist())
        )
        self._roots = [self._heap.held[node] for node in plan.sends(self.group.rank)]
        made = [copy for copy in self._roots if copy is not None] or [self.pool.take()]
        self._result = made[0]
        for copy in made:
            copy.complete()
        self._wire(plan, self._weights, reduce(torch.add, row))
        for bucket in range(len(self.layout.buckets)):
            self._launch(bucket)
