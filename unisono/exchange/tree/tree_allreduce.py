"""Exchange partial sums between processes, bucket by bucket, and add them up in the order of the tree.

Processes on different hosts exchange chunks in messages. Processes on one host (neighbors,
distributed/shared_memory.py) read the chunks in each other's memory, and write the sums there. Their messages say only
where the memory is and when it may be read:

    process 0   [ a0 | a1 ]  "ready"   reads b0, writes m0 here and there   "done"   [ m0 | m1 ]
    process 1   [ b0 | b1 ]  "ready"   reads a1, writes m1 here and there   "done"   [ m0 | m1 ]

With several processes on several hosts both happen, and one process of each host forwards a chunk
(plan/host_routes.py). So a bucket passes four stages:

    announce   tell the neighbors that our partial sums of the bucket are complete
    forward    add up what this host holds of the chunks that we forward, and send the sums to the owners of the chunks
    add up     add up our own chunk, write the total to our memory and the neighbors', and send it to its forwarders
    spread     write the totals that have arrived to the neighbors' memory, and tell them that we are done

Between "ready" and "done", only one process of a host reads and writes chunk c of a bucket. A bucket is used after all
neighbors have said "done"; after a failure, after all processes have said that they have left the step. A process that
is about to add up sets a mark in every memory that it will write to. So its owner knows that a partial sum has been
overwritten, even if the writer dies a moment later.

The stages of a bucket are some buckets apart (`Lags`, staged_allreduce.py).

Where each process is a host of its own, the operations of all messages are built before the last backward (`prepare`),
so an autograd hook that completes a bucket reaches torch's isend through `send` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, PreparedMessages, ProcessGroup, Work, wait_for
from unisono.exchange.buckets import BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.tree.staged_allreduce import StagedAllReduce, add_in_order, routes_of
from unisono.plan.halving import find_halving
from unisono.plan.host_routes import HostRoutes
from unisono.plan.reduction_tree import Plan

IN_FLIGHT = 2
"""Buckets whose partial sums travel at the same time: one is added up while the other travels."""


class Lags(NamedTuple):
    """How many buckets each stage is behind the announcement. Equal on all processes."""

    forward: int
    add_up: int
    spread: int


ALONE = Lags(0, IN_FLIGHT, IN_FLIGHT)
"""Each process is a host of its own."""

TOGETHER = Lags(IN_FLIGHT, IN_FLIGHT, IN_FLIGHT)
"""All processes are on one host: nothing is forwarded."""

MIXED = Lags(1, IN_FLIGHT, IN_FLIGHT + 1)


class _Bucket(NamedTuple):
    """The prepared messages of one bucket."""

    ready: PreparedMessages
    partial_sums: PreparedMessages | None
    """None: they are in memory that neighbors have yet to name."""
    totals: PreparedMessages
    done: PreparedMessages


class TreeAllReduce(StagedAllReduce):
    """Send each chunk directly to its owner, which adds it up and sends the total directly to all.

    Args:
        plan: Which process holds which partial sums.
        layout: The buckets.
        group: The processes that exchange gradients.
    """

    def __init__(self, plan: Plan, layout: BucketLayout, group: ProcessGroup) -> None:
        super().__init__(plan, layout, group)
        self._receive_buffers: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self._use(routes_of(plan, group))
        count = len({*self.routes.hosts})
        self.lags = TOGETHER if count == 1 else ALONE if count == group.size else MIXED
        self.lag = max(self.lags)

    def follow(self, plan: Plan) -> bool:
        """Use another plan from now on. Return False if halving (halving_allreduce.py) has fewer messages for it."""
        routes = routes_of(plan, self.group)
        if find_halving(routes) is not None:
            return False
        self.stream.join()
        self._use(routes)
        return True

    def _use(self, routes: HostRoutes) -> None:
        self.routes, self.plan, plan, layout = routes, routes.plan, routes.plan, self.layout
        self.memory.follow(plan, routes.chunks)
        received = sum(map(len, routes.received.values()))  # partial sums that arrive in messages
        for number, b in enumerate(layout.buckets):
            key, needed = (number % IN_FLIGHT, b.dtype, b.device), received * self.memory.chunk_length(number)
            if key not in self._receive_buffers or self._receive_buffers[key].numel() < needed:
                self._receive_buffers[key] = torch.empty(needed, dtype=b.dtype, device=b.device)
        spans = {host: [plan.spans[rank] for rank in routes.ranks_on(host)] for host in routes.hosts}
        # the weights of the virtual ranks of each host, in the order of its ranks
        self._weights_on = {host: self.row.new_empty(sum(hi - lo for lo, hi in spans[host])) for host in spans}

    def _forget_works(self) -> None:
        self._buckets: list[_Bucket] = []
        # the messages of each stage, of every bucket that has reached it
        self._announcing: list[list[Work]] = []
        self._forwarded: list[list[Work]] = []
        self._added_up: list[list[Work]] = []
        self._spread: list[list[Work]] = []

    def prepare(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        self.memory.offer(roots, result)
        self._buckets = [self._prepare_bucket(bucket) for bucket in range(len(self.layout.buckets))]

    def _prepare_bucket(self, bucket: int) -> _Bucket:
        routes, neighbors = self.routes, self.memory.neighbors
        done = [Message(self.ready, other) for other in neighbors]
        sends, receives = (done, done) if bucket else self.memory.names()
        if self._carries_weights(bucket):
            rows = [self.row[slice(*span)] for span in self.plan.spans]
            sends = sends + [Message(rows[self.rank], other) for other in neighbors]
            receives = receives + [Message(rows[other], other) for other in neighbors]
        ready = self.group.prepare_messages(sends, receives)
        total = self.memory.total(self.rank, bucket, self.rank)
        sends = [Message(total, routes.forwarder(host, self.rank)) for host in routes.remote_hosts]
        receives = [Message(self.memory.total(self.rank, bucket, chunk), chunk) for chunk in routes.forwarded]
        totals = self.group.prepare_messages(sends, receives)
        partial_sums = None if neighbors else self._prepare_partial_sums(bucket)
        return _Bucket(ready, partial_sums, totals, self.group.prepare_messages(done, done))

    def _prepare_partial_sums(self, bucket: int) -> PreparedMessages:
        """Build the messages with the partial sums of hosts. What the processes of this host hold is added up."""
        routes = self.routes
        pairs, left, _ = routes.on_host(routes.host)
        sends: list[Message] = []
        for chunk in routes.forwarded:
            terms = self._terms(bucket, chunk)
            add_in_order(terms, pairs)
            sends += [Message(terms[i], chunk) for i in left]
        receives = [
            Message(part, routes.forwarder(host, self.rank))
            for host, parts in self._received(bucket).items()
            for part in parts
        ]
        if self._carries_weights(bucket):
            sends += [Message(self._weights_on[routes.host], chunk) for chunk in routes.forwarded]
            receives += [
                Message(self._weights_on[host], routes.forwarder(host, self.rank)) for host in routes.remote_hosts
            ]
        return self.group.prepare_messages(sends, receives)

    def _terms(self, bucket: int, chunk: int) -> list[torch.Tensor]:
        """Return a chunk of each partial sum on this host."""
        holders = self.routes.holders(self.routes.host)
        return [self.memory.partial_sum(rank, index, bucket, chunk) for rank, index in holders]

    def _received(self, bucket: int) -> dict[int, list[torch.Tensor]]:
        """Return where our chunk of each partial sum of other hosts arrives."""
        info = self.layout.buckets[bucket]
        buffer = self._receive_buffers[bucket % IN_FLIGHT, info.dtype, info.device]
        count, length = sum(map(len, self.routes.received.values())), self.memory.chunk_length(bucket)
        rows = iter(buffer[: count * length].view(count, length))
        return {host: [next(rows) for _ in nodes] for host, nodes in self.routes.received.items()}

    def _first_messages(self, bucket: int) -> Sequence[tuple[PreparedMessages, list[list[Work]]]]:
        ready, partial_sums, *_ = self._buckets[bucket]
        if partial_sums is None or self.lags is not ALONE:
            return [(ready, self._announcing)]
        self._fill_weights(bucket)
        return [(ready, self._announcing), (partial_sums, self._forwarded)]

    def _advance(self, bucket: int) -> None:
        for lag, reach in zip(self.lags, (self._forward, self._add_up, self._spread_totals), strict=True):
            if 0 <= bucket - lag < len(self._announcing):
                reach(bucket - lag)

    def _last_works(self) -> Iterable[Work]:
        return chain.from_iterable((*self._added_up, *self._spread))

    def _fill_weights(self, bucket: int) -> None:
        """Gather the weights of this host, which leave with the first bucket."""
        if self._carries_weights(bucket):
            spans = [self.plan.spans[rank] for rank in self.routes.local]
            torch.cat([self.row[slice(*span)] for span in spans], out=self._weights_on[self.routes.host])

    def _forward(self, bucket: int) -> None:
        wait_for(self._announcing[bucket])
        if bucket == 0 and self.memory.neighbors:
            self.memory.open()
        self._fill_weights(bucket)
        messages = self._buckets[bucket].partial_sums or self._prepare_partial_sums(bucket)
        self._forwarded.append(messages.wrap([start() for start in messages.starts]))

    def _add_up(self, bucket: int) -> None:
        wait_for(self._forwarded[bucket])
        if bucket == 0 and not self.memory.neighbors:
            self.memory.open()
        if self.divisor is None:
            self.divisor = self._total_weight()
        terms = self._terms(bucket, self.rank)
        for parts in self._received(bucket).values():
            terms += parts
        ranks = (self.rank, *self.memory.neighbors)
        totals = [self.memory.total(rank, bucket, self.rank) for rank in ranks]
        self._reduce_in_order(terms, self.routes.additions, self.divisor, totals)
        messages = self._buckets[bucket].totals
        self._added_up.append(messages.wrap([start() for start in messages.starts]))

    def _spread_totals(self, bucket: int) -> None:
        if not self.memory.neighbors:
            return
        if self.routes.forwarded:
            wait_for(self._added_up[bucket])
            self._added_up[bucket] = []  # to wait twice for a message of gloo would be to wait for the next one
        for chunk in self.routes.forwarded:
            total = self.memory.total(self.rank, bucket, chunk)
            for rank in self.memory.neighbors:
                self.memory.total(rank, bucket, chunk).copy_(total)
        done = self._buckets[bucket].done
        self._spread.append(done.wrap([start() for start in done.starts]))

    def _total_weight(self) -> torch.Tensor:
        for host in self.routes.remote_hosts:
            spans = [self.plan.spans[rank] for rank in self.routes.ranks_on(host)]
            weights = self._weights_on[host].split([hi - lo for lo, hi in spans])
            for span, part in zip(spans, weights, strict=True):
                self.row[slice(*span)].copy_(part)
        return super()._total_weight()
