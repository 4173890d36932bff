"""The tree exchange: add gradients in one fixed order, at the traffic of an all-reduce. It is the default.

The gradient of each virtual rank is a leaf: the gradients of its micro-batches, added in order. A process folds its
leaves into the largest complete subtrees of the tree (plan/reduction_tree.py). The processes exchange these partial
sums bucket by bucket, while the last backward still runs. One bucket, two processes with one subtree each, one chunk
for each process:

    process 0   [ a0 | a1 ] --a1 goes to 1-->  a0 + b0  --/ weight-->  [ m0 |    ] --m0 goes to 1--> [ m0 | m1 ]
    process 1   [ b0 | b1 ] --b0 goes to 0-->  a1 + b1  --/ weight-->  [    | m1 ] --m1 goes to 0--> [ m0 | m1 ]

Each chunk goes directly from the process that has it to the process that needs it, in a message or through shared
memory (tree_allreduce.py). So no library decides the order of additions. Padding and the ends of chunks depend on the
number of processes, but every operation is elementwise, so the bits do not.

The way of a bucket, from backward to the first message:

    step.backward -> loss.backward -> hook (BucketReadiness) -> TreeAllReduce.send -> dist.isend

Memory, in gradient copies: while computing, `copies` of plan/reduction_tree.py, less one where the second leaf of a
pair is a single micro-batch (it is added directly to the first). The sum is written over the process's first partial
sum. Messages that arrive need the room of two buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.distributed.process_group import ProcessGroup, to_local
from unisono.exchange.base import Spans, Weights
from unisono.exchange.bucket_readiness import BucketedExchange, BucketReadiness
from unisono.exchange.buckets import BUCKET_BYTES, BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient, FlatGradientPool, LooseGradient
from unisono.exchange.kernels.elementwise import divide_
from unisono.exchange.tree.halving_allreduce import HalvingAllReduce
from unisono.exchange.tree.staged_allreduce import routes_of
from unisono.exchange.tree.tree_allreduce import TreeAllReduce
from unisono.plan.halving import find_halving
from unisono.plan.link_shares import are_unlike
from unisono.plan.reduction_tree import Fold, Node, Plan, parent

if TYPE_CHECKING:
    from unisono.config.schema import TreeSettings

BUCKETS = 16
"""At least this many buckets where links have unlike rates, unless they would be smaller than the next constant."""

SMALLEST_BUCKET_BYTES = 2**20
"""Smaller buckets cost more time for their messages than they save."""

Leaf = tuple[Node, FlatGradient | LooseGradient]
"""A node of the tree, and the gradient that is being computed for it."""

PartialSum = FlatGradient | LooseGradient | None
"""A sum of gradients of this process; None: zeros."""


class TreeExchange(BucketedExchange):
    """Average gradients along one fixed tree.

    Args:
        params: The parameters.
        virtual_ranks: The number of leaves of the tree.
        group: The processes that exchange gradients.
        settings: The size of buckets; None: BUCKET_BYTES.
    """

    promise = "exact"
    reason = "one fixed tree adds the gradients of the virtual ranks, wherever they were computed"

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        virtual_ranks: int,
        group: ProcessGroup,
        settings: TreeSettings | None = None,
    ) -> None:
        self.params = params
        self.virtual_ranks = virtual_ranks
        self.group = group
        self.layout = self._build_layout(BUCKET_BYTES if settings is None else round(settings.bucket_mb * 2**20))
        self.pool = FlatGradientPool(self.layout, shared=bool(group.neighbors))
        self.ready = BucketReadiness(self.layout, complete=self._merge)
        self.transport: Any = None
        """Exchanges the partial sums; None: one process has them all."""
        self._fold: Fold[PartialSum] = Fold(virtual_ranks, _target)
        self._leaf: Leaf | None = None  # the one that backward fills
        self._remaining = 0  # its micro-batches that are still to come
        self._merges: list[tuple[FlatGradient | LooseGradient, LooseGradient]] = []  # due once the leaf is complete
        self._merged: list[bool] = []  # for which parameters these are done
        self._roots: list[FlatGradient | None] | None = None  # our partial sums, in order; None: not known yet
        self._result: FlatGradient | None = None

    def _build_layout(self, most_bytes: int) -> BucketLayout:
        return BucketLayout(self.params, self.group.size, bucket_bytes(self.params, self.group.links, most_bytes))

    def _build_transport(self, plan: Plan) -> Any:
        halving = find_halving(routes_of(plan, self.group))
        if halving is None:
            return TreeAllReduce(plan, self.layout, self.group)
        return HalvingAllReduce(halving, self.layout, self.group)

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """Begin a step. This process has spans[rank]; virtual rank v of it has pieces[v] micro-batches, perhaps 0."""
        plan = Plan(self.virtual_ranks, tuple(spans))
        self.pieces = pieces
        self._rank = self.group.rank  # in this step; the group may change during it
        self.span = plan.spans[self.group.rank]
        # the first leaf of each partial sum, in whose memory it is made and sent; the other leaves are added to it
        self._sent_leaves = {next((v for v in range(*n) if pieces[v]), -1) for n in plan.sends(self.group.rank)}
        self._fold, self._leaf, self._roots = Fold(self.virtual_ranks, _target, self.span[0]), None, None
        self._plan_of_step = plan
        self.ready.begin()
        self._begin_transport(plan, weights)

    def _begin_transport(self, plan: Plan, weights: Weights, divisor: torch.Tensor | None = None) -> None:
        """Let the transport follow this plan. One process needs no transport."""
        if self.group.size == 1:
            return
        if self.transport is None or (self.transport.plan != plan and not self.transport.follow(plan)):
            if self.transport is not None:
                self.transport.stream.join()
            self.transport = self._build_transport(plan)
            self.ready.launch = self.transport.send
        self.transport.begin(weights, divisor)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        """Make p.grad the place for the gradient of the next micro-batch.

        Args:
            virtual_rank: The virtual rank of the micro-batch.
            last: Whether it is the last micro-batch of this process in this step.
        """
        if self._leaf is None:
            self._fold.skip_to(virtual_rank, None)
            self._leaf = self._open_leaf(virtual_rank)
            self._remaining = self.pieces[virtual_rank]
        self._remaining -= 1
        if not self._remaining:
            self._plan_merges(self._leaf, last=last)
        merges = not self._remaining and bool(self._merges)
        self.ready.enter(self._leaf[1], notify=merges, last=last, launch=last and self.group.size > 1)

    def leave(self) -> None:
        assert self._leaf is not None
        if self._leaf[0].hi - self._leaf[0].lo > 1 and max(self.ready.fired) > 1:
            # its parts were added to the first of the pair one by one: (first + a) + b is not first + (a + b)
            self.ready.refuse_varying(self.ready.fired.index(max(self.ready.fired)))
        self.ready.leave()
        if not self._remaining:
            self._merge([number for number, done in enumerate(self._merged) if not done])
            self._fold.push(*self._leaf)
            self._fold.skip_to(self._next_leaf(), None)
            self._leaf = None

    def launch(self) -> None:
        """Send the buckets that have not been sent yet."""
        if self._roots is None:
            self._plan_merges(None, last=True)
        for root in self._roots or []:
            if root is not None:
                root.complete()  # parameters that no micro-batch used here count as zeros
        self.ready.launch_rest()

    def finish(self, weight: float) -> bool:
        assert self._result is not None
        if self.transport is None:
            whole = divide_(self._result.flats, weight)
        else:
            whole = bool(self.transport.finish())
        self._result.assign_gradients(self.params)
        return whole

    def commit(self) -> None:
        self.pool.give(root for root in self._roots or [] if root is not None and root is not self._result)
        self._roots = []

    def zero(self) -> None:
        super().zero()
        if self._result is not None:
            self.pool.give([self._result])
            self._result = None

    @property
    def sent(self) -> float:
        if self.transport is None:
            return 0.0
        return float(self.transport.plan.traffic(self.group.rank) * self.layout.bytes_of_all)

    def close(self) -> None:
        super().close()
        if self.transport is not None:
            self.transport.stream.join()  # before memory that it uses is released
        # release the memory of gradients now, not when the garbage collector runs
        self._fold.held.clear()
        self._merges, self._roots, self.transport = [], None, None
        self.ready.launch = None
        self.pool.free.clear()

    # -- fold the leaves of this process

    def _next_leaf(self) -> int:
        """Return the next virtual rank that has micro-batches, or the end of the span.

        The virtual ranks before it have none and complete subtrees, so the additions that they make due belong to the
        current leaf.
        """
        assert self._leaf is not None
        after = self._leaf[0].hi
        return next((v for v in range(after, self.span[1]) if self.pieces[v]), self.span[1])

    def _open_leaf(self, virtual_rank: int) -> Leaf:
        """Return the memory for the leaf of `virtual_rank`.

        The second leaf of a pair goes directly into the first, if it is a single micro-batch and no layer accumulates
        into it twice: (first) + g is then the addition that the tree makes there.
        """
        leaf = Node(virtual_rank, virtual_rank + 1)
        if self._fold.held and self.pieces[virtual_rank] == 1 and max(self.ready.expected) < 2:
            node, value = self._fold.held[-1]
            pair = parent(self.virtual_ranks, node, leaf)
            if pair is not None and node.hi - node.lo == 1 and value is not None:
                self._fold.held.pop()
                return pair, value
        return leaf, self.pool.take() if virtual_rank in self._sent_leaves else LooseGradient(self.layout)

    def _plan_merges(self, leaf: Leaf | None, *, last: bool) -> None:
        """Find the additions that are due once `leaf` is complete, and with `last` the partial sums of the step."""
        self._merges, self._merged = [], [False] * len(self.params)

        def note(left: PartialSum, right: PartialSum) -> PartialSum:
            if left is not None and right is not None:
                assert isinstance(right, LooseGradient), "only the left one is sent"
                self._merges.append((left, right))
            return _target(left, right)

        end = Fold(self.virtual_ranks, note, self.span[0])
        end.held = list(self._fold.held)
        if leaf is not None:
            end.push(*leaf)
        end.skip_to(self._next_leaf() if leaf else self.span[1], None)
        if last:
            self._set_roots([value for _, value in end.held], leaf)

    def _set_roots(self, roots: Sequence[PartialSum], leaf: Leaf | None) -> None:
        """Fix the partial sums of the step and where their total goes, and prepare the messages."""
        growing = leaf and (self._merges[-1][0] if self._merges else leaf[1])  # backward still adds to this one
        self._roots = []
        for root in roots:
            assert not isinstance(root, LooseGradient), "partial sums are sent, and need flat buffers"
            self._roots.append(root)
            if root is not None and root is not growing:
                root.complete()
        if self._roots and self._roots[0] is not None:
            self._result = self._roots[0]
        else:  # this process has computed nothing for its first partial sum
            self._result = self.pool.take()
            self._result.complete()
            self._roots[:1] = [self._result] if self._roots else []
        if self.transport is not None:
            self.transport.prepare(self._roots, self._result)

    def _merge(self, numbers: Sequence[int]) -> None:
        """Fold the gradients of some parameters, which are complete for this leaf."""
        for number in numbers:
            self._merged[number] = True
        for left, right in self._merges:
            left.merge(numbers, right)
        for number in numbers if self._merges else ():
            self.params[number].grad = None

    def held(self) -> Mapping[Node, FlatGradient | None]:
        if self._roots is None or any(root is not None and root.is_modified for root in self._roots):
            return {}
        return dict(zip(self._plan_of_step.sends(self._rank), self._roots, strict=True))


def _target(left: PartialSum, right: PartialSum) -> PartialSum:
    """Return where the sum of two partial sums is made: x + 0 = x, since no sum is ever -0."""
    return right if left is None else left


def bucket_bytes(params: Sequence[torch.nn.Parameter], links: Sequence[float], most: int) -> int:
    """Return the most bytes of a bucket, `most` where links have like rates.

    A host that owns nothing sends partial sums, and receives totals. Its link is used in both directions only while the
    totals of one bucket travel with the partial sums of a later one: many small buckets keep both busy.
    """
    if not are_unlike(links):
        return most
    total: int = sum(to_local(p.detach()).nbytes for p in params)
    return min(most, max(SMALLEST_BUCKET_BYTES, total // BUCKETS))
