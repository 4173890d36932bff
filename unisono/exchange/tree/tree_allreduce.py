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

All processes send the same sequence of messages. The stages of a bucket are some buckets apart (`Lags`): its messages
travel while backward computes and while other buckets are added up. The first messages also carry the weights to divide
by.

Where each process is a host of its own, the operations of all messages are built before the last backward (`prepare`),
so an autograd hook that completes a bucket reaches torch's isend through `send` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch

from unisono.distributed.process_group import Message, PreparedMessages, ProcessGroup, Work, wait_for
from unisono.exchange.base import Weights
from unisono.exchange.buckets import BucketLayout, blocks
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.kernels.device_kernels import kernels_for
from unisono.exchange.kernels.elementwise import are_finite
from unisono.exchange.kernels.exchange_stream import ExchangeStream
from unisono.exchange.tree.host_memory import HostMemory
from unisono.plan.host_routes import HostRoutes, Pairs
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


class TreeAllReduce:
    """Exchange and add up the partial sums of a step under one plan.

    Args:
        plan: Which process holds which partial sums.
        layout: The buckets.
        group: The processes that exchange gradients.
    """

    def __init__(self, plan: Plan, layout: BucketLayout, group: ProcessGroup) -> None:
        self.layout, self.group, self.rank = layout, group, group.rank
        self.hosts = group.hosts or tuple(range(group.size))
        self.memory = HostMemory(layout, group.neighbors, group.rank)
        count = len(set(self.hosts))
        self.lags = TOGETHER if count == 1 else ALONE if count == group.size else MIXED
        self.row = torch.zeros(
            plan.leaves, dtype=torch.float64, device=group.device
        )  # the weights of all virtual ranks
        self.ready = torch.zeros(1, dtype=torch.uint8)  # the content of a "ready" or "done" message, which is not read
        self._receive_buffers: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self._buckets: list[_Bucket] = []
        self.stream = ExchangeStream(bucket.device for bucket in layout.buckets)
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Use another plan from now on."""
        self.stream.join()
        self.plan, layout = plan, self.layout
        self.routes = HostRoutes(plan, self.hosts, self.rank, self.group.links)
        self.memory.follow(self.routes)
        received = sum(map(len, self.routes.received.values()))  # partial sums that arrive in messages
        for number, b in enumerate(layout.buckets):
            key, needed = (number % IN_FLIGHT, b.dtype, b.device), received * self.memory.chunk_length(number)
            if key not in self._receive_buffers or self._receive_buffers[key].numel() < needed:
                self._receive_buffers[key] = torch.empty(needed, dtype=b.dtype, device=b.device)
        spans = {host: [plan.spans[rank] for rank in self.routes.ranks_on(host)] for host in self.hosts}
        # the weights of the virtual ranks of each host, in the order of its ranks
        self._weights_on = {host: self.row.new_empty(sum(hi - lo for lo, hi in spans[host])) for host in spans}

    def begin(self, weights: Weights, divisor: torch.Tensor | None = None) -> None:
        """Begin a step.

        Args:
            weights: Returns the weight of each virtual rank of this process, once the last backward has begun.
            divisor: The total weight, where it is known already; then no weights are exchanged.
        """
        self.stream.join()  # a step that was broken off may still use memory
        self.weights = weights
        self.divisor = divisor
        self.error: Exception | None = None  # of a message that was sent from inside backward
        self._buckets = []
        # the messages of each stage, of every bucket that has reached it
        self._announced: list[list[Work]] = []
        self._forwarded: list[list[Work]] = []
        self._added_up: list[list[Work]] = []
        self._spread: list[list[Work]] = []
        self._block_is_finite: list[torch.Tensor] = []
        self._own_chunks: list[torch.Tensor] = []  # the chunk of every bucket that this process has added up

    def prepare(self, roots: Sequence[FlatGradient | None], result: FlatGradient) -> None:
        """Build the messages of all buckets. Call it before the first `send` of a step.

        Args:
            roots: The partial sums of this process, in the plan's order; None: zeros.
            result: Where the sum is gathered. It may be the first partial sum: the others have received their chunks
                of it before they send the sums that belong there.
        """
        self.memory.offer(roots, result)
        self._buckets = [self._prepare_bucket(bucket) for bucket in range(len(self.layout.buckets))]

    def _prepare_bucket(self, bucket: int) -> _Bucket:
        routes, neighbors = self.routes, self.memory.neighbors
        done = [Message(self.ready, other) for other in neighbors]
        sends, receives = (done, done) if bucket else self.memory.names()
        if bucket == 0 and self.divisor is None:
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
            _add_in_order(terms, pairs)
            sends += [Message(terms[i], chunk) for i in left]
        receives = [
            Message(part, routes.forwarder(host, self.rank))
            for host, parts in self._received(bucket).items()
            for part in parts
        ]
        if bucket == 0 and self.divisor is None:
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

    def send(self, bucket: int) -> None:
        """Start to exchange the partial sums of a bucket, which are complete on this process.

        Autograd hooks call it. Where the run survives deaths, an error waits for `finish`, because the gradients that
        backward still computes are needed.
        """
        if self.error is not None:
            return
        try:
            with self.stream.block():
                if bucket == 0 and self.divisor is None:
                    self.row[slice(*self.plan.spans[self.rank])].copy_(self.weights())
                self._advance(bucket)
                ready, partial_sums, *_ = self._buckets[bucket]
                self._announced.append(ready.wrap([start() for start in ready.starts]))
                if partial_sums is not None and self.lags is ALONE:
                    self._fill_weights(bucket)
                    self._forwarded.append(partial_sums.wrap([start() for start in partial_sums.starts]))
        except (RuntimeError, ConnectionError) as error:
            if self.group.monitor is None:
                raise
            self.error = error

    def finish(self) -> bool:
        """Wait until the sum is whole in the `result` of `prepare`.

        Returns:
            Whether the chunks that this process has added up are finite.
        """
        try:
            if self.error is not None:
                raise self.error
            with self.stream.block():
                end = len(self._announced)
                for bucket in range(end, end + max(self.lags)):
                    self._advance(bucket)
                wait_for(work for works in (*self._added_up, *self._spread) for work in works)
                is_finite = are_finite(self._block_is_finite, self._own_chunks)
        finally:
            self.stream.join()
        # gloo's works keep its connections open: a forked loader worker would close them, and hang
        self._buckets, self._announced, self._forwarded, self._added_up, self._spread = [], [], [], [], []
        return is_finite

    def _advance(self, bucket: int) -> None:
        """Let the buckets before this one reach their next stages. All processes do this in one order.

        After the last bucket, call it with the numbers that would follow.
        """
        for lag, reach in zip(self.lags, (self._forward, self._add_up, self._spread_totals), strict=True):
            if 0 <= bucket - lag < len(self._announced):
                reach(bucket - lag)

    def _fill_weights(self, bucket: int) -> None:
        """Gather the weights of this host, which leave with the first bucket."""
        if bucket == 0 and self.divisor is None:
            spans = [self.plan.spans[rank] for rank in self.routes.local]
            torch.cat([self.row[slice(*span)] for span in spans], out=self._weights_on[self.routes.host])

    def _forward(self, bucket: int) -> None:
        wait_for(self._announced[bucket])
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
        self._reduce_in_order(terms, self.divisor, [self.memory.total(rank, bucket, self.rank) for rank in ranks])
        totals = self._buckets[bucket].totals
        self._added_up.append(totals.wrap([start() for start in totals.starts]))

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
        """Return the sum of the weights of all virtual ranks, in their order."""
        for host in self.routes.remote_hosts:
            spans = [self.plan.spans[rank] for rank in self.routes.ranks_on(host)]
            weights = self._weights_on[host].split([hi - lo for lo, hi in spans])
            for span, part in zip(spans, weights, strict=True):
                self.row[slice(*span)].copy_(part)
        return reduce(torch.add, self.row)

    def _reduce_in_order(self, terms: list[torch.Tensor], divisor: torch.Tensor, outs: list[torch.Tensor]) -> None:
        """Write the total of our chunk over the divisor to all of `outs`, of which the first is our own.

        One block at a time, so that it stays in the cache. `terms` are overwritten.
        """
        self._own_chunks.append(outs[0])
        additions = self.routes.additions
        for block in blocks(outs[0]):
            parts, (result, *others) = [term[block] for term in terms], [out[block] for out in outs]
            for i, j in additions[:-1]:
                parts[i].add_(parts[j])
            for i, j in additions[-1:]:  # the last sum is the total: it is written once, divided
                is_finite = kernels_for(result).add_and_divide(parts[i], parts[j], divisor, result)
            if not additions:
                is_finite = torch.isfinite(torch.div(parts[0], divisor, out=result).sum())
            self._block_is_finite.append(is_finite)
            for other in others:
                other.copy_(result)


def _add_in_order(terms: Sequence[torch.Tensor], pairs: Pairs) -> None:
    """Add terms[j] to terms[i] for each pair (i, j), one block at a time."""
    for block in blocks(terms[0]) if pairs else ():
        for i, j in pairs:
            terms[i][block].add_(terms[j][block])
