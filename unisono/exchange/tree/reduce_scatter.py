"""The tree exchange over shards: a micro-batch's gradient is scattered at once, and no process adds up a whole one.

It is for a model that is gathered layer by layer (parallel/fsdp/fsdp.py). When backward is done with a layer, each
process has the layer's whole gradient of its own micro-batch. It keeps its own chunk, and receives the same chunk of
every other process:

    process 0, micro-batch 0   [ a0 | a1 ] --a1--> 1      holds chunk 0 of the layer:   a0, then b0
    process 1, micro-batch 1   [ b0 | b1 ] --b0--> 0      holds chunk 1 of the layer:   a1, then b1

The processes that share a model's parameters compute the micro-batches of one span in turn (plan/assignment.py). So the
chunks arrive in the order of the tree's leaves and are folded as they arrive, with the additions that the exchange
`tree` makes. Replicas (the axis `replicate`) have spans of their own; their partial sums of a chunk are exchanged when
the step ends, cut once more into a piece for each replica.

Memory, in gradient copies divided by the number of shards: `copies` of plan/reduction_tree.py. While a layer's gradient
travels it is in memory twice, at the sender and at the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, from_local_like, to_local, wait_for
from unisono.errors import LoopError
from unisono.exchange.base import Exchange, Spans, Weights
from unisono.exchange.kernels.elementwise import divide_
from unisono.exchange.tree.counted_collectives import CountedCollectives
from unisono.plan.reduction_tree import Fold, Node, Plan

Sum = torch.Tensor | None
"""A sum of chunks; None: zeros."""


class Layer(Protocol):
    """A layer whose parameters are gathered together (parallel/fsdp/fsdp.py).

    Attributes:
        label: Its name in messages.
        params: The shards of its parameters, in the order in which their gradients are laid out.
        shapes: The shapes of its parameters as they are gathered on this process.
        used: Which parameters took part in a backward pass since the flags were cleared.
        gather_order: Checks that the processes that share the parameters gather and reduce the same layer.
        reduce_number: The number under which `gather_order` knows that the layer's gradient leaves.
    """

    label: str
    params: Sequence[torch.nn.Parameter]
    shapes: Sequence[torch.Size]
    used: list[bool]
    gather_order: Any
    reduce_number: int

    def set_reduce_scatter(self, comm: Any) -> None:
        """Pass gradients to `comm` from now on."""


class PendingChunks(NamedTuple):
    """The gradients of one layer from one micro-batch of each process, while they travel."""

    reducer: ChunkReducer
    rows: Sequence[torch.Tensor]
    """Our chunk of each process's gradient, in the order of their micro-batches."""
    source: torch.Tensor
    """Our gradient, which must stay in memory until it is sent."""
    record: Any
    works: list[Work]


