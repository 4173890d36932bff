"""The tree exchange: one fixed association of the sum, at the traffic of an all-reduce. The default, and the proof.

Every virtual rank's gradient is a leaf: its micro-batches, added in order. A process folds the leaves it computed into
the largest complete subtrees of the tree (plan/reduction_tree.py) and the processes exchange these partial sums, bucket
by bucket, while the last backward still runs. One bucket, two processes that hold one subtree each, one chunk a
process:

    process 0   [ a0 | a1 ] --a1 goes to 1-->  a0 + b0  --/ weight-->  [ m0 |    ] --m0 goes to 1--> [ m0 | m1 ]
    process 1   [ b0 | b1 ] --b0 goes to 0-->  a1 + b1  --/ weight-->  [    | m1 ] --m1 goes to 0--> [ m0 | m1 ]

Every chunk goes straight from whoever has it to whoever needs it, so no library's order of addition is involved: in a
message, or, on the same host, by being read where it lies (tree_transport.py). Padding and chunk edges depend on the
number of processes, but every operation here is elementwise: the bits do not.

Memory, in gradient copies: while computing, what plan/reduction_tree.py's `copies` says, less one where the second leaf
of a pair is a single micro-batch (it is then added straight into the first). The sum is made in the memory of the
process's first partial sum, bucket by bucket, while the last backward still runs; what arrives in messages needs the
room of two buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.exchange.base import Spans, Weights
from unisono.exchange.buckets import (
    BucketedExchange,
    BucketLayout,
    BucketReadiness,
    FlatGradient,
    FlatGradientPool,
    LooseGradient,
    divide_,
)
from unisono.exchange.tree.tree_transport import TreeTransport
from unisono.plan.reduction_tree import Fold, Node, Plan, parent


class TreeExchange(BucketedExchange):
    promise = "exact"
    reason = "one fixed tree adds the gradients of the virtual ranks, wherever they were computed"

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup) -> None:
        self.params = params
        self.virtual_ranks = virtual_ranks
        self.group = group
        self.layout = self._lay_out()
        self.pool = FlatGradientPool(self.layout, shared=bool(group.neighbors))
        self.ready = BucketReadiness(self.layout, self._launch, self._merge)
        self.wire: Any = None  # how partial sums meet; None: nobody else has any
        self._fold: Fold[Part] = Fold(virtual_ranks, _where)
        self._current: tuple[Node, FlatGradient | LooseGradient] | None = None  # the leaf that backward is filling
        self._to_come = 0  # micro-batches that are still to come for it
        self._merges: list[
            tuple[FlatGradient | LooseGradient, LooseGradient]
        ] = []  # what is to be added once it is complete
        self._merged: list[bool] = []  # for which parameters that is done
        self._roots: list[FlatGradient | None] | None = (
            None  # the partial sums of this process, in order; None: all zeros
        )
        self._result: FlatGradient | None = None
        self._broken: Exception | None = None  # what a message that left from inside backward met with

    def _lay_out(self) -> BucketLayout:
        return BucketLayout(self.params, self.group.size)

    def _build_wire(self, plan: Plan) -> Any:
        return TreeTransport(plan, self.layout, self.group)

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """A step begins: this process holds spans[rank]; virtual rank v of it has pieces[v] micro-batches (maybe 0)."""
        plan = Plan(self.virtual_ranks, tuple(spans))
        self.pieces = pieces
        self._rank = self.group.rank  # in this step, whatever comes
        self.span = plan.spans[self.group.rank]
        # what is leftmost of a partial sum will travel; all the others are only added to it
        self._travel = {next((v for v in range(*n) if pieces[v]), -1) for n in plan.sends(self.group.rank)}
        self._fold, self._current, self._roots = Fold(self.virtual_ranks, _where, self.span[0]), None, None
        self._plan_of_step, self._broken = plan, None
        self.ready.begin()
        self._wire(plan, weights)

    def _wire(self, plan: Plan, weights: Weights, divisor: torch.Tensor | None = None) -> None:
        """What is to be exchanged follows this plan; alone there is nothing to exchange."""
        if self.group.size == 1:
            return
        if self.wire is None:
            self.wire = self._build_wire(plan)
        elif self.wire.plan != plan:
            self.wire.follow(plan)
        self.wire.begin(weights, divisor)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        """Before a micro-batch: p.grad is where its gradient belongs. `last`: no other follows here in this step."""
        if self._current is None:
            self._fold.skip_to(virtual_rank, None)
            self._current = self._open(virtual_rank)
            self._to_come = self.pieces[virtual_rank]
        self._to_come -= 1
        if not self._to_come:
            self._plan(self._current, last=last)
        folds = not self._to_come and bool(self._merges)
        self.ready.enter(self._current[1], tell=folds, last=last, launch=last and self.group.size > 1)

    def leave(self) -> None:
        assert self._current is not None
        if self._current[0].hi - self._current[0].lo > 1 and max(self.ready.fired) > 1:
            # it went straight into the first of its pair, piece by piece: (first + a) + b is not first + (a + b)
            self.ready.refuse_varying(self.ready.fired.index(max(self.ready.fired)))
        self.ready.leave()
        if not self._to_come:
            for number, done in enumerate(self._merged):
                if not done:
                    self._merge(number)
            self._fold.push(*self._current)
            self._fold.skip_to(self._following(), None)
            self._current = None

    def launch(self) -> None:
        """Send what has not been sent yet."""
        if self._roots is None:
            self._plan(None, last=True)
        for root in self._roots or []:
            if root is not None:
                root.complete()  # parameters that nobody used here count as zeros
        self.ready.launch_rest()

    def finish(self, weight: float) -> bool:
        assert self._result is not None
        if self._broken is not None:
            raise self._broken
        if self.wire is None:
            found = [divide_(flat, weight) for flat in self._result.flats]
            whole = all(found)
        else:
            whole = bool(self.wire.finish())
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
        return self.wire.plan.traffic(self.group.rank) * self.layout.bytes_of_all if self.wire is not None else 0.0

    def close(self) -> None:
        super().close()
        # a gradient's memory goes now, and not when the garbage collector comes by
        self._fold.held.clear()
        self._merges, self._roots, self.wire = [], None, None
        self.pool.free.clear()

    # -- the fold of this process's own leaves

    def _following(self) -> int:
        """The next virtual rank that has something to do, or the end of the span. What lies before it is nothing, and
        completes subtrees: additions that fall due by it are the current leaf's to make."""
        assert self._current is not None
        after = self._current[0].hi
        return next((v for v in range(after, self.span[1]) if self.pieces[v]), self.span[1])

    def _open(self, virtual_rank: int) -> tuple[Node, FlatGradient | LooseGradient]:
        """Where the leaf of `virtual_rank` is gathered. The second of a pair, if it is one micro-batch (and no
        layer adds to it twice), goes straight into the first: (first) + g is the very addition the tree makes there."""
        leaf = Node(virtual_rank, virtual_rank + 1)
        if self._fold.held and self.pieces[virtual_rank] == 1 and max(self.ready.expected) < 2:
            node, value = self._fold.held[-1]
            pair = parent(self.virtual_ranks, node, leaf)
            if pair is not None and node.hi - node.lo == 1 and value is not None:
                self._fold.held.pop()
                return pair, value
        return leaf, self.pool.take() if virtual_rank in self._travel else LooseGradient(self.layout)

    def _plan(self, leaf: tuple[Node, FlatGradient | LooseGradient] | None, *, last: bool) -> None:
        """What is to be added once `leaf` is complete; with `last` also the partial sums that this leaves."""
        self._merges, self._merged = [], [False] * len(self.params)

        def note(left: Part, right: Part) -> Part:
            if left is not None and right is not None:
                assert isinstance(right, LooseGradient), "it was to travel"
                self._merges.append((left, right))
            return _where(left, right)

        end = Fold(self.virtual_ranks, note, self.span[0])
        end.held = list(self._fold.held)
        if leaf is not None:
            end.push(*leaf)
        end.skip_to(self._following() if leaf else self.span[1], None)
        if not last:
            return
        self._roots = []
        becoming = leaf and (self._merges[-1][0] if self._merges else leaf[1])
        for _, value in end.held:
            assert not isinstance(value, LooseGradient), "it was not to travel"
            self._roots.append(value)
            if value is not None and value is not becoming:
                value.complete()
        if self._roots and self._roots[0] is not None:
            self._result = self._roots[0]
        else:  # nothing was computed here, or nothing for the first of them
            self._result = self.pool.take()
            self._result.complete()
            self._roots[:1] = [self._result] if self._roots else []

    def _merge(self, number: int) -> None:
        """The gradient of a parameter is complete for this leaf: fold it, while it is in the processor's cache."""
        self._merged[number] = True
        for left, right in self._merges:
            left.merge(number, right)
        if self._merges:
            self.params[number].grad = None

    def _launch(self, bucket: int) -> None:
        """The partial sums of a bucket are complete here: send them. Also called from inside backward."""
        assert self._result is not None
        if self.wire is None or self._broken is not None:
            return
        try:
            self.wire.send(bucket, self._roots or [], self._result)
        except (RuntimeError, ConnectionError) as error:
            if self.group.monitor is None:
                raise
            self._broken = error  # backward goes on: what it makes here is still good

    def held(self) -> Mapping[Node, FlatGradient | None]:
        """Once all is launched. Nobody may still be adding up."""
        if self._roots is None or any(root is not None and root.is_modified for root in self._roots):
            return {}
        return dict(zip(self._plan_of_step.sends(self._rank), self._roots, strict=True))


Part = FlatGradient | LooseGradient | None
"""A sum of gradients of this process; None: nobody's, zeros."""


def _where(left: Part, right: Part) -> Part:
    """Where a sum is found when it is made: x + 0 = x, since no sum is ever -0."""
    return right if left is None else left
