"""The tree exchange: one fixed association of the sum, at the traffic of an all-reduce. The default, and the proof.

Every virtual rank's gradient is a leaf: its micro-batches, added in order. A process folds the leaves it computed into
the largest complete subtrees of the tree (score/tree.py) and the processes exchange these partial sums, bucket by
bucket, while the last backward still runs. One bucket, two processes that hold one subtree each, one chunk a process:

    process 0   [ a0 | a1 ] --a1 goes to 1-->  a0 + b0  --/ weight-->  [ m0 |    ] --m0 goes to 1--> [ m0 | m1 ]
    process 1   [ b0 | b1 ] --b0 goes to 0-->  a1 + b1  --/ weight-->  [    | m1 ] --m1 goes to 0--> [ m0 | m1 ]

Every message goes straight from whoever has a chunk to whoever needs it, so no library's order of addition is involved.
Padding and chunk edges depend on the number of processes, but every operation here is elementwise: the bits do not.

Memory, in gradient copies: while computing, what score/tree.py's `copies` says, less one where the second leaf of a
pair is a single micro-batch (it is then added straight into the first). The exchange adds what arrives of two buckets:
the sum is made in the memory of the process's first partial sum, bucket by bucket, while the last backward still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from unisono.exchange import Weights
from unisono.exchange.buckets import Copy, Layout, Pool, Readiness, blocks, divide_, finite
from unisono.score.tree import Fold, Node, Plan, parent
from unisono.world.collectives import Group, Message, Work, send_and_receive


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

    def begin(self, spans: Sequence[tuple[int, int]], pieces: Mapping[int, int], weights: Weights) -> None:
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
        if self.wire is not None:
            self.wire.begin(weights)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        """Before a micro-batch: p.grad is where its gradient belongs. `last`: no other follows here in this step."""
        if self._current is None or self._current[0].lo != virtual_rank:
            if self._current is not None:
                self._current[1].complete()
                self._fold.push(*self._current)
            self._skip_to(virtual_rank)
            self._current = self._open(virtual_rank)
        if last:
            self._plan_the_end()
        self.ready.enter(self._current[1], last=last and self.group.size > 1)
        self._current[1].place(self.params)

    def leave(self) -> None:
        if self._current is not None and self._current[0].hi - self._current[0].lo > 1 and max(self.ready.fired) > 1:
            # it went straight into the first of its pair, piece by piece: (first + a) + b is not first + (a + b)
            self.ready.refuse_varying(self.ready.fired.index(max(self.ready.fired)))
        self.ready.leave()

    def launch(self) -> None:
        """Send what has not been sent yet."""
        if self._merges is None:
            self._plan_the_end()
        if self._current is not None:
            self._current[1].complete()
        for bucket in range(self.ready.next, len(self.layout.buckets)):
            self._launch(bucket)
        self.ready.next = len(self.layout.buckets)

    def finish(self, weight: float) -> bool:
        assert self._result is not None
        if self.wire is None:
            found = [divide_(flat, flat.new_tensor(weight, dtype=torch.float64)) for flat in self._result.flats]
            whole = all(found)
        else:
            whole = self.wire.finish()
        for p, view in zip(self.params, self._result.views, strict=True):
            p.grad = view
        return whole

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
        """Where the leaf of `virtual_rank` is gathered. The second of a pair, if it is one micro-batch (and no
        layer adds to it twice), goes straight into the first: (first) + g is the very addition the tree makes there."""
        leaf = Node(virtual_rank, virtual_rank + 1)
        if self._fold.held and self.pieces[virtual_rank] == 1 and max(self.ready.expected) < 2:
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
        if self._roots and self._roots[0] is not None:
            self._result = self._roots[0]
        else:  # nothing was computed here, or nothing for the first of them
            self._result = self.pool.take()
            self._result.complete()
            self._roots[:1] = [self._result] if self._roots else []

    def _launch(self, bucket: int) -> None:
        """A bucket is complete here: make the partial sums whole and send them. Also called from inside backward."""
        assert self._merges is not None
        assert self._result is not None
        for left, right in self._merges:
            left.flats[bucket].add_(right.flats[bucket])
        if self.wire is not None:
            # .data has a version of its own: what is written from here on is not taken for the loop's doing
            roots = [None if root is None else root.flats[bucket].data for root in self._roots]
            self.wire.send(bucket, roots, self._result.flats[bucket].data)


IN_FLIGHT = 2
"""Buckets whose partial sums are on their way at the same time: one is added up while the other travels."""


class _Wire:
    """The messages of every bucket for one placement, and the sums over what they bring.

    All processes post the same messages in the same order: the partial sums of bucket 0, of bucket 1, the sum of bucket
    0, the partial sums of bucket 2, the sum of bucket 1, and so on; with those of bucket 0 go the weights to divide by.
    """

    def __init__(self, plan: Plan, layout: Layout, group: Group) -> None:
        self.plan, self.rank, self.buckets = plan, group.rank, layout.buckets
        self.others = [(group.rank + i) % plan.size for i in range(1, plan.size)]
        self.holders = [rank for rank in range(plan.size) for _ in plan.sends(rank)]  # of the partial sums, in order
        self.additions = plan.additions()
        foreign = len(self.holders) - len(plan.sends(group.rank))
        self.arrived: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        for number, b in enumerate(layout.buckets):
            room, needed = (number % IN_FLIGHT, b.dtype, b.device), foreign * (b.size // plan.size)
            if room not in self.arrived or self.arrived[room].numel() < needed:
                self.arrived[room] = torch.empty(needed, dtype=b.dtype, device=b.device)
        self.foreign = foreign
        self.row = torch.zeros(plan.leaves, dtype=torch.float64, device=group.device)

    def begin(self, weights: Weights) -> None:
        self.weights = weights
        self.divisor: torch.Tensor | None = None
        self.sent: list[tuple[list[torch.Tensor], torch.Tensor, list[Work]]] = []  # parts, where their sum goes
        self.settled = 0  # buckets whose sum is made
        self.finite: list[torch.Tensor] = []  # has a block of what we made a finite sum?
        self.results: list[torch.Tensor] = []  # our chunk of every bucket
        self.works: list[Work] = []

    def send(self, bucket: int, roots: Sequence[torch.Tensor | None], result: torch.Tensor) -> None:
        """Everybody gets their chunk of each of our partial sums; our chunk of everybody's is on its way to us.

        `result` is where their sum is gathered: our first partial sum, of which others have their chunk before they
        send us what belongs there.
        """
        if bucket >= IN_FLIGHT:
            self._settle()
        about, size = self.buckets[bucket], self.plan.size
        chunk = about.size // size
        room = self.arrived[bucket % IN_FLIGHT, about.dtype, about.device][: self.foreign * chunk]
        mine = [room.new_zeros(size, chunk) if root is None else root.view(size, -1) for root in roots]
        ours, theirs = iter(mine), iter(room.view(self.foreign, chunk))
        parts = [next(ours)[self.rank] if holder == self.rank else next(theirs) for holder in self.holders]
        sends = [Message(root[other], other) for other in self.others for root in mine]
        receives = [Message(part, h) for part, h in zip(parts, self.holders, strict=True) if h != self.rank]
        if bucket == 0:
            rows = [self.row[slice(*span)] for span in self.plan.spans]
            rows[self.rank].copy_(self.weights())
            sends += [Message(rows[self.rank], other) for other in self.others]
            receives += [Message(rows[other], other) for other in self.others]
        self.sent.append((parts, result.view(size, -1), send_and_receive(sends, receives)))

    def finish(self) -> bool:
        """The sums are where `send` was told to put them; is all that we made of them finite?"""
        while self.settled < len(self.sent):
            self._settle()
        for work in self.works:
            work.wait()
        self.sent, self.works = [], []  # gloo's hold its connections: a forked loader worker would close them, and hang
        return bool(torch.stack(self.finite).all()) or all(map(finite, self.results))

    def _settle(self) -> None:
        """Of the oldest bucket under way: wait for its partial sums, add them up, send our chunk of it to everybody."""
        parts, chunks, works = self.sent[self.settled]
        self.settled += 1
        for work in works:
            work.wait()
        if self.divisor is None:
            self.divisor = reduce(torch.add, self.row)
        self._add_up(parts, self.divisor, chunks[self.rank])
        self.works += send_and_receive(
            [Message(chunks[self.rank], other) for other in self.others],
            [Message(chunks[other], other) for other in self.others],
        )

    def _add_up(self, parts: list[torch.Tensor], divisor: torch.Tensor, out: torch.Tensor) -> None:
        """The plan's total over the divisor. A block at a time, while that is in the cache."""
        self.results.append(out)
        for stretch in blocks(out):
            block, result = [part[stretch] for part in parts], out[stretch]
            for i, j in self.additions[:-1]:
                block[i].add_(block[j])
            for i, j in self.additions[-1:]:  # the last sum is the total: no need to write it twice
                torch.add(block[i], block[j], out=result).div_(divisor)
            if not self.additions:
                torch.div(block[0], divisor, out=result)
            self.finite.append(torch.isfinite(result.sum()))
