"""The memory of a process under a placement, by part, from what one process needs.

Data parallel: every process holds parameters, buffers and optimizer state. The tree exchange holds flat copies of the
gradient, one for each partial sum that the process sends, and further copies while it computes a subtree:

    8 virtual ranks on one process      flat copy      v0 + v1, then the sum of what follows
                                        loose copies   v2 + v3; v4 + v5; ...

Shards, gathered by layer: parameters, gradients and optimizer state are divided. Whole are the parameters outside of
all layers, the layer in use and the one that is gathered ahead; twice there is the gradient of the layer that travels.

With parallel.offload, shards and optimizer state take no memory of a device, and neither do gradients that are divided.
On a CPU this changes nothing.

What processes were measured to need beyond this model (temporary memory of operators, free memory that the allocator
keeps, connections) is added to each prediction: that of one process, and that of the same placement. Of recomputation
on several processes, two are measured: two replicas, and two shards by layer and by step. What they need beyond the
model is added for more processes, too. The peak of the same placement without recomputation does not predict it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from unisono.costs.placements import ONE_PROCESS, Placement, placements
from unisono.costs.recorded_costs import RecordedCosts, RoundBytes
from unisono.plan.assignment import assign_evenly
from unisono.plan.reduction_tree import Fold, Node, parent, subtrees

FLAT, LOOSE = "flat", "loose"

RECOMPUTED = tuple(each for each in placements(2) if each.processes == 2 and each.recompute)
"""The placements on several processes that are measured with recomputation."""


@dataclass(frozen=True)
class MemoryParts:
    """The memory of a process at its peak, in bytes.

    Attributes:
        process: Python, torch, data.
        parameters: Parameters that the process keeps between steps.
        buffers: Buffers.
        optimizer: Optimizer state.
        gradients: One copy of the gradient, or the process's part of it.
        activations: What the forward pass keeps for the backward pass.
        exchange: Further copies of the gradient.
        gathered: Parameters and gradients of others, which the process gathers.
        temporary: What operators need for a moment.
        unexplained: What processes were measured to need beyond this; below 0: they need less.
    """

    process: int
    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    activations: int
    exchange: int
    gathered: int
    temporary: int
    unexplained: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, each.name) for each in fields(self))


class Moment(NamedTuple):
    """The copies of the gradient while a micro-batch is computed.

    Attributes:
        copies: Whole copies that exist.
        appears: Whether one more appears during the backward pass.
    """

    copies: int
    appears: bool


def moments(virtual_ranks: int, span: tuple[int, int], pieces: Sequence[int], size: int) -> list[Moment]:
    """Return the copies that the tree exchange holds, for each micro-batch of a span (exchange/tree/tree_exchange.py).

    Args:
        virtual_ranks: The number of virtual ranks.
        span: Those of this process.
        pieces: The number of micro-batches of each virtual rank.
        size: The number of processes.
    """
    if virtual_ranks == size == 1:  # exchange/single.py: the gradients that autograd makes
        return [Moment(int(n > 0), n == 0) for n in range(pieces[0])]
    sends = subtrees(virtual_ranks, *span)
    sent = {next((v for v in range(*node) if pieces[v]), -1) for node in sends}
    fold: Fold[str | None] = Fold(virtual_ranks, lambda left, right: right if left is None else left, span[0])
    found: list[Moment] = []
    for v in range(*span):
        if not pieces[v]:
            continue
        fold.skip_to(v, None)
        node, kind = Node(v, v + 1), FLAT if v in sent else LOOSE
        joins = _joined(fold, virtual_ranks, node) if pieces[v] == 1 else None
        if joins is not None:
            fold.held.pop()
            node, kind = joins
        held = len(sends) + sum(value == LOOSE for _, value in fold.held)
        for number in range(pieces[v]):
            appears = kind == LOOSE and joins is None and number == 0
            found.append(Moment(held + (kind == LOOSE and not appears), appears))
        fold.push(node, kind)
    return found


def _joined(fold: Fold[str | None], virtual_ranks: int, leaf: Node) -> tuple[Node, str] | None:
    """Return the sum to which a leaf of one micro-batch is added directly; None: it gets memory of its own."""
    if not fold.held:
        return None
    node, kind = fold.held[-1]
    pair = parent(virtual_ranks, node, leaf)
    return (pair, kind) if pair is not None and node.hi - node.lo == 1 and kind is not None else None


@dataclass(frozen=True)
class MeasuredPeaks:
    """The peak memory of processes of short runs, in bytes: the largest of a run.

    Attributes:
        plain: What one process of the same script needed.
        again: What it needed with recomputation; None: this was not measured.
        peaks: The peaks, by the placement. With recomputation, those of two processes are enough.
    """

    plain: RecordedCosts
    again: RecordedCosts | None = None
    peaks: Mapping[Placement, int] = field(default_factory=dict)

    def beyond(self, placement: Placement) -> int:
        """Return by how much more the model is exceeded than on one process; 0: not measured."""
        if placement.processes == 1:
            return 0
        if placement in self.peaks:
            return self._excess(placement)
        measured = placement.pair if placement.pair in self.peaks else placement.without_recompute
        return self._excess(measured) if placement.recompute else 0

    def _excess(self, measured: Placement) -> int:
        costs = self.again if measured.recompute else self.plain
        if measured not in self.peaks or costs is None or costs.rounds is None:
            return 0
        return self.peaks[measured] - memory_of(costs, measured).total


def memory_of(
    costs: RecordedCosts, placement: Placement = ONE_PROCESS, peaks: MeasuredPeaks | None = None
) -> MemoryParts:
    """Return the memory of the process that needs most. `costs.rounds` must be known.

    Args:
        costs: What one process needed, with the same setting for recomputation.
        placement: The placement.
        peaks: What several processes needed; None: the memory follows from that of one.
    """
    replicas, shards = placement.replicas, placement.shards
    if shards == 1:
        found = max((_replicated(costs, span, replicas) for span in _spans(costs, replicas)), key=_total)
    elif placement.by_layer:
        found = max((_by_layer(costs, span, replicas, shards) for span in _spans(costs, replicas)), key=_total)
    else:
        size = placement.processes
        found = max((_by_step(costs, span, size, shards) for span in _spans(costs, size)), key=_total)
    if placement.offload and not costs.on_cpu:
        found = replace(found, parameters=0, optimizer=0, gradients=0 if placement.by_layer else found.gradients)
    if peaks is None:
        return found
    return replace(found, unexplained=found.unexplained + peaks.beyond(placement))


def unexplained(costs: RecordedCosts) -> int:
    """Return what one process was measured to need beyond the model."""
    if not costs.peak:
        return 0
    return costs.peak - _replicated(costs, (0, len(costs.micro_batches)), 1, rest=0).total


def _total(parts: MemoryParts) -> int:
    return parts.total


def _spans(costs: RecordedCosts, size: int) -> list[tuple[int, int]]:
    return [span for span in assign_evenly(len(costs.micro_batches), size) if span[0] < span[1]]


def _rounds(costs: RecordedCosts) -> RoundBytes:
    assert costs.rounds is not None, "without the memory of a micro-batch there is no prediction"
    return costs.rounds


def _replicated(costs: RecordedCosts, span: tuple[int, int], size: int, rest: int | None = None) -> MemoryParts:
    """Return the memory of a process that holds the whole model and computes a span."""
    rounds, gradient, virtual_ranks = _rounds(costs), costs.state.gradients, len(costs.micro_batches)

    def peak(moment: Moment) -> int:
        return moment.copies * gradient + (rounds.first if moment.appears else rounds.following)

    found = moments(virtual_ranks, span, costs.micro_batches, size)
    flats = len(subtrees(virtual_ranks, *span))
    most = max(max(map(peak, found)), max(flats, 1) * gradient + rounds.update)
    top = max(found, key=peak)
    copies = top.copies + top.appears
    exchange = max(0, (copies - 1) * gradient)
    return MemoryParts(
        process=costs.process,
        parameters=costs.state.parameters,
        buffers=costs.state.buffers,
        optimizer=costs.state.optimizer,
        gradients=gradient,
        activations=rounds.activations,
        exchange=exchange,
        gathered=0,
        temporary=max(0, most - gradient - exchange - rounds.activations),
        unexplained=unexplained(costs) if rest is None else rest,
    )


def _by_step(costs: RecordedCosts, span: tuple[int, int], size: int, shards: int) -> MemoryParts:
    """Return the memory where all shards are gathered for a step: the whole model, and shards besides."""
    whole, state = _replicated(costs, span, size), costs.state
    return MemoryParts(
        process=costs.process + costs.shard_imports,
        parameters=_part(state.parameters, shards),
        buffers=state.buffers,
        optimizer=_part(state.optimizer, shards),
        gradients=whole.gradients,
        activations=whole.activations,
        exchange=whole.exchange,
        gathered=state.parameters,
        temporary=whole.temporary,
        unexplained=whole.unexplained,
    )


def _by_layer(costs: RecordedCosts, span: tuple[int, int], replicas: int, shards: int) -> MemoryParts:
    """Return the memory where shards are gathered layer by layer.

    The peak is at the beginning of the backward pass, with all activations, or at its end, with the gradient of the
    parameters outside of all layers, which are gathered all the time.
    """
    rounds, state, virtual_ranks = _rounds(costs), costs.state, len(costs.micro_batches)
    layers, root = list(state.groups[:-1]), state.groups[-1] if state.groups else (state.parameters, state.gradients)
    largest = sorted((size for size, _ in layers), reverse=True)[:2]
    gradient = max((trained for _, trained in layers), default=0)
    others = (shards - 1) / shards
    copies = max(m.copies + m.appears for m in moments(virtual_ranks, span, costs.micro_batches, max(replicas, 2)))
    begin = rounds.following + root[0] + sum(largest) + round(gradient * (1 + others))
    end = root[0] + round(root[1] * (2 + others)) + gradient
    if not layers:
        begin = rounds.first + root[0]
    most = max(begin, end)
    gathered = root[0] + sum(largest) + (round(gradient * (1 + others)) if begin >= end else root[1])
    return MemoryParts(
        process=costs.process + costs.shard_imports,
        parameters=_part(state.parameters, shards),
        buffers=state.buffers,
        optimizer=_part(state.optimizer, shards),
        gradients=_part(state.gradients, shards),
        activations=rounds.activations if begin >= end else 0,
        exchange=_part(state.gradients, shards) * max(0, copies - 1),
        gathered=min(gathered, most),
        temporary=max(0, most - gathered - (rounds.activations if begin >= end else 0)),
        unexplained=unexplained(costs),
    )


def _part(size: int, shards: int) -> int:
    return -(-size // shards)
