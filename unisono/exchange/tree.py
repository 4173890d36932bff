"""The tree exchange: one fixed association of the sum, at the traffic of an all-reduce. The default, and the proof.

Every virtual rank's gradient is a leaf: its micro-batches, added in order. A process folds the leaves it computed into
the largest complete subtrees of the tree (score/tree.py) and the processes exchange these partial sums, bucket by
bucket, while the last backward still runs. One bucket, two processes that hold one subtree each, W chunks:

    process 0   [ a0 | a1 ] --all-to-all--> [ a0 | b0 ] --fold--> [ a0 + b0 ] --all-gather--> [ a0+b0 | a1+b1 ] / weight
    process 1   [ b0 | b1 ]                 [ a1 | b1 ]           [ a1 + b1 ]                 [ a0+b0 | a1+b1 ] / weight

All-to-all and all-gather only move data, so no library's order of addition is involved. Padding and chunk edges depend
on the number of processes, but every operation here is elementwise: the bits do not.

Memory, in gradient copies: while computing, what score/tree.py's `copies` says, less one where the second leaf of a
pair is a single micro-batch (it is then added straight into the first). While exchanging, one copy for each partial
sum, one for what arrives, one for the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.exchange.buckets import Copy, Layout, Pool, Readiness
from unisono.score.tree import Fold, Node, Plan, parent
from unisono.world.collectives import Group, Work, all_gather, all_to_all


class Tree:
    promise = "exact"
    reason = "one fixed tree adds the gradients of the virtual ranks, wherever they were computed"

    def __init__(self, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: Group) -> None:
        self.params = params
        self.virtual_ranks = virtual_ranks
        self.group = group
        self.layout = Layout(params, group.size)
        self.pool = Pool(self.layout)
        self.ready = Readiness(self.layout, self._launch)
        self.wire: _Wire | None = None
        self._fold = self._new_fold()
        self._current: tuple[Node, Copy] | None = None  # the leaf that backward is filling
        self._merges: list[tuple[Copy, Copy]] | None = None  # what remains to be added when the last backward is done
        self._roots: list[Copy | None] = []  # the partial sums of this process, in order; None: all zeros
        self._spent: list[Copy] = []  # copies whose content was added elsewhere
        self._result: Copy | None = None

    def begin(self, spans: Sequence[tuple[int, int]], pieces: Mapping[int, int]) -> None:
        """A step begins: this process holds spans[rank]; virtual rank v of it has pieces[v] micro-batches (maybe 0)."""
        plan = Plan(self.virtual_ranks, tuple(spans))
        self.pieces = pieces
        self.span = plan.spans[self.group.rank]
        self._at = self.span[0]
        self._fold = self._new_fold()
        self._merges, self._roots = None, []
        self.ready.begin()
        if self.group.size > 1 and (self.wire is None or self.wire.plan != plan):
            self.wire = _Wire(plan, self.layout, self.group)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        """Before a micro-batch: p.grad is where its gradient belongs. `last`: no other follows here in this step."""
        if self._current is None or self._current[0].lo != virtual_rank:
            if self._current is not None:
                self._fold.push(*self._current)
            self._skip_to(virtual_rank)
            self._current = self._open(virtual_rank)
        if last:
            self._plan_the_end()
        self.ready.enter(last=last and self.group.size > 1)
        for p, view in zip(self.params, self._current[1].views, strict=True):
            p.grad = view

    def leave(self) -> None:
        self.ready.leave()

    def launch(self, *, again: bool = False) -> None:
        """Send what has not been sent yet; with `again`, all of it (the partial sums are still here)."""
        if self._merges is None:
            self._plan_the_end()
        if again:
            self.ready.next = 0
        for bucket in range(self.ready.next, len(self.layout.buckets)):
            self._launch(bucket, merge=not again)
        self.ready.next = len(self.layout.buckets)

    def finish(self, weight: float) -> None:
        if self.wire is None:
            (self._result,) = self._roots or (None,)
            if self._result is None:
                self._result = self.pool.take()
            for flat in self._result.flats:
                flat.div_(weight)
        else:
            if self._result is None:
                self._result = self._spent.pop() if self._spent else self.pool.take_dirty()
            self.wire.finish(self._result, weight)
        for p, view in zip(self.params, self._result.views, strict=True):
            p.grad = view

    def commit(self) -> None:
        copies = {id(c): c for c in [*self._roots, *self._spent] if c is not None and c is not self._result}
        self.pool.give(copies.values())
        self._roots, self._spent, self._current = [], [], None

    def zero(self) -> None:
        for p in self.params:
            p.grad = None
        if self._result is not None:
            self.pool.give([self._result])
            self._result = None

    def finite(self) -> bool:
        """Whether every element of the mean gradient is finite; a read of the gradient."""
        assert self._result is not None
        return self._result.finite()

    @property
    def used(self) -> Sequence[bool]:
        """Which parameters took part in a backward of this step, on this process."""
        return self.ready.used

    def close(self) -> None:
        self.ready.close()
        self.zero()

    # -- the fold of this process's own leaves

    def _new_fold(self) -> Fold[Copy | None]:
        return Fold(self.virtual_ranks, self._add)

    def _add(self, left: Copy | None, right: Copy | None) -> Copy | None:
        if left is None or right is None:  # nobody's gradient: zeros, and x + 0 = x since no sum is ever -0
            return left or right
        self.pool.give([right])
        return left.add_(right)

    def _skip_to(self, virtual_rank: int) -> None:
        """Virtual ranks between the last one that had something to do and this one had nothing."""
        done = self._fold.held[-1][0].hi if self._fold.held else self.span[0]
        for nothing in range(done, virtual_rank):
            self._fold.push(Node(nothing, nothing + 1), None)

    def _open(self, virtual_rank: int) -> tuple[Node, Copy]:
        """Where the leaf of `virtual_rank` is gathered. The second of a pair, if it is one micro-batch, goes straight
        into the first: (first) + g is the very addition that the tree makes there."""
        leaf = Node(virtual_rank, virtual_rank + 1)
        if self._fold.held and self.pieces[virtual_rank] == 1:
            node, value = self._fold.held[-1]
            pair = parent(self.virtual_ranks, node, leaf)
            if pair is not None and node.hi - node.lo == 1 and value is not None:
                self._fold.held.pop()
                return pair, value
        return leaf, self.pool.take()

    def _plan_the_end(self) -> None:
        """What is to be added, per bucket, once the last leaf is complete; and the partial sums that this leaves."""
        merges: list[tuple[Copy, Copy]] = []

        def note(left: Copy | None, right: Copy | None) -> Copy | None:
            if left is None or right is None:
                return left or right
            merges.append((left, right))
            return left

        end: Fold[Copy | None] = Fold(self.virtual_ranks, note)
        end.held = list(self._fold.held)
        if self._current is not None:
            end.push(*self._current)
        for nothing in range(end.held[-1][0].hi if end.held else self.span[0], self.span[1]):
            end.push(Node(nothing, nothing + 1), None)
        self._merges = merges
        self._roots = [value for _, value in end.held]
        self._spent = [right for _, right in merges]

    def _launch(self, bucket: int, *, merge: bool = True) -> None:
        """A bucket is complete here: make the partial sums whole and send them. Also called from inside backward."""
        assert self._merges is not None
        if merge:
            for left, right in self._merges:
                left.flats[bucket].add_(right.flats[bucket])
        if self.wire is not None:
            self.wire.send(bucket, [None if root is None else root.flats[bucket] for root in self._roots])


class _Wire:
    """The two collectives of every bucket for one placement, with the buffers they need."""

    def __init__(self, plan: Plan, layout: Layout, group: Group) -> None:
        self.plan, self.layout, self.group = plan, layout, group
        self.mine = len(plan.sends(group.rank))
        self.counts = [len(plan.sends(rank)) for rank in range(plan.size)]
        self.additions = plan.additions()
        arrivals = sum(self.counts)
        self.chunk = [b.size // plan.size for b in layout.buckets]
        self.arrived = [
            torch.empty(arrivals, c, dtype=b.dtype, device=b.device)
            for b, c in zip(layout.buckets, self.chunk, strict=True)
        ]
        # several partial sums are packed chunk by chunk before they travel; a single one already lies that way
        self.packed = [
            torch.zeros(plan.size, self.mine, c, dtype=b.dtype, device=b.device) if self.mine != 1 else None
            for b, c in zip(layout.buckets, self.chunk, strict=True)
        ]
        self.works: list[Work | None] = [None] * len(layout.buckets)

    def send(self, bucket: int, roots: Sequence[torch.Tensor | None]) -> None:
        assert len(roots) == self.mine
        packed, chunk = self.packed[bucket], self.chunk[bucket]
        if packed is None:
            (root,) = roots
            outgoing = torch.zeros(self.layout.buckets[bucket].size).to(self.arrived[bucket]) if root is None else root
        else:
            for i, root in enumerate(roots):
                if root is None:
                    packed[:, i].zero_()
                else:
                    packed[:, i].copy_(root.view(self.plan.size, chunk))
            outgoing = packed.view(-1)
        self.works[bucket] = all_to_all(
            self.arrived[bucket].view(-1),
            outgoing,
            [count * chunk for count in self.counts],
            [self.mine * chunk] * self.plan.size,
        )

    def finish(self, result: Copy, weight: float) -> None:
        gathers: list[Work] = []
        for bucket, arrived in enumerate(self.arrived):
            work = self.works[bucket]
            assert work is not None
            work.wait()
            for i, j in self.additions:
                arrived[i].add_(arrived[j])
            arrived[0].div_(weight)
            gathers.append(all_gather(result.flats[bucket], arrived[0]))
            self.works[bucket] = None
        for work in gathers:
            work.wait()
