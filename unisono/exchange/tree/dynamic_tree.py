"""The tree exchange for steps in which it is not known beforehand which process computes which leaf.

There are two such steps. With work stealing, idle processes take virtual ranks from others
(train/balance/work_stealing.py). After a death, the survivors hold some partial sums of the step and share the missing
leaves (`continue_after_death`; train/recovery/step_recovery.py).

The sum is the tree's, to the bit. The partial sums of a process are known only when all leaves are done, so all
messages leave then, and none while backward still runs:

    process 0   v0 v1 v2 v3 . . v6       (0,4) (6,7)     owner of      as in tree_exchange.py, with these partial sums
    process 1   v4 v5 . .                (4,6)           each leaf
    process 2   v7 (slow)                (7,8)         ------------>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.base import Spans, Weights
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.plan.reduction_tree import Node, NodeHeap, ScatteredPlan

if TYPE_CHECKING:
    from unisono.config.schema import TreeSettings


class DynamicTree(TreeExchange):
    """A tree exchange that also supports steps without spans: call `begin` with empty spans."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        virtual_ranks: int,
        group: ProcessGroup,
        settings: TreeSettings | None = None,
    ) -> None:
        super().__init__(params, virtual_ranks, group, settings)
        self._dynamic = self._is_recovery = False
        self._heap: NodeHeap[FlatGradient | None] = NodeHeap(virtual_ranks, self._sum)
        self._dynamic_leaf: FlatGradient | None = None

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self._dynamic, self._is_recovery = not spans, False
        if not self._dynamic:
            super().begin(spans, pieces, weights)
            return
        self.pieces, self._weights = pieces, weights
        self._heap, self._owners = NodeHeap(self.virtual_ranks, self._sum), [0.0] * self.virtual_ranks
        self._roots = None
        self.ready.begin()

    def continue_after_death(
        self, held: Mapping[Node, FlatGradient | None], used: Sequence[bool], empty: Sequence[int]
    ) -> None:
        """Take over the partial sums of another exchange over the same parameters. Call it after `begin`.

        Args:
            held: The partial sums, as `held` of the other exchange returns them.
            used: Which parameters the other exchange found in use.
            empty: Virtual ranks without micro-batches that count as ours.
        """
        self._is_recovery = True
        self.ready.used = list(used)
        for node, old in held.items():
            copy = None if old is None else self.pool.take()
            if copy is not None and old is not None:
                copy.take_over(old)
            self._push(node, copy)
        for leaf in empty:
            self._push(Node(leaf, leaf + 1), None)

    def _push(self, node: Node, copy: FlatGradient | None) -> None:
        self._owners[node.lo : node.hi] = [self.group.rank + 1.0] * (node.hi - node.lo)
        self._heap.push(node, copy)

    def held(self) -> Mapping[Node, FlatGradient | None]:
        if not self._dynamic:
            return super().held()
        copies = [copy for copy in self._heap.held.values() if copy is not None]
        return {} if any(copy.is_modified for copy in copies) else dict(self._heap.held)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        if not self._dynamic:
            super().enter(virtual_rank, last=last)
            return
        if self._dynamic_leaf is None:
            self._dynamic_leaf, self._number = self.pool.take(), virtual_rank
            self._remaining = self.pieces[virtual_rank]
        self._remaining -= 1
        self.ready.enter(self._dynamic_leaf, notify=False, last=False, launch=False)

    def leave(self) -> None:
        if not self._dynamic:
            super().leave()
            return
        self.ready.leave()
        if self._remaining:
            return
        for leaf in [self._number] if self._is_recovery else self._with_empty(self._number):
            self._push(Node(leaf, leaf + 1), self._dynamic_leaf if leaf == self._number else None)
        self._dynamic_leaf = None

    def _with_empty(self, leaf: int) -> range:
        """Return a leaf and the empty leaves after it, which belong to the same process.

        The first leaf that has micro-batches also takes the empty ones before it.
        """
        busy = [v for v in range(self.virtual_ranks) if self.pieces[v]]
        place = busy.index(leaf)
        end = busy[place + 1] if place + 1 < len(busy) else self.virtual_ranks
        return range(leaf if place else 0, end)

    def _sum(self, left: FlatGradient | None, right: FlatGradient | None) -> FlatGradient | None:
        """Add two partial sums: x + 0 = x, since no sum is ever -0."""
        if left is None or right is None:
            return right if left is None else left
        left.add_from(right)
        self.pool.give([right])
        return left

    def launch(self) -> None:
        if not self._dynamic:
            super().launch()
            return
        message = torch.cat(
            [torch.tensor(self._owners, dtype=torch.float64, device=self.group.device), self._weights()]
        )
        owners, weights = self.group.sum_(message).split(self.virtual_ranks)  # each element has one writer: exact
        plan = ScatteredPlan(
            self.virtual_ranks, ((0, 0),) * self.group.size, tuple(int(n) - 1 for n in owners.tolist())
        )
        roots = [self._heap.held[node] for node in plan.sends(self.group.rank)]
        copies = [copy for copy in roots if copy is not None] or [self.pool.take()]
        self._roots, self._result = roots, copies[0]
        for copy in copies:
            copy.complete()
        self._begin_transport(plan, self._weights, reduce(torch.add, weights))
        if self.transport is not None:
            self.transport.prepare(roots, self._result)
        self.ready.launch_rest()
