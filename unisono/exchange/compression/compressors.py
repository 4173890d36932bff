"""How the compressed nodes of one step meet: cut into chunks, handed to everybody, or added up.

    take    a node's sum is complete, with what was left over of it before: bring it into its form
    meet    the forms meet; afterwards `into` is their sum, the same on every process

What travels is the form, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch

from unisono.config import CompressSettings
from unisono.distributed.process_group import Message, ProcessGroup
from unisono.exchange.buckets import BucketLayout, FlatGradient
from unisono.exchange.compression.block_format import BLOCK, CODES, NEEDS_FEEDBACK, largest
from unisono.exchange.compression.node_owners import NodeOwners
from unisono.exchange.compression.powersgd import first_q, next_q, orthogonalize, shape_of
from unisono.exchange.tree.counted_collectives import CountedCollectives
from unisono.plan.reduction_tree import Fold


class Compressor(Protocol):
    """`feedback`: what a form leaves out is kept, in `x`, for the node's next one."""

    feedback: bool

    def begin(self, deal: NodeOwners, ratio: float) -> None:
        """A step begins; what is kept is to be multiplied by `ratio`."""

    def take(self, number: int, x: FlatGradient) -> None: ...

    def meet(
        self, deal: NodeOwners, post: CountedCollectives, into: FlatGradient, kept: Mapping[int, FlatGradient]
    ) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return


def build_way(settings: CompressSettings, layout: BucketLayout, group: ProcessGroup) -> Compressor:
    """How `compress.kind` meets."""
    if settings.kind in CODES:
        return BlockCompressor(settings.kind, layout, group)
    return {"topk": TopKCompressor, "powersgd": PowerSGDCompressor}[settings.kind](settings, layout, group)


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


