"""Gradients that travel in fewer bytes: fp16, bf16, 8 bits, the largest elements, or two thin matrices for each.

Compressing rounds, so where it is done is mathematics. It is done at fixed nodes of the tree (node_owners.py), and the
sums over what that leaves are the tree's again; so here, too, the result does not depend on who computes what:

    virtual ranks   0   1   2   3   4   5   6   7         the tree's leaves and sums, float32
    nodes          [0] [1] [2] [3] [4] [5] [6] [7]        + what was left over there  ->  form  (block_format.py)
                     .   .   .   .   .   .   .   .        forms travel                          (compressors.py)
                      \\ /     \\ /     \\ /     \\ /         their sum, by the tree
                        ...         ...        ...        / weight   ->   p.grad, the same everywhere

What a form leaves out is kept and added to the node's next gradient (error feedback), in a gradient copy for every
node that a process owns. That belongs to the node: it goes along when virtual ranks are dealt anew, and is in the
checkpoint, node by node. It is kept in the unit of the mean gradient, whatever a step weighs (by the weight of the step
before, since this one's is not known while its nodes are made).

All messages go when backward is done: what is sent is little, and the first bucket could not go before the last anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unisono.config import CompressSettings
from unisono.distributed.process_group import Message, ProcessGroup
from unisono.exchange.base import Spans, Weights
from unisono.exchange.buckets import (
    ALIGN,
    BucketedExchange,
    BucketLayout,
    BucketReadiness,
    FlatGradient,
    FlatGradientPool,
    LooseGradient,
    finite,
)
from unisono.exchange.compression.block_format import BLOCK
from unisono.exchange.compression.compressors import build_way, flatten, unflatten
from unisono.exchange.compression.node_owners import NodeOwners, moves, tree_nodes
from unisono.exchange.tree.counted_collectives import CountedCollectives
from unisono.plan.reduction_tree import Fold, Node, Plan, fold


class CompressedTree(BucketedExchange):
    promise = "exact"
    reason = "gradients are compressed at fixed nodes of one tree, which adds them up, wherever they were computed"

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        virtual_ranks: int,
        group: ProcessGroup,
        *,
        settings: CompressSettings,
    ) -> None:
        self.params, self.group, self.leaves = params, group, self._leaves(virtual_ranks, group)
        self.nodes = tree_nodes(self.leaves, settings.groups)
        self.layout = BucketLayout(params, group.size * BLOCK // ALIGN)  # chunks end where blocks do
        self.way = build_way(settings, self.layout, group)
        self.post = CountedCollectives(group)
        self.pool = FlatGradientPool(self.layout, shared=False)
        self.ready = BucketReadiness(self.layout, lambda bucket: None)
        self.result = FlatGradient(self.layout)
        self.left: dict[int, FlatGradient] = {}
        """Of each node that we own, what was left over: or of all, when they were just loaded."""
        self.unit = self.weight = 1.0  # what `left` is in units of, and what it should be: the last step's weight
        self._deal: NodeOwners | None = None

    def _leaves(self, virtual_ranks: int, group: ProcessGroup) -> int:
        return virtual_ranks

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self.pieces, self.post.sent = pieces, 0
        self.span = spans[self.group.rank]
        deal = NodeOwners(self.leaves, self.nodes, tuple(spans))
        self._move(deal)
        self.ready.begin()
        ratio, self.unit = self.unit / self.weight, self.weight
        for left in self.left.values() if ratio != 1.0 else ():
            for flat in left.flats:
                flat.mul_(ratio)
        self.way.begin(deal, ratio)
        self._bad = torch.zeros(len(self.params), dtype=torch.uint8)  # whose gradients are not finite
        self._leaf: LooseGradient | None = None
        self._queue = [(n, node) for n, node in enumerate(self.nodes) if deal.parts(self.group.rank, node)]
        self._fold = self._next_fold()
        self._halves: dict[int, dict[Node, FlatGradient]] = {}  # of nodes that are computed by several processes

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        if self._leaf is None:
            self._settle(virtual_rank)
            self._fold.skip_to(virtual_rank, None)
            self._leaf, self._to_come = LooseGradient(self.layout), self.pieces[virtual_rank]
        self._number = virtual_rank
        self._to_come -= 1
        self.ready.enter(self._leaf, tell=False, last=last, launch=False)

    def leave(self) -> None:
        self.ready.leave()
        if not self._to_come:
            for p in self.params:
                p.grad = None
            self._fold.push(Node(self._number, self._number + 1), self._leaf)
            self._leaf = None

    def launch(self) -> None:
        self._settle(self.span[1])
        self._join_halves()

    def finish(self, weight: float) -> bool:
        assert self._deal is not None
        bad = self.group.max_(self._bad.to(self.group.device)).tolist()
        self.way.meet(self._deal, self.post, self.result, self.left)
        for flat in self.result.flats:
            flat.mul_(self.unit / weight)
        self.weight = weight
        for number, is_bad in enumerate(bad):
            if is_bad:
                self.result.views[number].fill_(torch.nan)
        self.result.assign_gradients(self.params)
        return not any(bad) and all(map(finite, self.result.flats))

    @property
    def sent(self) -> float:
        return self.post.sent

    @property
    def plain(self) -> float:
        """Of the tree over the same leaves."""
        assert self._deal is not None
        return Plan(self.leaves, self._deal.spans).traffic(self.group.rank) * self.layout.bytes_of_all

    def close(self) -> None:
        super().close()
        self._leaf = None
        self.left, self._halves = {}, {}
        self.pool.free.clear()

    # -- nodes

    def _next_fold(self) -> Fold[LooseGradient | None]:
        first = max(self._queue[0][1].lo, self.span[0]) if self._queue else self.span[1]
        return Fold(self.leaves, _merged, first)

    def _settle(self, upto: int) -> None:
        """All that we compute of the nodes that end here, or before, is done: bring them into their forms."""
        while self._queue and min(self._queue[0][1].hi, self.span[1]) <= upto:
            number, node = self._queue.pop(0)
            self._fold.skip_to(min(node.hi, self.span[1]), None)
            sums = {part: self._copy(loose) for part, loose in self._fold.held}
            self._fold = self._next_fold()
            if node in sums:
                self._take(number, sums[node])
            else:
                self._halves[number] = sums

    def _copy(self, loose: LooseGradient | None) -> FlatGradient:
        """The same as flat buffers; zeros, where there is nothing."""
        copy = self.pool.take()
        if loose is not None:
            for number in range(len(self.params)):
                copy.merge(number, loose)
        copy.complete()
        return copy

    def _take(self, number: int, x: FlatGradient) -> None:
        """The sum of a node is complete."""
        for n, view in enumerate(x.views):
            if not finite(view):  # the step is lost, and what is left over from others is not to be
                self._bad[n] = 1
                view.zero_()
        kept = self.left.get(number)
        for i, flat in enumerate(x.flats):
            flat.div_(self.unit)
            if kept is not None:
                flat.add_(kept.flats[i])
        self.way.take(number, x)
        if self.way.feedback:
            if kept is not None:
                self.pool.give([kept])
            self.left[number] = x
        else:
            self.pool.give([x])

    def _join_halves(self) -> None:
        """The sums that others have made of a node go to its owner."""
        assert self._deal is not None
        deal, rank = self._deal, self.group.rank
        sends, receives = [], []
        for number, node in enumerate(self.nodes):
            owner = deal.owners[number]
            if owner != rank:
                for copy in self._halves.pop(number, {}).values():
                    sends += [Message(flat, owner) for flat in copy.flats]
                continue
            for other in self.post.others:
                for part in deal.parts(other, node):
                    copy = self._halves[number][part] = self.pool.take()
                    receives += [Message(flat, other) for flat in copy.flats]
        self.post.trade(sends, receives)
        for number, sums in self._halves.items():
            self._take(number, fold(self.nodes[number], sums, _added))
        self._halves = {}

    # -- what is left over

    def _move(self, deal: NodeOwners) -> None:
        """Virtual ranks are dealt anew: what was left over of a node goes to its new owner."""
        before, self._deal = self._deal, deal
        if before is None:
            self.left = {n: self.left[n] for n in deal.owned(self.group.rank) if n in self.left}
        elif before.spans != deal.spans and self.way.feedback:
            sends, receives = [], []
            for number, giver, taker in moves(before.owners, deal.owners):
                if giver == self.group.rank:
                    sends += [Message(flat, taker) for flat in self.left.pop(number).flats]
                if taker == self.group.rank:
                    self.left[number] = self.pool.take()
                    receives += [Message(flat, giver) for flat in self.left[number].flats]
            self.post.trade(sends, receives)
        self.left = dict(sorted(self.left.items()))

    def state_dict(self) -> dict[str, Any]:
        rows = {str(number): row for number, row in self._rows()}
        return {"unit": self.unit, "weight": self.weight, "left": rows, "way": self.way.state_dict()}

    def _rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What is left over of every node, one after the other; all processes must ask for it together."""
        if self._deal is None or not self.way.feedback:
            yield from ((number, flatten(copy)) for number, copy in self.left.items())
            return
        for number, owner in enumerate(self._deal.owners):
            row = flatten(self.left[number]) if owner == self.group.rank else flatten(self.result)
            self.group.broadcast_([row], source=owner)
            if self.group.rank == 0:
                yield number, row

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.unit, self.weight = float(state["unit"]), float(state["weight"])
        self.way.load_state_dict(state["way"])
        rows = {int(number): row for number, row in state["left"].items()}
        if rows and len(rows) != len(self.nodes):  # other nodes: then it is their sum that counts
            rows = {0: torch.stack(list(rows.values())).sum(0)}
        self.left = {number: unflatten(row, self.pool.take()) for number, row in rows.items()}


class CompressedAllReduce(CompressedTree):
    """A node for each process, as in DistributedDataParallel's hooks."""

    promise = "tolerance"
    reason = (
        "exchange=allreduce compresses the sum of each process, and how many there are decides; exchange=tree does not"
    )

    def _leaves(self, virtual_ranks: int, group: ProcessGroup) -> int:
        return group.size

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        alone = [(rank, rank + 1) for rank in range(self.group.size)]
        super().begin(alone, {self.group.rank: sum(pieces.values())}, weights)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        super().enter(self.group.rank, last=last)


def _merged(left: LooseGradient | None, right: LooseGradient | None) -> LooseGradient | None:
    if left is None or right is None:
        return right if left is None else left
    for number in range(len(left.grads)):
        left.merge(number, right)
    return left


def _added(left: FlatGradient, right: FlatGradient) -> FlatGradient:
    for ours, theirs in zip(left.flats, right.flats, strict=True):
        ours.add_(theirs)
    return left
