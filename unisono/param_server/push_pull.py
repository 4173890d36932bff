"""Synchronous parameter servers: workers push gradients and pull parameters; servers have the optimizer.

Servers compute no gradients (distributed/roles.py). They divide the parameters among themselves, whole ones. Each
server adds up the mean gradient of its parameters, steps the optimizer, and sends the new parameters. Two workers, two
servers, parameters p and q:

    worker 2  v0 .. v3  --push: its partial sums of p------->  server 0  ((v0..v3) + (v4..v7)) / weight = p.grad
                        --push: ... of q-------.     .------>            optimizer.step: p
    worker 3  v4 .. v7  --push: ... of p-------|-----'
                        --push: ... of q-------'------------>  server 1  the same for q

              p         <--pull: after the update------------  server 0  (to the other servers as well)
              q         <--pull-----------------------------   server 1

Virtual ranks are assigned to the workers only. Workers send the partial sums of the tree (tree_exchange.py), bucket by
bucket, while the last backward still runs. A server adds them up in the order of the tree, in whatever order they
arrive. So the bits are those of exchange=tree, on any number of workers and servers.

The gradient is on the process with the optimizer: after the rounds `p.grad` is the mean gradient on the server that
holds p, and None elsewhere. torch's optimizers skip a parameter without a gradient. So a worker's `optimizer.step()`
does nothing and keeps no state. The pull sends it the new parameters when the gradient is released (`zero`).

Traffic, for workers that hold r partial sums each: a server receives its share of r gradients from every worker, and
sends its share of the model to all processes. With W workers, the connection of a single server carries W (r + 1)
models a step; an all-reduce needs 2 (W - 1) / W on each connection. Several servers share that traffic, but synchronous
servers are still not faster. They have another purpose: one place for the state of the optimizer, and asynchronous
training (param_server/async_run.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, Work, wait_for, wrap_peer_errors
from unisono.distributed.roles import RoleGroup
from unisono.exchange.base import Weights
from unisono.exchange.buckets import BucketLayout, blocks
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.kernels.elementwise import divide_
from unisono.exchange.kernels.exchange_stream import ExchangeStream
from unisono.exchange.tree.tree_allreduce import IN_FLIGHT
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.plan.reduction_tree import Plan
from unisono.tensors.flat import FlatTensors
from unisono.tensors.spec import TensorSpec


class ParameterServerExchange(TreeExchange):
    """Push and pull among servers and workers. A process by itself is its own server: then it uses the tree."""

    promise = "exact"
    reason = "servers add the gradients of the virtual ranks in one fixed tree, wherever they were computed"

    _stepped = False
    """Whether optimizers may have used a gradient, and so may have changed parameters."""

    @property
    def crew(self) -> RoleGroup | None:
        return self.group if isinstance(self.group, RoleGroup) else None

    def _build_layout(self, most_bytes: int) -> BucketLayout:
        """Build buckets that one server holds as a whole."""
        if self.crew is None:
            return super()._build_layout(most_bytes)
        holders = [self.crew.shares.of(p) for p in self.params]
        layout = BucketLayout(self.params, 1, holders=holders)
        self.holders = [holders[bucket.members[0]] for bucket in layout.buckets]
        """The server of each bucket."""
        return layout

    def _build_transport(self, plan: Plan) -> PushTransport:
        assert self.crew is not None
        return PushTransport(plan, self.layout, self.crew, self.holders)

    def finish(self, weight: float) -> bool:
        if self.crew is None:
            return super().finish(weight)
        assert self._result is not None
        self.transport.finish()
        held = zip(self._result.flats, self.holders, strict=True)
        whole = divide_([flat for flat, holder in held if holder == self.crew.rank], weight)
        self._result.assign_gradients(self.params)
        for number, p in enumerate(self.params):
            if self.holders[self.layout.bucket_of[number]] != self.crew.rank:
                p.grad = None
        return whole

    def commit(self) -> None:
        super().commit()
        self._stepped = True

    def zero(self) -> None:
        """Send the parameters from the servers that hold them to all processes, after the optimizers have stepped."""
        super().zero()
        stepped, self._stepped = self._stepped, False
        if stepped and self.crew is not None:
            with wrap_peer_errors("The pull of new parameters"), torch.no_grad():
                self._pull(self.crew)

    def close(self) -> None:
        self._stepped = False
        super().close()

    def _pull(self, crew: RoleGroup) -> None:
        """Send each bucket's parameters, as bytes: a parameter may have another dtype than its gradient."""
        sends: list[Message] = []
        receives: list[Message] = []
        theirs: list[tuple[list[torch.nn.Parameter], FlatTensors]] = []
        for bucket, holder in zip(self.layout.buckets, self.holders, strict=True):
            params = [self.params[number] for number in bucket.members]
            if holder == crew.rank:
                flat = FlatTensors.copy_of(params, bucket.device)
                sends += [Message(flat.data, other) for other in range(crew.size) if other != crew.rank]
            else:
                flat = FlatTensors.empty([TensorSpec.of(p) for p in params], bucket.device)
                receives.append(Message(flat.data, holder))
                theirs.append((params, flat))
        wait_for(crew.send_and_receive(sends, receives))
        for params, flat in theirs:
            for p, value in zip(params, flat.views(), strict=True):
                p.copy_(value)


