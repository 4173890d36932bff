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
from unisono.exchange.buckets import Copy, Layout, Loose, Pool, Readiness, blocks, divide_, finite
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
        self.ready = Readiness(self.layout, self._launch, self._merge)
        self.wire: _Wire | None = None
        self._fold: Fold[Part] = Fold(virtual_ranks, _where)
        self._current: tuple[Node, Copy | Loose] | None = None  # the leaf that backward is filling
        self._to_come = 0  # micro-batches that are still to come for it
        self._merges: list[tuple[Copy | Loose, Loose]] = []  # what is to be added once it is complete
        self._merged: list[bool] = []  # for which parameters that is done
        self._roots: list[Copy | None] | None = None  # the partial sums of this process, in order; None: all zeros
        self._result: Copy | None = None

    def begin(self, spans: Sequence[tuple[int, int]], pieces: Mapping[int, int], weights: Weights) -> None:
        """A step begins: this process holds spans[rank]; virtual rank v of it has pieces[v] micro-batches (maybe 0)."""
        plan = Plan(self.virtual_ranks, tuple(spans))
        self.pieces = pieces
        self.span = plan.spans[self.group.rank]
        # what is leftmost of a partial sum will travel; all the others are only added to it
        self._travel = {next((v for v in range(*n) if pieces[v]), -1) for n in plan.sends(self.group.rank)}
        self._fold, self._current, self._roots = Fold(self.virtual_ranks, _where), None, None
        self.ready.begin()
        if self.group.size > 1 and (self.wire is None or self.wire.plan != plan):
            self.wire = _Wire(plan, self.layout, self.group)
        if self.wire is not None:
            self.wire.begin(weights)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        """Before a micro-batch: p.grad is where its gradient belongs. `last`: no other follows here in this step."""
        if self._current is None:
            self._skip_to(virtual_rank)
            self._current = self._open(virtual_rank)
            self._to_come = self.pieces[virtual_rank]
        self._to_come -= 1
        if not self._to_come:
            self._plan(self._current, last=last)
        folds = not self._to_come and bool(self._merges)
        self.ready.enter(self._current[1], tell=folds, last=last and self.group.size > 1)

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
            self._current = None

    def launch(self) -> None:
        """Send what has not been sent yet."""
        if self._roots is None:
            self._plan(None, last=True)
        for root in self._roots or []:
            if root is not None:
                root.complete()  # parameters that nobody used here count as zeros
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
        self.pool.give(root for root in self._roots or [] if root is not None and root is not self._result)
        self._roots = []

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

    def _skip_to(self, virtual_rank: int) -> None:
        """Virtual ranks between the last one that had something to do and this one had nothing."""
        for nothing in range(self._reached(), virtual_rank):
            self._fold.push(Node(nothing, nothing + 1), None)

    def _reached(self) -> int:
        return self._fold.held[-1][0].hi if self._fold.held else self.span[0]

    def _open(self, virtual_rank: int) -> tuple[Node, Copy | Loose]:
        """Where the leaf of `virtual_rank` is gathered. The second of a pair, if it is one micro-batch (and no
        layer adds to it twice), goes straight into the first: (first) + g is the very addition the tree makes there."""
        leaf = Node(virtual_rank, virtual_rank + 1)
        if self._fold.held and self.pieces[virtual_rank] == 1 and max(self.ready.expected) < 2:
            node, value = self._fold.held[-1]
            pair = parent(self.virtual_ranks, node, leaf)
            if pair is not None and node.hi - node.lo == 1 and value is not None:
                self._fold.held.pop()
                return pair, value
        return leaf, self.pool.take() if virtual_rank in self._travel else Loose(self.layout)

    def _plan(self, leaf: tuple[Node, Copy | Loose] | None, *, last: bool) -> None:
        """What is to be added once `leaf` is complete; with `last` also the partial sums that this leaves."""
        self._merges, self._merged = [], [False] * len(self.params)

        def note(left: Part, right: Part) -> Part:
            if left is not None and right is not None:
                assert isinstance(right, Loose), "it was to travel"
                self._merges.append((left, right))
            return _where(left, right)

        end = Fold(self.virtual_ranks, note)
        end.held = list(self._fold.held)
        if leaf is not None:
            end.push(*leaf)
        if not last:
            return
        for nothing in range(end.held[-1][0].hi if end.held else self.span[0], self.span[1]):
            end.push(Node(nothing, nothing + 1), None)
        self._roots = []
        becoming = leaf and (self._merges[-1][0] if self._merges else leaf[1])
        for _, value in end.held:
            assert not isinstance(value, Loose), "it was not to travel"
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
        if self.wire is not None:
            # .data has a version of its own: what is written from here on is not taken for the loop's doing
            roots = [None if root is None else root.flats[bucket].data for root in self._roots or []]
            self.wire.send(bucket, roots, self._result.flats[bucket].data)


Part = Copy | Loose | None
"""A sum of gradients of this process; None: nobody's, zeros."""


def _where(left: Part, right: Part) -> Part:
    """Where a sum is found when it is made: x + 0 = x, since no sum is ever -0."""
    return right if left is None else left


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
