r"""Average gradients in compressed form: fp16, bf16, 8 bits, the largest elements, or two thin matrices for each.

Compression rounds, so where it happens changes the bits. It happens at fixed nodes of the tree
(node_owners.py), and the tree adds up what is left. So the result does not depend on which process computes what:

    virtual ranks   0   1   2   3   4   5   6   7         the tree's leaves and sums, float32
    nodes          [0] [1] [2] [3] [4] [5] [6] [7]        + the node's residual  ->  compressed   (compressors.py)
                     .   .   .   .   .   .   .   .        compressed nodes are sent
                      \ /     \ /     \ /     \ /         their sum, by the tree
                        ...         ...        ...        / weight   ->   p.grad, the same on every process

What compression loses is the node's residual. It is added to the node's next gradient (error feedback), and takes one
gradient copy for each node that a process owns. A residual belongs to its node: it moves when virtual ranks move, and
is saved node by node. It is kept in the unit of the mean gradient, whatever a step weighs. (That is by the weight of
the previous step, because this step's weight is not known while its nodes are computed.)

All messages leave when backward is done: they are small, and the first bucket is not complete much before the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unisono.config import CompressSettings
from unisono.distributed.process_group import Message, ProcessGroup
from unisono.exchange.base import Spans, Weights
from unisono.exchange.bucket_readiness import BucketedExchange, BucketReadiness
from unisono.exchange.buckets import ALIGN, BucketLayout, finite
from unisono.exchange.compression.block_quantizer import BLOCK
from unisono.exchange.compression.compressors import build_compressor, flatten, unflatten
from unisono.exchange.compression.node_owners import NodeOwners, moves, tree_nodes
from unisono.exchange.gradient_accumulation import FlatGradient, FlatGradientPool, LooseGradient
from unisono.exchange.tree.counted_collectives import CountedCollectives
from unisono.plan.reduction_tree import Fold, Node, Plan, fold


class CompressedTree(BucketedExchange):
    """Average gradients that are compressed at fixed nodes of the tree."""

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
        self.params, self.group, self.leaves = params, group, self._leaf_count(virtual_ranks, group)
        self.nodes = tree_nodes(self.leaves, settings.groups)
        self.layout = BucketLayout(params, group.size * BLOCK // ALIGN)  # chunks end where blocks do
        self.collectives = CountedCollectives(group)
        self.compressor = build_compressor(settings, self.layout, self.collectives)
        self.pool = FlatGradientPool(self.layout, shared=False)
        self.ready = BucketReadiness(self.layout)
        self.result = FlatGradient(self.layout)
        self.residuals: dict[int, FlatGradient] = {}
        """The residual of each node that this process owns; of all nodes, right after loading."""
        self.unit = self.weight = 1.0  # the weight that residuals are divided by, and the last step's
        self._owners: NodeOwners | None = None

    def _leaf_count(self, virtual_ranks: int, group: ProcessGroup) -> int:
        return virtual_ranks

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self.pieces, self.collectives.sent = pieces, 0
        self.span = spans[self.group.rank]
        owners = NodeOwners(self.leaves, self.nodes, tuple(spans))
        self._move_residuals(owners)
        self.ready.begin()
        ratio, self.unit = self.unit / self.weight, self.weight
        for residual in self.residuals.values() if ratio != 1.0 else ():
            for flat in residual.flats:
                flat.mul_(ratio)
        self.compressor.begin(owners, ratio)
        self._not_finite = torch.zeros(len(self.params), dtype=torch.uint8)  # by parameter
        self._leaf: LooseGradient | None = None
        self._queue = [(n, node) for n, node in enumerate(self.nodes) if owners.parts(self.group.rank, node)]
        self._fold = self._next_fold()
        self._shared: dict[int, dict[Node, FlatGradient]] = {}  # our sums within nodes that several processes compute

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        if self._leaf is None:
            self._compress_up_to(virtual_rank)
            self._fold.skip_to(virtual_rank, None)
            self._leaf, self._remaining = LooseGradient(self.layout), self.pieces[virtual_rank]
        self._number = virtual_rank
        self._remaining -= 1
        self.ready.enter(self._leaf, notify=False, last=last, launch=False)

    def leave(self) -> None:
        self.ready.leave()
        if not self._remaining:
            for p in self.params:
                p.grad = None
            self._fold.push(Node(self._number, self._number + 1), self._leaf)
            self._leaf = None

    def launch(self) -> None:
        self._compress_up_to(self.span[1])
        self._compress_shared()

    def finish(self, weight: float) -> bool:
        not_finite = self.group.max_(self._not_finite.to(self.group.device)).tolist()
        self.compressor.reduce(self.result, self.residuals)
        for flat in self.result.flats:
            flat.mul_(self.unit / weight)
        self.weight = weight
        for number, is_bad in enumerate(not_finite):
            if is_bad:
                self.result.views[number].fill_(torch.nan)
        self.result.assign_gradients(self.params)
        return not any(not_finite) and all(map(finite, self.result.flats))

    @property
    def sent(self) -> float:
        return self.collectives.sent

    @property
    def plain(self) -> float:
        """The bytes that the uncompressed tree over the same leaves would send."""
        assert self._owners is not None
        return Plan(self.leaves, self._owners.spans).traffic(self.group.rank) * self.layout.bytes_of_all

    def close(self) -> None:
        super().close()
        self._leaf = None
        self.residuals, self._shared = {}, {}
        self.pool.free.clear()

    # -- compress nodes

    def _next_fold(self) -> Fold[LooseGradient | None]:
        first = max(self._queue[0][1].lo, self.span[0]) if self._queue else self.span[1]
        return Fold(self.leaves, _merge, first)

    def _compress_up_to(self, leaf: int) -> None:
        """Compress the nodes of which this process has computed its whole part: those that end at `leaf` or before."""
        while self._queue and min(self._queue[0][1].hi, self.span[1]) <= leaf:
            number, node = self._queue.pop(0)
            self._fold.skip_to(min(node.hi, self.span[1]), None)
            sums = {part: self._flat(loose) for part, loose in self._fold.held}
            self._fold = self._next_fold()
            if node in sums:
                self._compress(number, sums[node])
            else:
                self._shared[number] = sums

    def _flat(self, loose: LooseGradient | None) -> FlatGradient:
        """Copy a gradient into flat buffers; None: zeros."""
        copy = self.pool.take()
        if loose is not None:
            copy.merge(range(len(self.params)), loose)
        copy.complete()
        return copy

    def _compress(self, number: int, gradient: FlatGradient) -> None:
        """Compress the complete sum of a node."""
        for n, view in enumerate(gradient.views):
            if not finite(view):  # this step is lost; the residual must stay finite
                self._not_finite[n] = 1
                view.zero_()
        residual = self.residuals.get(number)
        for i, flat in enumerate(gradient.flats):
            flat.div_(self.unit)
            if residual is not None:
                flat.add_(residual.flats[i])
        self.compressor.compress(number, gradient)
        if self.compressor.feedback:
            if residual is not None:
                self.pool.give([residual])
            self.residuals[number] = gradient
        else:
            self.pool.give([gradient])

    def _compress_shared(self) -> None:
        """Send partial sums to the owners of their nodes, and compress the nodes that this process owns."""
        assert self._owners is not None
        owners, rank = self._owners, self.group.rank
        sends, receives = [], []
        for number, node in enumerate(self.nodes):
            owner = owners.owners[number]
            if owner != rank:
                for copy in self._shared.pop(number, {}).values():
                    sends += [Message(flat, owner) for flat in copy.flats]
                continue
            for other in self.collectives.others:
                for part in owners.parts(other, node):
                    copy = self._shared[number][part] = self.pool.take()
                    receives += [Message(flat, other) for flat in copy.flats]
        self.collectives.exchange(sends, receives)
        for number, sums in self._shared.items():
            self._compress(number, fold(self.nodes[number], sums, _add))
        self._shared = {}

    # -- residuals

    def _move_residuals(self, owners: NodeOwners) -> None:
        """Send residuals to the new owners of their nodes, if virtual ranks have moved."""
        before, self._owners = self._owners, owners
        if before is None:
            self.residuals = {n: self.residuals[n] for n in owners.owned(self.group.rank) if n in self.residuals}
        elif before.spans != owners.spans and self.compressor.feedback:
            sends, receives = [], []
            for number, sender, receiver in moves(before.owners, owners.owners):
                if sender == self.group.rank:
                    sends += [Message(flat, receiver) for flat in self.residuals.pop(number).flats]
                if receiver == self.group.rank:
                    self.residuals[number] = self.pool.take()
                    receives += [Message(flat, sender) for flat in self.residuals[number].flats]
            self.collectives.exchange(sends, receives)
        self.residuals = dict(sorted(self.residuals.items()))

    def state_dict(self) -> dict[str, Any]:
        rows = {str(number): row for number, row in self._residual_rows()}
        return {"unit": self.unit, "weight": self.weight, "left": rows, "way": self.compressor.state_dict()}

    def _residual_rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the residual of each node as a row, on rank 0. All processes must call this together."""
        if self._owners is None or not self.compressor.feedback:
            yield from ((number, flatten(copy)) for number, copy in self.residuals.items())
            return
        for number, owner in enumerate(self._owners.owners):
            row = flatten(self.residuals[number]) if owner == self.group.rank else flatten(self.result)
            self.group.broadcast_([row], source=owner)
            if self.group.rank == 0:
                yield number, row

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.unit, self.weight = float(state["unit"]), float(state["weight"])
        self.compressor.load_state_dict(state["way"])
        rows = {int(number): row for number, row in state["left"].items()}
        if rows and len(rows) != len(self.nodes):  # other nodes: the sum of the residuals is what matters
            rows = {0: torch.stack(list(rows.values())).sum(0)}
        self.residuals = {number: unflatten(row, self.pool.take()) for number, row in rows.items()}


class CompressedAllReduce(CompressedTree):
    """Compress the sum of each process, as DistributedDataParallel's hooks do."""

    promise = "tolerance"
    reason = (
        "exchange=allreduce compresses the sum of each process, so the result depends on the number of processes; "
        "exchange=tree does not"
    )

    def _leaf_count(self, virtual_ranks: int, group: ProcessGroup) -> int:
        return group.size

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        alone = [(rank, rank + 1) for rank in range(self.group.size)]
        super().begin(alone, {self.group.rank: sum(pieces.values())}, weights)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        super().enter(self.group.rank, last=last)


def _merge(left: LooseGradient | None, right: LooseGradient | None) -> LooseGradient | None:
    if left is None or right is None:
        return right if left is None else left
    left.merge(range(len(left.grads)), right)
    return left


def _add(left: FlatGradient, right: FlatGradient) -> FlatGradient:
    for own, other in zip(left.flats, right.flats, strict=True):
        own.add_(other)
    return left