class _PendingPush(NamedTuple):
    """A bucket whose partial sums are being sent to this server."""

    parts: Sequence[torch.Tensor]  # in the order of the plan's arrivals
    total: torch.Tensor  # the memory for their sum
    works: list[Work]


class PushTransport:
    """The messages of every bucket for one placement: each worker sends to the server that holds the bucket."""

    def __init__(self, plan: Plan, layout: BucketLayout, crew: RoleGroup, holders: Sequence[int]) -> None:
        self.layout, self.crew, self.holders = layout, crew, holders
        self.stream = ExchangeStream([torch.device("cpu")])  # messages and additions are on the loop's stream
        self.room: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self.follow(plan)

    def follow(self, plan: Plan) -> bool:
        """Use another plan of partial sums from now on. Return True: this works for any plan."""
        self.plan, layout, crew = plan, self.layout, self.crew
        self.senders = [rank for rank in range(plan.size) for _ in plan.sends(rank)]  # of partial sums, in order
        self.additions = plan.additions()
        held = [b for b, holder in zip(layout.buckets, self.holders, strict=True) if holder == crew.rank]
        for number, b in enumerate(held):
            room, needed = (number % IN_FLIGHT, b.dtype, b.device), len(self.senders) * b.size
            if room not in self.room or self.room[room].numel() < needed:
                self.room[room] = torch.empty(needed, dtype=b.dtype, device=b.device)
        return True

    def begin(self, weights: Weights, divisor: torch.Tensor | None = None) -> None:
        """Begin a step. The weights are not needed: all processes have them when the step divides."""
        self.works: list[Work] = []
        self.kept: list[torch.Tensor] = []  # tensors that are still being sent
        self.coming: deque[_PendingPush] = deque()
        self.count = 0

    def prepare(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        """Set the partial sums of this process, and the memory for their sum, before the first `send` of a step."""
        self.roots, self.result = roots, result

    def send(self, bucket: int) -> None:
        """Start to send a worker's partial sums of a bucket, or to receive all of them on the server that holds it."""
        roots, result = self.roots, self.result
        about, holder = self.layout.buckets[bucket], self.holders[bucket]
        if holder != self.crew.rank:
            # .data has a version counter of its own; a partial sum of no virtual rank is zeros
            parts = [torch.zeros_like(result.flats[bucket]) if r is None else r.flats[bucket].data for r in roots]
            self.kept += parts
            self.works += self.crew.send_and_receive([Message(part, holder) for part in parts], [])
            return
        if len(self.coming) == IN_FLIGHT:
            self._add_up(self.coming.popleft())
        room = self.room[self.count % IN_FLIGHT, about.dtype, about.device]
        parts = list(room[: len(self.senders) * about.size].view(-1, about.size))
        self.count += 1
        receives = [Message(part, sender) for part, sender in zip(parts, self.senders, strict=True)]
        works = self.crew.send_and_receive([], receives)
        self.coming.append(_PendingPush(parts, result.flats[bucket].data, works))

    def finish(self) -> None:
        """Wait until all messages are sent, and add up the buckets of this server."""
        while self.coming:
            self._add_up(self.coming.popleft())
        wait_for(self.works)
        self.works, self.kept = [], []

    def _add_up(self, pushed: _PendingPush) -> None:
        """Add in the tree's order, one block at a time, while the block is in the processor's cache."""
        wait_for(pushed.works)
        for stretch in blocks(pushed.total):
            block = [part[stretch] for part in pushed.parts]
            for i, j in self.additions[:-1]:
                block[i].add_(block[j])
            for i, j in self.additions[-1:]:
                torch.add(block[i], block[j], out=pushed.total[stretch])
            if not self.additions:
                pushed.total[stretch].copy_(block[0])