class ChunkReducer:
    """Fold our chunk of one layer's gradient. FSDP2 calls it in place of its reduce-scatter.

    FSDP2 passes a flat tensor [processes, length]: of each parameter the rows that torch.chunk gives, with padding.
    """

    def __init__(
        self, layer: Layer, params: Sequence[torch.nn.Parameter], exchange: ReduceScatterTree, size: int
    ) -> None:
        self.layer, self.params, self.exchange, self.size = layer, params, exchange, size
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
        """Take the layer's gradient. `output_tensor` is left as it is: the sum is made when the step ends."""
        assert input_tensor.numel() == self.size * self.length
        exchange = self.exchange
        if exchange.on_gradient is not None:
            exchange.on_gradient(self, input_tensor)
        if self.rounds > exchange.round:
            raise LoopError(
                f"{self.layer.label} was called twice in one forward pass.",
                "With parallel.reshard=layer its gradient leaves when backward is first done with it.",
                "--set parallel.reshard=step, or let the part of the model that repeats it be the layer: "
                "--set 'parallel.layer_classes=[\"...\"]'",
            )
        self.rounds += 1
        exchange.shard.attempt(lambda: exchange.send(self, input_tensor))

    def full_gradients(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole gradient of each parameter from what FSDP2 passes: flat, [processes, length]."""
        rows, found = flat.view(self.size, self.length), []
        shapes = {id(p): shape for p, shape in zip(self.layer.params, self.layer.shapes, strict=True)}
        for p, offset in zip(self.params, self.offsets, strict=True):
            shape = shapes[id(p)]
            length = -(-shape[0] // self.size) * prod(shape[1:])
            found.append(rows[:, offset : offset + length].reshape(-1)[: prod(shape)].view(shape))
        return found

    def shard_gradients(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradient of each parameter's shard from a chunk, as DTensors."""
        found: list[torch.Tensor] = []
        for p, offset in zip(self.params, self.offsets, strict=True):
            shard = to_local(p)
            part = flat[offset : offset + shard.numel()].view(shard.shape).to(shard.device)
            found.append(from_local_like(part, p))
        return found


class NoReduce(ChunkReducer):
    """Drop the gradient of a layer that the pass does not train."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        pass


class ReduceScatterTree(Exchange):
    """Average gradients of a model whose layers are gathered one by one.

    Args:
        params: The shards of the parameters.
        virtual_ranks: The number of leaves of the tree.
        group: The processes that hold the same shards, each with a span of its own.
        shard: The processes that share one model.
        layers: The layers that are gathered.
    """

    promise = "exact"
    reason = "one fixed tree adds the gradients of the virtual ranks, chunk by chunk, wherever they were computed"
    on_gradient: Callable[[ChunkReducer, torch.Tensor], None] | None = None
    """Called with each whole gradient of a layer, in a step that is verified."""

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
        own = set(map(id, params))
        self.reducers: list[ChunkReducer] = []
        self.dropped: list[ChunkReducer] = []
        for layer in layers:
            trained = [p for p in layer.params if p.requires_grad]
            if any(id(p) in own for p in trained):
                self.reducers.append(ChunkReducer(layer, trained, self, shard.size))
            else:
                self.dropped.append(NoReduce(layer, trained, self, shard.size))
        of_layers = [p for reducer in (*self.reducers, *self.dropped) for p in reducer.params]
        self._others = [p for p in of_layers if id(p) not in own]  # they train, but not in this pass
        self._pending: PendingChunks | None = None

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """Begin a step. The processes that share our model compute spans[rank in group] together."""
        self.plan = Plan(self.virtual_ranks, tuple(spans))
        self.span = self.plan.spans[self.group.rank]
        self.pieces = pieces
        self.micro_batches = [(v, n) for v in range(*self.span) for n in range(pieces[v])]
        self.round, self._bytes, self.collectives = -1, 0, CountedCollectives(self.group)
        for reducer in self.reducers:
            reducer.fold, reducer.leaf, reducer.rounds = Fold(self.virtual_ranks, _add, self.span[0]), None, 0
            reducer.layer.used[:] = [False] * len(reducer.layer.used)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self.round += 1
        self._others_grads = [p.grad for p in self._others]  # of another pass: FSDP2 would add to them
        for p in self._others:
            p.grad = None
        for reducer in [*self.reducers, *self.dropped]:
            reducer.layer.set_reduce_scatter(reducer)

    def leave(self) -> None:
        self.shard.attempt(self._fold_pending)
        for p in self.params:
            p.grad = None  # FSDP2 has made it of the output that is left as it was
        for p, grad in zip(self._others, self._others_grads, strict=True):
            p.grad = grad

    def send(self, reducer: ChunkReducer, gradient: torch.Tensor) -> None:
        """Start to send each process its chunk of a layer's gradient, and to receive our chunk of theirs.

        A spare micro-batch, which only fills up the last round, sends nothing. While the chunks travel, the previous
        ones are folded, and backward continues.
        """
        self._fold_pending()
        rows = gradient.view(self.shard.size, reducer.length)
        rank, others = self.shard.rank, [r for r in range(self.shard.size) if r != self.shard.rank]
        present = min(self.shard.size, len(self.micro_batches) - self.round * self.shard.size)
        buffers = iter(rows.new_empty(present - (rank < present), reducer.length))
        own = [rows[rank] if turn == rank else next(buffers) for turn in range(present)]
        sends = [Message(rows[other], other) for other in others if rank < present]
        self._bytes += sum(message.tensor.nbytes for message in sends)
        receives = [Message(own[turn], turn) for turn in range(present) if turn != rank]
        number = reducer.layer.reduce_number
        record = reducer.layer.gather_order.announce(number)
        works = self.shard.send_and_receive(sends, receives, tag=number)
        self._pending = PendingChunks(reducer, own, gradient, record, works)

    def _fold_pending(self) -> None:
        """Wait for the chunks that travel, and fold them."""
        if self._pending is None:
            return
        (reducer, rows, _, record, works), self._pending = self._pending, None
        reducer.layer.gather_order.check(record)
        wait_for(works)
        first = self.round * self.shard.size
        for (virtual_rank, number), row in zip(self.micro_batches[first:], rows, strict=False):
            if number == 0:
                reducer.fold.skip_to(virtual_rank, None)
                reducer.leaf = row + 0.0  # memory of its own; and -0 becomes +0, as in buckets.py
            else:
                assert reducer.leaf is not None
                reducer.leaf.add_(row)
            if number + 1 == self.pieces[virtual_rank]:
                reducer.fold.push(Node(virtual_rank, virtual_rank + 1), reducer.leaf)
                reducer.leaf = None

    def finish(self, weight: float) -> bool:
        own = set(map(id, self.params))
        totals = [self._total(reducer) for reducer in self.reducers]
        is_finite = divide_(totals, weight)
        for reducer, total in zip(self.reducers, totals, strict=True):
            for p, grad in zip(reducer.params, reducer.shard_gradients(total), strict=True):
                if id(p) in own:
                    p.grad = grad
        return is_finite

    def _total(self, reducer: ChunkReducer) -> torch.Tensor:
        """Return our chunk of the sum over all virtual ranks, from the partial sums of all replicas."""
        reducer.fold.skip_to(self.span[1], None)
        like = torch.empty(0, dtype=reducer.params[0].dtype, device=self.shard.device)
        roots = [like.new_zeros(reducer.length) if held is None else held for _, held in reducer.fold.held]
        reducer.fold.held = []
        return self.collectives.reduce_by_plan(self.plan, roots, like.new_empty(reducer.length))

    @property
    def used(self) -> Sequence[bool]:
        """Which parameters took part in a backward of this step on this process, spare micro-batches left out."""
        known = {
            id(p): was
            for reducer in self.reducers
            for p, was in zip(reducer.layer.params, reducer.layer.used, strict=True)
        }
        return [known[id(p)] for p in self.params]

    @property
    def sent(self) -> float:
        return self._bytes + self.collectives.sent

    @property
    def touched(self) -> bool:
        return False  # the loop cannot reach the memory of the sums

    def close(self) -> None:
        self.zero()
        self._pending = None
        self.reducers = []


def _add(left: Sum, right: Sum) -> Sum:
    """Add two sums: x + 0 = x, since no sum is ever -0."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
