"""Compress the sums at the nodes of the tree, and reduce them in compressed form.

A step calls `compress` for each node of this process, then `reduce` once; nothing else is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch

from unisono.config import CompressSettings
from unisono.distributed.process_group import Message
from unisono.exchange.buckets import BucketLayout
from unisono.exchange.compression.block_quantizer import BLOCK, QUANTIZERS
from unisono.exchange.compression.node_owners import NodeOwners
from unisono.exchange.compression.powersgd import first_q, next_q, orthogonalize, shape_of
from unisono.exchange.gradient_accumulation import FlatGradient
from unisono.exchange.tree.counted_collectives import CountedCollectives
from unisono.plan.reduction_tree import Fold

NEEDS_FEEDBACK = ("int8", "topk", "powersgd")
"""Kinds that lose so much that it is kept and added to the next gradient (error feedback: Karimireddy et al.,
arXiv 1901.09847). fp16 and bf16 round to 11 and 8 bits; a step's noise is much larger."""


class Compressor(Protocol):
    """One way to compress and reduce.

    Attributes:
        feedback: Whether `compress` leaves what it loses in the gradient, for the node's next one.
        collectives: Send to the other processes.
        owners: The owners of the nodes in this step.
    """

    feedback: bool
    collectives: CountedCollectives
    owners: NodeOwners

    def begin(self, owners: NodeOwners, ratio: float) -> None:
        """Begin a step. Residuals that are kept here are to be multiplied by `ratio`."""
        self.owners = owners

    def compress(self, number: int, gradient: FlatGradient) -> None:
        """Compress the sum of node `number`, to which its residual has been added."""

    def reduce(self, result: FlatGradient, residuals: Mapping[int, FlatGradient]) -> None:
        """Write the sum of all nodes to `result`, the same on every process."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return


def build_compressor(settings: CompressSettings, layout: BucketLayout, collectives: CountedCollectives) -> Compressor:
    """Build the compressor that `compress.kind` names."""
    if settings.kind in QUANTIZERS:
        return QuantizingCompressor(settings.kind, layout, collectives)
    return {"topk": TopKCompressor, "powersgd": PowerSGDCompressor}[settings.kind](settings, layout, collectives)


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


class QuantizingCompressor(Compressor):
    """Quantize blocks. Each process adds up its chunk of all nodes, in the order of the tree, and quantizes the sum.

    The root of the tree is one more compressed node, with a residual of its own:

        process 0   nodes a b   [ a0 | a1 ] [ b0 | b1 ] --a1 b1--> 1     (a0 + b0) + (c0 + d0) = m0   --m0--> 1
        process 1   nodes c d   [ c0 | c1 ] [ d0 | d1 ] --c0 d0--> 0     (a1 + b1) + (c1 + d1) = m1   --m1--> 0

    With N nodes on W processes, a process sends (N / W + 1) (W - 1) / W quantized gradients.
    """

    def __init__(self, kind: str, layout: BucketLayout, collectives: CountedCollectives) -> None:
        self.quantizer, self.layout, self.collectives = QUANTIZERS[kind], layout, collectives
        self.feedback = kind in NEEDS_FEEDBACK
        self.encoded: dict[int, list[torch.Tensor]] = {}
        # our chunk of the root's residual, for each bucket
        self.root_residual = [torch.zeros(b.size // collectives.size, device=b.device) for b in layout.buckets]

    def begin(self, owners: NodeOwners, ratio: float) -> None:
        super().begin(owners, ratio)
        self.encoded = {}
        for residual in self.root_residual if ratio != 1.0 else ():
            residual.mul_(ratio)

    def compress(self, number: int, gradient: FlatGradient) -> None:
        self.encoded[number] = [self.quantizer.encode(flat) for flat in gradient.flats]
        if self.feedback:
            for flat, encoded in zip(gradient.flats, self.encoded[number], strict=True):
                flat.sub_(self.quantizer.decode(encoded))

    def reduce(self, result: FlatGradient, residuals: Mapping[int, FlatGradient]) -> None:
        for bucket, flat in enumerate(result.flats):
            flat.copy_(self.quantizer.decode(self._reduce_bucket(bucket)))

    def _reduce_bucket(self, bucket: int) -> torch.Tensor:
        """Return the quantized sum of a bucket."""
        owners, collectives = self.owners, self.collectives
        rank, size, width = collectives.rank, collectives.size, self.quantizer.width
        own = {number: encoded[bucket].view(size, -1, width) for number, encoded in self.encoded.items()}
        chunks = {n: own[n][rank] if n in own else self._empty_chunk(bucket) for n in range(len(owners.nodes))}
        sends = [Message(own[n][other], other) for other in collectives.others for n in own]
        receives = [Message(chunks[n], holder) for holder in collectives.others for n in owners.owned(holder)]
        collectives.exchange(sends, receives)
        fold: Fold[torch.Tensor] = Fold(owners.leaves, _add)
        for number, node in enumerate(owners.nodes):
            fold.push(node, self.quantizer.decode(chunks[number]))
        ((_, total),) = fold.held
        if self.feedback:
            total.add_(self.root_residual[bucket])
        encoded = self.quantizer.encode(total)
        if self.feedback:
            self.root_residual[bucket] = total.sub_(self.quantizer.decode(encoded))
        gathered = encoded.new_empty(size, *encoded.shape)
        gathered[rank] = encoded
        sends = [Message(encoded, other) for other in collectives.others]
        collectives.exchange(sends, [Message(gathered[other], other) for other in collectives.others])
        return gathered.flatten(0, 1)

    def _empty_chunk(self, bucket: int) -> torch.Tensor:
        """Allocate memory for a process's chunk of a quantized bucket."""
        info = self.layout.buckets[bucket]
        count = info.size // self.collectives.size // BLOCK
        return torch.empty(count, self.quantizer.width, dtype=torch.uint8, device=info.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the root's whole residual, which can be cut for another number of processes."""
        if not self.feedback:
            return {}
        whole = FlatGradient(self.layout)
        for flat, residual in zip(whole.flats, self.root_residual, strict=True):
            group = self.collectives.group
            group.all_gather(flat, residual).wait() if group.size > 1 else flat.copy_(residual)
        return {"root": flatten(whole)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.feedback and "root" in state:
            whole = unflatten(state["root"], FlatGradient(self.layout))
            rank, size = self.collectives.rank, self.collectives.size
            self.root_residual = [flat.view(size, -1)[rank].clone() for flat in whole.flats]


class TopKCompressor(Compressor):
    """Send the largest elements of each parameter from every process to every other.

    With N nodes on W processes, a process sends (W - 1) N / W times 8 bytes for each element that is kept.
    """

    feedback = True

    def __init__(self, settings: CompressSettings, layout: BucketLayout, collectives: CountedCollectives) -> None:
        self.layout, self.collectives = layout, collectives
        self.counts = [math.ceil(settings.ratio * part.numel()) for part in layout.parts]
        self.encoded: dict[int, list[torch.Tensor]] = {}
        """By node and bucket: float32 [2, count], the positions (int32 bits) and the values."""

    def begin(self, owners: NodeOwners, ratio: float) -> None:
        super().begin(owners, ratio)
        self.encoded = {}

    def compress(self, number: int, gradient: FlatGradient) -> None:
        self.encoded[number] = []
        for info, flat in zip(self.layout.buckets, gradient.flats, strict=True):
            positions, values = [], []
            for n, offset in zip(info.members, info.offsets, strict=True):
                length = self.layout.parts[n].numel()
                where, what = largest_elements(flat[offset : offset + length], self.counts[n])
                positions.append(where + offset)
                values.append(what)
            encoded = torch.stack([torch.cat(positions).view(torch.float32), torch.cat(values)])
            self.encoded[number].append(encoded)
            flat[encoded[0].view(torch.int32).long()] = 0.0

    def reduce(self, result: FlatGradient, residuals: Mapping[int, FlatGradient]) -> None:
        owners, collectives = self.owners, self.collectives
        for bucket, flat in enumerate(result.flats):
            count = sum(self.counts[n] for n in self.layout.buckets[bucket].members)
            encoded = {n: own[bucket] for n, own in self.encoded.items()}
            sends = [Message(own, other) for other in collectives.others for own in encoded.values()]
            encoded |= {n: flat.new_empty(2, count) for n in range(len(owners.nodes)) if n not in encoded}
            receives = [Message(encoded[n], holder) for holder in collectives.others for n in owners.owned(holder)]
            collectives.exchange(sends, receives)
            fold: Fold[torch.Tensor] = Fold(owners.leaves, _add)
            for number, node in enumerate(owners.nodes):
                row = torch.zeros_like(flat)
                row[encoded[number][0].view(torch.int32).long()] = encoded[number][1]
                fold.push(node, row)
            ((_, total),) = fold.held
            flat.copy_(total)


def largest_elements(row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` elements of a row with the largest absolute values (Aji and Heafield, arXiv 1704.05021).

    Returns:
        Their positions, int32 [count] in ascending order, and their values.
    """
    positions = row.abs().topk(count, sorted=False).indices.sort().values
    return positions.int(), row[positions]


class PowerSGDCompressor(Compressor):
    """Approximate matrices by two thin ones each (powersgd.py).

    On W processes, a process sends its partial sums of the two thin matrices and a chunk of their sums, (W - 1) / W of
    each. Parameters that are no matrix are sent in the same way, as they are.
    """

    feedback = True

    def __init__(self, settings: CompressSettings, layout: BucketLayout, collectives: CountedCollectives) -> None:
        self.layout, self.collectives = layout, collectives
        found = {n: shape_of(part, settings.rank) for n, part in enumerate(layout.parts)}
        self.shapes = {n: shape for n, shape in found.items() if shape is not None}
        self.others = [n for n, shape in found.items() if shape is None]
        """Parameters that are no matrix, or too small."""
        self.q = {n: first_q(n, m, rank, layout.parts[n].device) for n, (_, m, rank) in self.shapes.items()}

    def begin(self, owners: NodeOwners, ratio: float) -> None:
        super().begin(owners, ratio)
        self.fold = self._new_fold()

    def _new_fold(self) -> Fold[torch.Tensor]:
        return Fold(self.owners.leaves, _add, self.owners.plan.spans[self.collectives.rank][0])

    def compress(self, number: int, gradient: FlatGradient) -> None:
        parts = [self._matrix(gradient, n) @ self.q[n] for n in self.shapes] + [gradient.views[n] for n in self.others]
        self.fold.push(self.owners.nodes[number], torch.cat([part.reshape(-1) for part in parts]))
        for n in self.others:  # these lose nothing
            gradient.views[n].zero_()

    def reduce(self, result: FlatGradient, residuals: Mapping[int, FlatGradient]) -> None:
        sizes = [(n, rank) for n, _, rank in self.shapes.values()]
        total = self._total(self.fold, sizes + [self.layout.parts[n].shape for n in self.others])
        p = dict(zip(self.shapes, map(orthogonalize, total), strict=False))
        for n, part in zip(self.others, total[len(p) :], strict=True):
            result.views[n].copy_(part)
        if not p:
            return
        fold = self._new_fold()
        for number, residual in residuals.items():
            q = {n: self._matrix(residual, n).T @ p[n] for n in p}
            for n in p:
                residual.views[n].sub_((p[n] @ q[n].T).view(residual.views[n].shape))
            fold.push(self.owners.nodes[number], torch.cat([part.reshape(-1) for part in q.values()]))
        sums = self._total(fold, [(m, rank) for _, m, rank in self.shapes.values()])
        for n, q_sum in zip(p, sums, strict=True):
            result.views[n].copy_((p[n] @ q_sum.T).view(result.views[n].shape))
            self.q[n] = next_q(self.q[n], q_sum)

    def _total(self, fold: Fold[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the sum over all nodes, cut into tensors of these shapes."""
        like = torch.empty(sum(map(prod, shapes)), device=self.collectives.group.device)
        total = self.collectives.reduce_by_plan(self.owners.plan, [root for _, root in fold.held], like)
        parts = total.split(list(map(prod, shapes)))
        return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]

    def _matrix(self, gradient: FlatGradient, n: int) -> torch.Tensor:
        return gradient.views[n].reshape(self.shapes[n][:2])

    def state_dict(self) -> dict[str, Any]:
        return {"q": {str(n): q.clone() for n, q in self.q.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for n, q in self.q.items():
            saved = state["q"].get(str(n))
            if saved is not None and saved.shape == q.shape:  # with another rank the iteration begins again
                self.q[n] = saved.to(q.device)


def flatten(gradient: FlatGradient) -> torch.Tensor:
    """Return a gradient in the order of the parameters, which does not depend on the buckets."""
    return torch.cat([view.reshape(-1) for view in gradient.views])


def unflatten(row: torch.Tensor, out: FlatGradient) -> FlatGradient:
    """Write a row that `flatten` has returned to `out`."""
    for view, part in zip(out.views, row.split([view.numel() for view in out.views]), strict=True):
        view.copy_(part.view(view.shape))
    return out