class BlockCompressor(Compressor):
    """Blocks of fewer bits. Each process gets its chunk of every node's form, adds these up by the tree, and hands the
    sum to everybody in the same form; the root of the tree is one more node, with something left over of its own:

        process 0   nodes a b   [ a0 | a1 ] [ b0 | b1 ] --a1 b1--> 1     (a0 + b0) + (c0 + d0) = m0   --m0--> 1
        process 1   nodes c d   [ c0 | c1 ] [ d0 | d1 ] --c0 d0--> 0     (a1 + b1) + (c1 + d1) = m1   --m1--> 0

    With N nodes on W processes a process sends (N / W + 1) (W - 1) / W forms of a gradient.
    """

    def __init__(self, kind: str, layout: BucketLayout, group: ProcessGroup) -> None:
        self.code, self.layout, self.group = CODES[kind], layout, group
        self.feedback = kind in NEEDS_FEEDBACK
        self.forms: dict[int, list[torch.Tensor]] = {}
        # of the root, our chunk of each bucket
        self.left = [torch.zeros(b.size // group.size, device=b.device) for b in layout.buckets]

    def begin(self, deal: NodeOwners, ratio: float) -> None:
        self.forms = {}
        for left in self.left if ratio != 1.0 else ():
            left.mul_(ratio)

    def take(self, number: int, x: FlatGradient) -> None:
        self.forms[number] = [self.code.encode(flat) for flat in x.flats]
        if self.feedback:
            for flat, form in zip(x.flats, self.forms[number], strict=True):
                flat.sub_(self.code.decode(form))

    def meet(
        self, deal: NodeOwners, post: CountedCollectives, into: FlatGradient, kept: Mapping[int, FlatGradient]
    ) -> None:
        for bucket, flat in enumerate(into.flats):
            flat.copy_(self.code.decode(self._meet(bucket, deal, post)))

    def _meet(self, bucket: int, deal: NodeOwners, post: CountedCollectives) -> torch.Tensor:
        """The form of a bucket's sum."""
        mine = {number: forms[bucket].view(post.size, -1, self.code.width) for number, forms in self.forms.items()}
        every = range(len(deal.nodes))
        chunks = {n: mine[n][post.rank] if n in mine else self._chunk(bucket) for n in every}
        sends = [Message(mine[n][other], other) for other in post.others for n in mine]
        post.trade(sends, [Message(chunks[n], holder) for holder in post.others for n in deal.owned(holder)])
        fold: Fold[torch.Tensor] = Fold(deal.leaves, _add)
        for number, node in enumerate(deal.nodes):
            fold.push(node, self.code.decode(chunks[number]))
        ((_, total),) = fold.held
        if self.feedback:
            total.add_(self.left[bucket])
        form = self.code.encode(total)
        if self.feedback:
            self.left[bucket] = total.sub_(self.code.decode(form))
        whole = form.new_empty(post.size, *form.shape)
        whole[post.rank] = form
        sends = [Message(form, other) for other in post.others]
        post.trade(sends, [Message(whole[other], other) for other in post.others])
        return whole.flatten(0, 1)

    def _chunk(self, bucket: int) -> torch.Tensor:
        """Room for a process's chunk of a form."""
        about = self.layout.buckets[bucket]
        count = about.size // self.group.size // BLOCK
        return torch.empty(count, self.code.width, dtype=torch.uint8, device=about.device)

    def state_dict(self) -> dict[str, Any]:
        """The root's, whole: its chunks are cut anew for another number of processes."""
        if not self.feedback:
            return {}
        whole = FlatGradient(self.layout)
        for flat, left in zip(whole.flats, self.left, strict=True):
            self.group.all_gather(flat, left).wait() if self.group.size > 1 else flat.copy_(left)
        return {"root": flatten(whole)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.feedback and "root" in state:
            whole = unflatten(state["root"], FlatGradient(self.layout))
            self.left = [flat.view(self.group.size, -1)[self.group.rank].clone() for flat in whole.flats]


class TopKCompressor(Compressor):
    """The largest elements of each parameter, which everybody gets from everybody.

    With N nodes on W processes a process sends (W - 1) N / W forms, of 8 bytes an element that is sent.
    """

    feedback = True

    def __init__(self, settings: CompressSettings, layout: BucketLayout, group: ProcessGroup) -> None:
        self.layout = layout
        self.counts = [math.ceil(settings.ratio * part.numel()) for part in layout.parts]
        self.forms: dict[int, list[torch.Tensor]] = {}

    def begin(self, deal: NodeOwners, ratio: float) -> None:
        self.forms = {}

    def take(self, number: int, x: FlatGradient) -> None:
        self.forms[number] = []
        for about, flat in zip(self.layout.buckets, x.flats, strict=True):
            places, values = [], []
            for n, offset in zip(about.members, about.offsets, strict=True):
                where, what = largest(flat[offset : offset + self.layout.parts[n].numel()], self.counts[n])
                places.append(where + offset)
                values.append(what)
            form = torch.stack([torch.cat(places).view(torch.float32), torch.cat(values)])
            self.forms[number].append(form)
            flat[form[0].view(torch.int32).long()] = 0.0

    def meet(
        self, deal: NodeOwners, post: CountedCollectives, into: FlatGradient, kept: Mapping[int, FlatGradient]
    ) -> None:
        for bucket, flat in enumerate(into.flats):
            count = sum(self.counts[n] for n in self.layout.buckets[bucket].members)
            forms = {n: mine[bucket] for n, mine in self.forms.items()}
            theirs = {n: flat.new_empty(2, count) for n in range(len(deal.nodes)) if n not in forms}
            sends = [Message(form, other) for other in post.others for form in forms.values()]
            post.trade(sends, [Message(theirs[n], holder) for holder in post.others for n in deal.owned(holder)])
            fold: Fold[torch.Tensor] = Fold(deal.leaves, _add)
            for number, node in enumerate(deal.nodes):
                form = forms[number] if number in forms else theirs[number]
                row = torch.zeros_like(flat)
                row[form[0].view(torch.int32).long()] = form[1]
                fold.push(node, row)
            ((_, total),) = fold.held
            flat.copy_(total)


class PowerSGDCompressor(Compressor):
    """PowerSGD (powersgd.py). On W processes a process sends, for each matrix, its partial sums of two thin ones and a
    chunk of their sums, (W - 1) / W of each; and what is no matrix in the same way."""

    feedback = True

    def __init__(self, settings: CompressSettings, layout: BucketLayout, group: ProcessGroup) -> None:
        self.layout, self.group = layout, group
        found = {n: shape_of(part, settings.rank) for n, part in enumerate(layout.parts)}
        self.shapes = {n: shape for n, shape in found.items() if shape is not None}
        self.rest = [n for n, shape in found.items() if shape is None]
        self.q = {n: first_q(n, m, rank, layout.parts[n].device) for n, (_, m, rank) in self.shapes.items()}

    def begin(self, deal: NodeOwners, ratio: float) -> None:
        self.deal, self.fold = deal, self._fold(deal)

    def _fold(self, deal: NodeOwners) -> Fold[torch.Tensor]:
        return Fold(deal.leaves, _add, deal.plan.spans[self.group.rank][0])

    def take(self, number: int, x: FlatGradient) -> None:
        said = [self._matrix(x, n) @ self.q[n] for n in self.shapes] + [x.views[n] for n in self.rest]
        self.fold.push(self.deal.nodes[number], torch.cat([part.reshape(-1) for part in said]))
        for n in self.rest:  # nothing is left over of these
            x.views[n].zero_()

    def meet(
        self, deal: NodeOwners, post: CountedCollectives, into: FlatGradient, kept: Mapping[int, FlatGradient]
    ) -> None:
        sizes = [(n, rank) for n, _, rank in self.shapes.values()]
        total = self._total(self.fold, sizes + [self.layout.parts[n].shape for n in self.rest], post)
        p = dict(zip(self.shapes, map(orthogonalize, total), strict=False))
        for n, part in zip(self.rest, total[len(p) :], strict=True):
            into.views[n].copy_(part)
        if not p:
            return
        fold = self._fold(deal)
        for number, x in kept.items():
            q = {n: self._matrix(x, n).T @ p[n] for n in p}
            for n in p:
                x.views[n].sub_((p[n] @ q[n].T).view(x.views[n].shape))
            fold.push(deal.nodes[number], torch.cat([part.reshape(-1) for part in q.values()]))
        for n, q_sum in zip(
            p, self._total(fold, [(m, rank) for _, m, rank in self.shapes.values()], post), strict=True
        ):
            into.views[n].copy_((p[n] @ q_sum.T).view(into.views[n].shape))
            self.q[n] = next_q(self.q[n], q_sum)

    def _total(
        self, fold: Fold[torch.Tensor], shapes: Sequence[Sequence[int]], post: CountedCollectives
    ) -> list[torch.Tensor]:
        """The sum over all nodes, from what was folded of ours."""
        room = torch.empty(sum(map(prod, shapes)), device=self.group.device)
        total = post.add_up(self.deal.plan, [root for _, root in fold.held], room)
        return [
            part.view(tuple(shape)) for part, shape in zip(total.split(list(map(prod, shapes))), shapes, strict=True)
        ]

    def _matrix(self, x: FlatGradient, n: int) -> torch.Tensor:
        return x.views[n].reshape(self.shapes[n][:2])

    def state_dict(self) -> dict[str, Any]:
        return {"q": {str(n): q.clone() for n, q in self.q.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for n, q in self.q.items():
            saved = state["q"].get(str(n))
            if saved is not None and saved.shape == q.shape:  # under another rank it begins anew
                self.q[n] = saved.to(q.device)


def flatten(x: FlatGradient) -> torch.Tensor:
    """A copy's content in the order of the parameters, which does not depend on how it is cut into buckets."""
    return torch.cat([view.reshape(-1) for view in x.views])


def unflatten(row: torch.Tensor, into: FlatGradient) -> FlatGradient:
    for view, part in zip(into.views, row.split([view.numel() for view in into.views]), strict=True):
        view.copy_(part.view(view.shape))
    return into
