"""Context: each process of the axis has a slice of every sequence, and they meet in attention only (Ulysses).

Whatever a transformer does to one position at a time, a process does to its own positions. Attention needs all of them,
but each head by itself. So in front of it an all-to-all gives each process all positions for its part of the heads, and
a second one behind it brings the positions home (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509):

                 heads  a  b               positions 0 1 2 3                heads  a  b
    process 0    0 1   [a][b]   --trade-->  head a  [a a a a]   --trade-->  0 1   [a][b]
    process 1    2 3   [a][b]               head b  [b b b b]               2 3   [a][b]

What backward trades is the same, the other way round. Between the two, attention is torch's own and sees whole
sequences: causal or with a mask, with dropout, grouped heads, on any device. Each process sends four activations of its
slice a layer (query, key, value, output), less its own part of them; with twice the processes each sends half of that.

Everything that is attention must come through F.scaled_dot_product_attention. It is replaced while slices are computed,
backward included, since what is recomputed there (torch.utils.checkpoint) may attend again, on an accelerator in a
thread of autograd's. A torch.overrides mode would also see a function that a script has imported by its bare name, but
neither other threads nor the inside of nn.MultiheadAttention; so a forward pass that never came by here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.errors import LoopError
from unisono.parallel.context_parallel.sequence_split import SequenceCut, SequenceDims, divide, slice_along

torchs_attention = F.scaled_dot_product_attention
torchs_multi_head = F.multi_head_attention_forward


class AllToAll(torch.autograd.Function):
    """Of each tensor [..., heads, positions, width]: from our positions of all heads to all positions of our heads
    (`to_heads`), or back. `lengths` says how many positions each process has."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, lengths: list[int], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = group, lengths, not to_heads
        everybody, here, kinds = range(group.size), lengths[group.rank], len(tensors)
        cuts = [t.chunk(group.size, -3) if to_heads else t.split(lengths, -2) for t in tensors]
        ours = [cut[peer].reshape(-1) for peer in everybody for cut in cuts]  # all for process 0, then all for 1, ...
        shapes = [_long(cut[0], lengths[peer] if to_heads else here) for peer in everybody for cut in cuts]
        sent, coming = list(map(len, ours)), list(map(math.prod, shapes))
        flat = group.all_to_all(torch.cat(ours), _sums(sent, kinds), _sums(coming, kinds))
        theirs = [part.view(shape) for part, shape in zip(flat.split(coming), shapes, strict=True)]
        return tuple(torch.cat(theirs[kind::kinds], -2 if to_heads else -3) for kind in range(kinds))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *AllToAll.apply(*ctx.back, *gradients)


def _long(part: Tensor, length: int) -> tuple[int, ...]:
    """The shape of such a part with another number of positions."""
    return *part.shape[:-2], length, part.shape[-1]


def _sums(sizes: list[int], kinds: int) -> list[int]:
    """What each process gets, or sends, of all kinds together."""
    return [sum(sizes[first : first + kinds]) for first in range(0, len(sizes), kinds)]


