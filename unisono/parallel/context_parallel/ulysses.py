"""Context parallelism: each process of the axis has a slice of every sequence; slices meet only in attention (Ulysses).

Everything that a transformer does to one position at a time, a process does to its own positions. Attention needs all
positions, but each head by itself. So an all-to-all before attention gives each process all positions of its part of
the heads, and a second one after it brings the positions back (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509):

             positions  heads                 positions 0 1 2 3             positions  heads
    process 0    0 1   [a][b]  all-to-all  head a  [a a a a]   all-to-all      0 1   [a][b]
    process 1    2 3   [a][b]  --------->  head b  [b b b b]   --------->      2 3   [a][b]

Backward makes the same exchanges in the opposite direction. Between the two, attention is torch's own and sees whole
sequences: causal or with a mask, with dropout, grouped heads, on any device. Each process sends four activations of its
slice for each layer (query, key, value, output), without its own part of them; with twice the processes each sends half
of that.

All attention must call F.scaled_dot_product_attention. It is replaced while slices are computed, backward included,
because recomputation (torch.utils.checkpoint) may call attention again, on an accelerator in a thread of autograd. A
torch.overrides mode would also see a function that a script has imported by its bare name, but neither other threads
nor the inside of nn.MultiheadAttention; so a forward pass that never calls attention here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.errors import LoopError
from unisono.parallel.context_parallel.sequence_split import SequenceCut, SequenceDims, divide, slice_along

torch_attention = F.scaled_dot_product_attention
torch_multi_head = F.multi_head_attention_forward


class AllToAll(torch.autograd.Function):
    """Exchange tensors [..., heads, positions, width] between slices and heads.

    With `to_heads`, from our positions of all heads to all positions of our heads; otherwise back. `lengths` is the
    number of positions of each process.
    """

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, lengths: list[int], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = group, lengths, not to_heads
        ranks, here, kinds = range(group.size), lengths[group.rank], len(tensors)
        cuts = [t.chunk(group.size, -3) if to_heads else t.split(lengths, -2) for t in tensors]
        sent = [cut[peer].reshape(-1) for peer in ranks for cut in cuts]  # all for process 0, then all for 1, ...
        shapes = [_with_length(cut[0], lengths[peer] if to_heads else here) for peer in ranks for cut in cuts]
        sent_sizes, received_sizes = list(map(len, sent)), list(map(math.prod, shapes))
        flat = group.all_to_all(torch.cat(sent), _sums(sent_sizes, kinds), _sums(received_sizes, kinds))
        received = [part.view(shape) for part, shape in zip(flat.split(received_sizes), shapes, strict=True)]
        return tuple(torch.cat(received[kind::kinds], -2 if to_heads else -3) for kind in range(kinds))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *AllToAll.apply(*ctx.back, *gradients)


def _with_length(part: Tensor, length: int) -> tuple[int, ...]:
    """Return the shape of `part` with another number of positions."""
    return *part.shape[:-2], length, part.shape[-1]


def _sums(sizes: list[int], kinds: int) -> list[int]:
    """Return the size of all tensors together for each process."""
    return [sum(sizes[first : first + kinds]) for first in range(0, len(sizes), kinds)]


class ContextParallel:
    """Split the sequences of a run over the processes of the axis `context`.

    Attributes:
        group: These processes.
        cut: How the micro-batch that is computed now is split; None: sequences are whole.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.cut: SequenceCut | None = None
        self._dims: SequenceDims | None = None  # how batches are split
        self._called = self._attended = False  # since `cut` was set: was a model called, did it call attention?
        self._fastpath = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return self  # a copy of a model is of the same run

    def add(self, model: nn.Module, sequence: SequenceDims | None) -> None:
        """Register a model that was placed. Raise LoopError if its sequences cannot be split."""
        if sequence is not None:
            sequence.check(model)
        if self.group.size == 1:
            return
        sequence = self._checked_dims(model, sequence)
        slice_along(model, sequence.positions, self.group.rank, lambda: self.cut)
        model.register_forward_pre_hook(self._note_call)

    def _checked_dims(self, model: nn.Module, sequence: SequenceDims | None) -> SequenceDims:
        error = f"Cannot split the sequences of a {type(model).__name__} (parallel.context = {self.group.size})."
        norms = [name for name, part in model.named_modules() if isinstance(part, _BatchNorm)]
        if norms:
            raise LoopError(
                error,
                f"{len(norms)} of its parts are batch norms (the first is {norms[0] or 'itself'}), which would see the "
                "positions of one slice only.",
                "use LayerNorm, RMSNorm or GroupNorm, or --set parallel.context=1",
            )
        sequential = [name for name, part in model.named_modules() if _mixes_positions(part)]
        if sequential:
            raise LoopError(
                error,
                f"Its {sequential[0] or 'whole'} is a {type(model.get_submodule(sequential[0])).__name__}, which "
                "computes a position from its neighbors: at the end of a slice these are on another process.",
                "let positions meet in attention only, or --set parallel.context=1",
            )
        if sequence is None:
            buffers = [f"{name} {tuple(b.shape)}" for name, b in model.named_buffers()]
            raise LoopError(
                error,
                "run.place needs to know which of its tensors have a row for each position (a table of angles, an "
                f"embedding of positions). Its buffers are: {', '.join(buffers[:6]) or 'none'}.",
                'run.place(..., sequence=unisono.SequenceDims(positions={"cos": 0})) with their names and dims, or '
                "unisono.SequenceDims() if none has.",
            )
        if self._dims is not None and self._dims.batch != sequence.batch:
            raise LoopError(
                error,
                f"Its batches are split by {sequence.batch}, those of another model by {self._dims.batch}.",
                "a batch is split before any model sees it: pass the same for all models.",
            )
        self._dims = sequence
        return sequence

    def _note_call(self, *_: Any) -> None:
        self._called = True

    @contextmanager
    def part(self, batch: Any) -> Iterator[Any]:
        """Yield this process's slice of a batch. Within the block, models and backward compute slices."""
        if self.group.size == 1:
            yield batch
            return
        self.cut, own = divide(batch, self._dims.batch if self._dims else None, self.group)
        self._called = self._attended = False
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention's own kernel, in eval mode
        F.scaled_dot_product_attention = self.attend  # type: ignore[assignment]
        F.multi_head_attention_forward = _multi_head
        try:
            yield own
        finally:
            self.close()
        if self._called and not self._attended:
            raise LoopError(
                f"A model did not call F.scaled_dot_product_attention (parallel.context = {self.group.size}).",
                "So its positions have not met: it has attention of its own, or has imported that function by its bare "
                "name.",
                "write F.scaled_dot_product_attention(...) with `import torch.nn.functional as F` (a Hugging Face "
                'model: attn_implementation="sdpa"), or --set parallel.context=1',
            )

    def close(self) -> None:
        """Restore torch's attention; closing twice changes nothing."""
        if self.cut is None:
            return
        self.cut = None
        torch.backends.mha.set_fastpath_enabled(self._fastpath)
        F.scaled_dot_product_attention = torch_attention
        F.multi_head_attention_forward = torch_multi_head

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
        """Compute F.scaled_dot_product_attention of whole sequences, and return the result for this process's slice.

        Every process of the axis must call it.

        Args:
            query: [..., heads, positions here, width]; key and value may have fewer heads.
            key: As query.
            value: As query.
            attn_mask: A mask of the whole length in both positions; or [..., 1, positions here], if it only hides keys.
            dropout_p: As in torch.
            is_causal: As in torch.
            scale: As in torch.
            enable_gqa: As in torch.
        """
        if self.cut is None:
            return torch_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self._attended = True
        group, lengths = self.group, list(self.cut.lengths)
        self.check_shapes(query, key)
        mask = None if attn_mask is None else self._whole_mask(attn_mask, query)
        inputs = [_autocast(t) for t in (query, self._repeat_heads(key), self._repeat_heads(value))]
        with wrap_peer_errors("An attention in slices"):
            q, k, v = AllToAll.apply(group, lengths, True, *inputs)
            attended = torch_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            (out,) = AllToAll.apply(group, lengths, False, attended)
        return out

    def check_shapes(self, query: Tensor, key: Tensor) -> None:
        """Raise LoopError for an attention that cannot be split."""
        assert self.cut is not None
        here, size = self.cut.lengths[self.group.rank], self.group.size
        if (query.shape[-2], key.shape[-2]) != (here, here):
            raise LoopError(
                f"Cannot split an attention from {query.shape[-2]} to {key.shape[-2]} positions over {size} processes.",
                f"The sequences of this micro-batch have {self.cut.length} positions, of which {here} are here.",
                "with parallel.context every attention goes from such a sequence to itself (not to another one, and "
                "without positions that the model adds); or --set parallel.context=1",
            )
        heads = query.shape[-3] if query.dim() > 2 else 1
        if heads % size:
            fits = max(n for n in range(1, size) if heads % n == 0)
            raise LoopError(
                f"Cannot divide {heads} heads of attention over parallel.context = {size} processes.",
                f"Each process computes whole heads, and {heads} is no multiple of {size}.",
                f"--set parallel.context={fits}, or a model whose attention has {-(-heads // size) * size} heads.",
            )

    def _repeat_heads(self, tensor: Tensor) -> Tensor:
        """Repeat grouped keys or values until every process has those of its queries."""
        times = self.group.size // math.gcd(tensor.shape[-3], self.group.size)
        return tensor if times == 1 else tensor.repeat_interleave(times, -3)

    def _whole_mask(self, mask: Tensor, query: Tensor) -> Tensor:
        """Return the mask of all positions for our heads."""
        assert self.cut is not None
        length, here, size = self.cut.length, self.cut.lengths[self.group.rank], self.group.size
        rows, columns = mask.shape[-2:] if mask.dim() > 1 else (1, mask.shape[-1])
        if rows == 1 and not mask.requires_grad and (length == 1 or columns == here != length):
            mask, columns = self._gather_mask(mask[..., :here].reshape(*mask.shape[:-2], 1, -1)), length
        if rows not in (1, length) or columns != length:
            raise LoopError(
                f"A mask of {rows} x {columns} positions does not fit an attention in slices.",
                f"The sequences of this micro-batch have {length} positions, of which {here} are here.",
                "make the mask for all positions of a sequence, or pass is_causal=True. The batch's tensors that it is "
                'made of must not be split: unisono.SequenceDims(batch={"tokens": 1}) names those that are.',
            )
        if mask.dim() > 2 and mask.shape[-3] == query.shape[-3]:
            mask = mask.chunk(size, -3)[self.group.rank]
        return mask

    def _gather_mask(self, mask: Tensor) -> Tensor:
        """Gather a mask of keys [..., 1, positions here] for all positions."""
        flat, lengths = mask.reshape(-1).contiguous(), self.cut.lengths if self.cut else ()
        shape = mask.shape[:-1]
        sizes = [math.prod(shape) * length for length in lengths]
        parts = self.group.all_to_all(flat.repeat(self.group.size), [len(flat)] * self.group.size, sizes)
        return torch.cat([part.view(*shape, -1) for part in parts.split(sizes)], -1)


def _mixes_positions(part: nn.Module) -> bool:
    """Return whether a module computes a position from its neighbors."""
    return isinstance(part, nn.RNNBase) or (isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1)


def _autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast would cast it for attention, if that is on: half as many bytes are sent."""
    if not torch.is_autocast_enabled(tensor.device.type) or tensor.dtype is not torch.float32:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """Run nn.MultiheadAttention's own forward. Refuse to return weights, which it computes by hand."""
    if kwargs.get("need_weights", True):
        raise LoopError(
            "nn.MultiheadAttention cannot return its weights with parallel.context.",
            "They are those of all positions, and this process has a slice.",
            "call it with need_weights=False, or --set parallel.context=1",
        )
    return torch_multi_head(*args, **kwargs)
