"""Scatter: the tree over shards. A micro-batch's gradient is taken apart at once, and nobody ever adds up a whole one.

For a model that is gathered layer by layer (parallel/fsdp/fsdp.py): when backward is done with a layer, each process
has the layer's whole gradient of its own micro-batch, and keeps of it nothing but its own chunk of everybody's:

    process 0, micro-batch 0   [ a0 | a1 ] --a1--> 1      holds chunk 0 of the layer:   a0, then b0
    process 1, micro-batch 1   [ b0 | b1 ] --b0--> 0      holds chunk 1 of the layer:   a1, then b1

The processes that share a model's parameters compute the micro-batches of one span in turn (plan/assignment.py), so
the chunks arrive in the order of the tree's leaves, and are folded as they come: the very additions that the exchange
`tree` makes, for one chunk. Whole models beside each other (the axis `replicate`) have spans of their own; their
partial sums of a chunk meet when the step ends, cut once more into a piece for each.

Memory, in gradient copies divided by the number of shards: what plan/reduction_tree.py's `copies` says. While a layer's
gradient travels, it is there twice: made, and arriving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, from_local_like, to_local, wait_for
from unisono.errors import LoopError
from unisono.exchange.base import Exchange, Spans, Weights
from unisono.exchange.buckets import divide_
from unisono.exchange.tree.counted_collectives import CountedCollectives
from unisono.plan.reduction_tree import Fold, Node, Plan

Sum = torch.Tensor | None
"""A sum of chunks; None: of nothing, zeros."""


class Layer(Protocol):
    """What is gathered at once (parallel/fsdp/fsdp.py)."""

    called: str
    params: Sequence[torch.nn.Parameter]
    """The shards of its parameters, in the order in which their gradients are laid out."""
    shapes: Sequence[torch.Size]
    """Of these parameters, as a process has them when they are gathered."""
    used: list[bool]
    """Which of them have taken part in a backward pass since somebody looked."""
    notes: Any
    reduced: int
    """Those who share the parameters tell each other, under this number, that a backward pass is done with it."""

    def reduce_by(self, comm: Any) -> None:
        """Hand gradients to `comm` from now on."""


class PendingSend(NamedTuple):
    """A layer's gradients of one round, under way."""

    chunk: Any
    rows: Sequence[torch.Tensor]
    """Our chunk of everybody's, in the order of their turns."""
    source: torch.Tensor
    note: Any
    works: list[Work]