class ContextParallel:
    """The sequences of a run: how they are divided among the processes of the axis, and where these meet.

    now  how the micro-batch that is being computed is divided; None: whatever is computed is computed whole
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.now: SequenceCut | None = None
        self._batch: SequenceDims | None = None  # what divides a batch
        self._went = self._met = False  # since `now` is: was a model called, has it attended?
        self._fast = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return self  # a copy of a model is of the same run

    def add(self, model: nn.Module, sequence: SequenceDims | None) -> None:
        """A model was placed, with what of it lies along the sequence. Raises LoopError if that cannot be."""
        if sequence is not None:
            sequence.check(model)
        if self.group.size == 1:
            return
        sequence = self._known(model, sequence)
        slice_along(model, sequence.positions, self.group.rank, lambda: self.now)
        model.register_forward_pre_hook(self._note)

    def _known(self, model: nn.Module, sequence: SequenceDims | None) -> SequenceDims:
        asked = f"run.place was given a {type(model).__name__}, with parallel.context = {self.group.size}."
        norms = [name for name, part in model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        if norms:
            raise LoopError(
                asked,
                f"{len(norms)} of its parts are batch norms (the first is {norms[0] or 'itself'}), which would see the "
                "positions of one slice only.",
                "use LayerNorm, RMSNorm or GroupNorm, or --set parallel.context=1",
            )
        beside = [name for name, part in model.named_modules() if _looks_beside(part)]
        if beside:
            raise LoopError(
                asked,
                f"Its {beside[0] or 'whole'} is a {type(model.get_submodule(beside[0])).__name__}, which goes from one "
                "position to the next: at the edge of a slice it would find nothing.",
                "let positions meet in attention alone, or --set parallel.context=1",
            )
        if sequence is None:
            buffers = [f"{name} {tuple(b.shape)}" for name, b in model.named_buffers()]
            raise LoopError(
                asked,
                "Nobody has said what of it goes with positions (a table of angles, an embedding of them). Its buffers "
                f"are: {', '.join(buffers[:6]) or 'none'}.",
                'run.place(..., sequence=unisono.SequenceDims(positions={"cos": 0})) with their names and dims, or '
                "unisono.SequenceDims() if nothing does.",
            )
        if self._batch is not None and self._batch.batch != sequence.batch:
            raise LoopError(
                asked,
                f"Its batches are divided by {sequence.batch}, those of another model by {self._batch.batch}.",
                "a batch is divided before any model sees it: say the same for all of them.",
            )
        self._batch = sequence
        return sequence

    def _note(self, *_: Any) -> None:
        self._went = True

    @contextmanager
    def part(self, batch: Any) -> Iterator[Any]:
        """This process's slice of a batch. What is computed meanwhile, backward included, is computed for slices."""
        if self.group.size == 1:
            yield batch
            return
        self.now, mine = divide(batch, self._batch.batch if self._batch else None, self.group)
        self._went = self._met = False
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention's own kernel, in eval mode
        F.scaled_dot_product_attention = self.attend  # type: ignore[assignment]
        F.multi_head_attention_forward = _multi_head
        try:
            yield mine
        finally:
            self.close()
        if self._went and not self._met:
            raise LoopError(
                f"A model was to compute slices of sequences, with parallel.context = {self.group.size}.",
                "Its forward pass never called F.scaled_dot_product_attention, so its positions have not met: it has "
                "attention of its own, or has imported that function by its bare name.",
                "write F.scaled_dot_product_attention(...) with `import torch.nn.functional as F` (a Hugging Face "
                'model: attn_implementation="sdpa"), or --set parallel.context=1',
            )

    def close(self) -> None:
        """Attention is torch's own again; closing twice changes nothing."""
        if self.now is None:
            return
        self.now = None
        torch.backends.mha.set_fastpath_enabled(self._fast)
        F.scaled_dot_product_attention = torchs_attention
        F.multi_head_attention_forward = torchs_multi_head

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """F.scaled_dot_product_attention of whole sequences, of which this process has a slice: what it returns for
        these positions. Every process of the axis must call it.

        query      [..., heads, positions here, width]; key and value may have fewer heads
        attn_mask  of the whole length in both positions; or [..., 1, positions here], if it only hides keys
        """
        if self.now is None:
            return torchs_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self._met = True
        group, lengths = self.group, list(self.now.lengths)
        self._check(query, key)
        mask = None if attn_mask is None else self._whole_mask(attn_mask, query)
        ours = [_as_computed(t) for t in (query, self._enough_heads(key), self._enough_heads(value))]
        with wrap_peer_errors("An attention in slices"):
            q, k, v = AllToAll.apply(group, lengths, True, *ours)
            seen = torchs_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            (out,) = AllToAll.apply(group, lengths, False, seen)
        return out

    def _check(self, query: Tensor, key: Tensor) -> None:
        assert self.now is not None
        here, size = self.now.lengths[self.group.rank], self.group.size
        if (query.shape[-2], key.shape[-2]) != (here, here):
            raise LoopError(
                f"An attention from {query.shape[-2]} to {key.shape[-2]} positions was to be computed in slices.",
                f"The sequences of this micro-batch have {self.now.length} positions, of which {here} are here.",
                "with parallel.context every attention goes from such a sequence to itself (not to another one, and "
                "without positions that the model adds); or --set parallel.context=1",
            )
        heads = query.shape[-3] if query.dim() > 2 else 1
        if heads % size:
            fits = max(n for n in range(1, size) if heads % n == 0)
            raise LoopError(
                f"An attention of {heads} heads was to be computed with parallel.context = {size}.",
                f"Each process computes whole heads, and {heads} is no multiple of {size}.",
                f"--set parallel.context={fits}, or a model whose attention has {-(-heads // size) * size} heads.",
            )

    def _enough_heads(self, tensor: Tensor) -> Tensor:
        """Grouped keys or values, each repeated as often as it takes for every process to have those of its queries."""
        times = self.group.size // math.gcd(tensor.shape[-3], self.group.size)
        return tensor if times == 1 else tensor.repeat_interleave(times, -3)

    def _whole_mask(self, mask: Tensor, query: Tensor) -> Tensor:
        """The mask of all positions for our heads."""
        assert self.now is not None
        length, here, size = self.now.length, self.now.lengths[self.group.rank], self.group.size
        rows, columns = mask.shape[-2:] if mask.dim() > 1 else (1, mask.shape[-1])
        if rows == 1 and not mask.requires_grad and (length == 1 or columns == here != length):
            mask, columns = self._gathered(mask[..., :here].reshape(*mask.shape[:-2], 1, -1)), length
        if rows not in (1, length) or columns != length:
            raise LoopError(
                f"An attention was given a mask of {rows} x {columns} positions, to be computed in slices.",
                f"The sequences of this micro-batch have {length} positions, of which {here} are here.",
                "make the mask for all positions of a sequence, or say is_causal=True; what it is made of must not be "
                'divided: unisono.SequenceDims(batch={"tokens": 1}) names what is.',
            )
        if mask.dim() > 2 and mask.shape[-3] == query.shape[-3]:
            mask = mask.chunk(size, -3)[self.group.rank]
        return mask

    def _gathered(self, mask: Tensor) -> Tensor:
        """A mask [..., 1, positions here] of keys, for all of them."""
        flat, lengths = mask.reshape(-1).contiguous(), self.now.lengths if self.now else ()
        shape = mask.shape[:-1]
        sizes = [math.prod(shape) * length for length in lengths]
        theirs = self.group.all_to_all(flat.repeat(self.group.size), [len(flat)] * self.group.size, sizes)
        return torch.cat([part.view(*shape, -1) for part in theirs.split(sizes)], -1)


def _looks_beside(part: nn.Module) -> bool:
    """Does it compute a position from those beside it?"""
    return isinstance(part, nn.RNNBase) or (isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1)


def _as_computed(tensor: Tensor) -> Tensor:
    """As autocast would hand it to attention, if that is on: half as much travels."""
    if not torch.is_autocast_enabled(tensor.device.type) or tensor.dtype is not torch.float32:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """nn.MultiheadAttention's own forward, unless it is asked for its weights, which it computes by hand."""
    if kwargs.get("need_weights", True):
        raise LoopError(
            "An nn.MultiheadAttention was to be computed in slices of sequences, with its weights.",
            "They are those of all positions, of which a slice is here.",
            "call it with need_weights=False, or --set parallel.context=1",
        )
    return torchs_multi_head(*args, **kwargs)