class Chunk:
    """Our chunk of one layer's gradient. Stands where FSDP2 would reduce and scatter it.

    FSDP2 hands over [processes, length], flat: of each parameter as many rows as torch.chunk gives, and padding.
    """

    def __init__(
        self, layer: Layer, params: Sequence[torch.nn.Parameter], scatter: ReduceScatterTree, size: int
    ) -> None:
        self.layer, self.params, self.scatter, self.size = layer, params, scatter, size
        self.offsets: list[int] = []
        self.length = 0
        shapes = {id(p): shape for p, shape in zip(layer.params, layer.shapes, strict=True)}
        for rows, *others in (shapes[id(p)] for p in params):
            self.offsets.append(self.length)
            self.length += -(-rows // size) * prod(others)
        self.fold: Fold[Sum] = Fold(1, _add)
        self.leaf: Sum = None
        self.rounds = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        """A backward pass is done with the layer. What is put out means nothing: the sum is made when the step ends."""
        assert input_tensor.numel() == self.size * self.length
        if self.scatter.heard is not None:
            self.scatter.heard(self, input_tensor)
        self.scatter.send(self, input_tensor)

    def wholes(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole gradient of each parameter, from what FSDP2 hands over: flat, [processes, length]."""
        rows, found = flat.view(self.size, self.length), []
        shapes = {id(p): shape for p, shape in zip(self.layer.params, self.layer.shapes, strict=True)}
        for p, offset in zip(self.params, self.offsets, strict=True):
            shape = shapes[id(p)]
            each = -(-shape[0] // self.size) * prod(shape[1:])
            found.append(rows[:, offset : offset + each].reshape(-1)[: prod(shape)].view(shape))
        return found

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A chunk as gradients, one for each parameter."""
        found: list[torch.Tensor] = []
        for p, offset in zip(self.params, self.offsets, strict=True):
            shard = to_local(p)
            mine = flat[offset : offset + shard.numel()].view(shard.shape).to(shard.device)
            found.append(from_local_like(mine, p))
        return found


class NoReduce(Chunk):
    """A layer that a pass is not for: its gradient is nobody's."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        pass


class ReduceScatterTree(Exchange):
    """`group`: those that hold the same shards, each with a span of its own; `shard`: those that share one model."""

    promise = "exact"
    reason = "one fixed tree adds the gradients of the virtual ranks, chunk by chunk, wherever they were computed"
    heard: Callable[[Chunk, torch.Tensor], None] | None = None
    """Called with every whole gradient of a layer, in a step that is verified."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        virtual_ranks: int,
        group: ProcessGroup,
        *,
        shard: ProcessGroup,
        layers: Sequence[Layer],
    ) -> None:
        self.params, self.virtual_ranks, self.group, self.shard = params, virtual_ranks, group, shard
        ours = set(map(id, params))
        self.chunks: list[Chunk] = []
        self.dropped: list[Chunk] = []
        for layer in layers:
            trained = [p for p in layer.params if p.requires_grad]
            if any(id(p) in ours for p in trained):
                self.chunks.append(Chunk(layer, trained, self, shard.size))
            else:
                self.dropped.append(NoReduce(layer, trained, self, shard.size))
        of_layers = [p for chunk in (*self.chunks, *self.dropped) for p in chunk.params]
        self._others = [p for p in of_layers if id(p) not in ours]  # that train, but not by this exchange
        self._sent: PendingSend | None = None

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """A step begins: we and those who share our model compute the span of our place in the group."""
        self.plan = Plan(self.virtual_ranks, tuple(spans))
        self.span = self.plan.spans[self.group.rank]
        self.pieces = pieces
        self.places = [(v, n) for v in range(*self.span) for n in range(pieces[v])]
        self.round, self._bytes, self.post = -1, 0, CountedCollectives(self.group)
        for chunk in self.chunks:
            chunk.fold, chunk.leaf, chunk.rounds = Fold(self.virtual_ranks, _add, self.span[0]), None, 0
            chunk.layer.used[:] = [False] * len(chunk.layer.used)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self.round += 1
        self._waiting = [p.grad for p in self._others]  # whole, of another pass: FSDP2 would add to it
        for p in self._others:
            p.grad = None
        for chunk in [*self.chunks, *self.dropped]:
            chunk.layer.reduce_by(chunk)

    def leave(self) -> None:
        self.shard.attempt(self._settle)
        for p in self.params:
            p.grad = None  # what FSDP2 makes of the nothing that we put out
        for p, grad in zip(self._others, self._waiting, strict=True):
            p.grad = grad

    def send(self, chunk: Chunk, gradient: torch.Tensor) -> None:
        """Everybody gets their chunk of our gradient, unless it is a spare one; ours of theirs is on its way to us.
        While it travels, the one before it is added up, and backward goes on."""
        if chunk.rounds > self.round:
            raise LoopError(
                f"{chunk.layer.called} was called twice in one forward pass.",
                "With parallel.reshard=layer its gradient leaves when backward is first done with it.",
                "--set parallel.reshard=step, or let the part of the model that repeats it be the layer: "
                "--set 'parallel.layer_classes=[\"...\"]'",
            )
        chunk.rounds += 1
        self.shard.attempt(lambda: self._send(chunk, gradient))

    def _send(self, chunk: Chunk, gradient: torch.Tensor) -> None:
        self._settle()
        rows = gradient.view(self.shard.size, chunk.length)
        rank, others = self.shard.rank, [r for r in range(self.shard.size) if r != self.shard.rank]
        present = min(self.shard.size, len(self.places) - self.round * self.shard.size)
        room = iter(rows.new_empty(present - (rank < present), chunk.length))
        ours = [rows[rank] if turn == rank else next(room) for turn in range(present)]
        sends = [Message(rows[other], other) for other in others if rank < present]
        self._bytes += sum(message.tensor.nbytes for message in sends)
        receives = [Message(ours[turn], turn) for turn in range(present) if turn != rank]
        note = chunk.layer.notes.write(chunk.layer.reduced)
        works = self.shard.send_and_receive(sends, receives, tag=chunk.layer.reduced)
        self._sent = PendingSend(chunk, ours, gradient, note, works)

    def _settle(self) -> None:
        """What is under way arrives, and is folded."""
        if self._sent is None:
            return
        (chunk, rows, _, note, works), self._sent = self._sent, None
        chunk.layer.notes.read(note)
        wait_for(works)
        first = self.round * self.shard.size
        for (virtual_rank, number), row in zip(self.places[first:], rows, strict=False):
            if number == 0:
                chunk.fold.skip_to(virtual_rank, None)
                chunk.leaf = row + 0.0  # its own memory; and -0 becomes +0, as everywhere (buckets.py)
            else:
                assert chunk.leaf is not None
                chunk.leaf.add_(row)
            if number + 1 == self.pieces[virtual_rank]:
                chunk.fold.push(Node(virtual_rank, virtual_rank + 1), chunk.leaf)
                chunk.leaf = None

    def finish(self, weight: float) -> bool:
        whole = True
        ours = set(map(id, self.params))
        for chunk in self.chunks:
            total = self._total(chunk)
            whole &= divide_(total, weight)
            for p, grad in zip(chunk.params, chunk.views(total), strict=True):
                if id(p) in ours:
                    p.grad = grad
        return whole

    def _total(self, chunk: Chunk) -> torch.Tensor:
        """The sum over all virtual ranks: our partial sums meet those of the others who hold this very chunk."""
        chunk.fold.skip_to(self.span[1], None)
        like = torch.empty(0, dtype=chunk.params[0].dtype, device=self.shard.device)
        roots = [like.new_zeros(chunk.length) if held is None else held for _, held in chunk.fold.held]
        chunk.fold.held = []
        return self.post.add_up(self.plan, roots, like.new_empty(chunk.length))

    @property
    def used(self) -> Sequence[bool]:
        """Which parameters took part in a backward of this step, on this process, in a micro-batch that counts."""
        known = {
            id(p): was for chunk in self.chunks for p, was in zip(chunk.layer.params, chunk.layer.used, strict=True)
        }
        return [known[id(p)] for p in self.params]

    @property
    def sent(self) -> float:
        return self._bytes + self.post.sent

    @property
    def touched(self) -> bool:
        return False  # what is summed is nowhere the loop could reach

    def close(self) -> None:
        self.zero()
        self._sent = None
        self.chunks = []


def _add(left: Sum, right: Sum) -> Sum:
    """x + 0 = x, since no sum is ever -0."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
