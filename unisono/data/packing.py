"""Packing: blocks of a fixed length from samples of many lengths, such as documents of tokens.

A block is a sample of its own, so everything else is as for other data: order, resume, placement, evaluation. It
follows from its number and the lengths of the samples, and the run keeps no other state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unisono.config.wording import plural
from unisono.data.mixture import Mixture
from unisono.data.prepared import OnError, PreparedDataset, layout_of, prepare, read_samples, shape_of
from unisono.data.rng import preserve_rng
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError
from unisono.plan.batch_order import cut_batch
from unisono.plan.mixing.mixture_order import SourceLayout
from unisono.plan.packing.block_plan import CutBlocks, FitBlocks, Piece, cut_blocks, fit_blocks

TOKENS = "input_ids"
"""Key of the tokens of a sample that is not a dict."""

DOCUMENTS, POSITIONS = "document_ids", "position_ids"
NO_TARGET = -100
"""Target that torch.nn.functional.cross_entropy ignores."""

GROUP = 10_000
"""Samples of a map-style data set that are packed together, where samples are kept whole."""

MEASURED = 256
"""Samples that are read at once while lengths are measured."""

KEPT = 8
"""Shards whose blocks are kept."""


class Packed(PreparedDataset):
    """Blocks of a fixed length from samples of many lengths. Pass it to `run.steps` like any other data set.

    A sample is a sequence of tokens (a list, a tensor or an array), or a dict of sequences of one length. A block is a
    dict of tensors of `length` elements:

    - each key of the samples; for samples without keys, `input_ids`
    - `document_ids`: 0, 1, 2, ... for each sample within the block; -1 where the block is filled up
    - `position_ids`: the position within the sample, or within the part of it that is in this block

    Args:
        data: a map-style data set or a Stream. The length of a sample must not depend on random numbers.
        length: of a block.
        keep_whole: True: a sample is divided only if it is longer than a block. False: all blocks but the last one of
            a shard are full, and samples are divided where a block ends.
        fill: the value of each key where a block is filled up, by default 0; -100 for `labels`.
        lengths: the length of each sample, if it is known, or a file in which they are kept. Otherwise, all samples
            are read once when the run starts, a part on each process.
    """

    def __init__(
        self,
        data: Any,
        length: int,
        *,
        keep_whole: bool = False,
        fill: Mapping[str, int] | None = None,
        lengths: Sequence[int] | str | Path | None = None,
    ) -> None:
        if length < 1:
            raise DataError(f"The length of a block cannot be {length}.", "It is a number of tokens.", "length=2048")
        if isinstance(data, (Mixture, Packed)):
            kind = type(data).__name__
            do = "unisono.Mixture({'a': unisono.Packed(a, 2048), ...}, weights=...)"
            raise DataError(f"A {kind} cannot be packed.", "Its samples have no order of their own.", do)
        self.data, self.length, self.keep_whole = data, length, keep_whole
        self.fill = {"labels": NO_TARGET, **(fill or {})}
        self.path = Path(lengths) if isinstance(lengths, (str, Path)) else None
        self._lengths = None if lengths is None or self.path else np.asarray(lengths, dtype=np.int64)
        self._blocks: tuple[int, ...] = ()  # of each shard
        self._plan = lru_cache(maxsize=KEPT)(self._build)

    # -- lengths

    def prepare(self, group: ProcessGroup, on_error: OnError, note: Callable[[str], None]) -> None:
        """Prepare the data: see PreparedDataset. Collective."""
        prepare(self.data, group, on_error, note)
        if self._blocks:
            return
        if self._lengths is None:
            found = group.all_gather_object(self._read_lengths() if group.rank == 0 else None)[0]
            if found is None:
                note(f"measuring the lengths of {plural(len(self.data), 'sample')}")
                part = self._measure(*cut_batch(len(self.data), group.size, group.rank))
                found = [length for lengths in group.all_gather_object(part.tolist()) for length in lengths]
                if group.rank == 0:
                    self._write_lengths(found)
            self._lengths = np.asarray(found, dtype=np.int64)
        self._set_blocks()

    def _set_blocks(self) -> None:
        assert self._lengths is not None
        if len(self._lengths) != len(self.data):
            raise DataError(
                f"There are lengths of {len(self._lengths)} samples, and the data has {len(self.data)}.",
                "They are used to find the samples of a block.",
                f"remove {self.path}, and the lengths are measured again." if self.path else "Packed(data, length)",
            )
        self._blocks = tuple(len(self._plan(shard)) for shard in range(len(self._shards())))

    def _measure(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the lengths of samples [first, last), which are read."""
        lengths = np.zeros(last - first, dtype=np.int64)
        with preserve_rng(torch.device("cpu")):  # what the script draws next must not depend on it
            for begin in range(first, last, MEASURED):
                numbers = range(begin, min(begin + MEASURED, last))
                for number, sample in read_samples(self.data, numbers).items():  # a damaged sample has no tokens
                    lengths[number - first] = self._length_of(sample, number)
        return lengths

    def _write_lengths(self, lengths: list[int]) -> None:
        if self.path is None:
            return
        about = {"data": str(shape_of(self.data, len(lengths))), "lengths": lengths}
        draft = self.path.with_name(f"{self.path.name}.draft")
        try:
            draft.write_text(json.dumps(about), encoding="utf-8")
            draft.replace(self.path)
        except OSError as error:
            do = "give a file that can be written, or none."
            raise DataError(f"Cannot write the lengths to {self.path}.", f"{error.strerror}.", do) from None

    def _read_lengths(self) -> list[int] | None:
        """Return the lengths in the file; None if there is none, or if it is of other data."""
        try:
            about = json.loads(self.path.read_bytes()) if self.path is not None else {}
            if about.get("data") == str(shape_of(self.data, len(self.data))):
                return list(map(int, about["lengths"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            facts = f"{type(error).__name__}: {error}"
            raise DataError(f"Cannot read the lengths in {self.path}.", facts, f"rm {self.path}") from None
        return None

    def _length_of(self, sample: Any, number: int) -> int:
        sizes = {name: len(values) for name, values in _named(sample).items()}
        if len(set(sizes.values())) > 1:
            fact = f"They have {', '.join(f'{size} ({name})' for name, size in sizes.items())} elements."
            do = "return sequences of one length; other keys cannot be packed."
            raise DataError(f"The sequences of sample {number} have different lengths.", fact, do)
        return next(iter(sizes.values()))

    def _shards(self) -> tuple[int, ...]:
        layout = layout_of(self.data)
        return layout.shards or (layout.length,)

    def _build(self, shard: int) -> CutBlocks | FitBlocks:
        """Return the blocks of a shard; sample numbers are those within the shard."""
        assert self._lengths is not None
        shards = self._shards()
        first = sum(shards[:shard])
        lengths = self._lengths[first : first + shards[shard]]
        if not self.keep_whole:
            return cut_blocks(lengths, self.length)
        layout = layout_of(self.data)
        return fit_blocks(lengths, self.length, layout.window if layout.shards else GROUP)

    # -- a prepared data set

    def __len__(self) -> int:
        if not self._blocks:
            if self._lengths is None:
                self._lengths = self._measure(0, len(self.data))
            self._set_blocks()
        return sum(self._blocks)

    @property
    def shape(self) -> str:
        """Describe everything that the order of the samples depends on."""
        digest = hashlib.sha256(repr((self._blocks, self._lengths_digest())).encode()).hexdigest()[:8]
        kind = "whole samples" if self.keep_whole else "cut samples"
        return f"{len(self)} blocks of {self.length} ({kind}, {digest}) from {shape_of(self.data, len(self.data))}"

    def _lengths_digest(self) -> str:
        assert self._lengths is not None
        return hashlib.sha256(self._lengths.tobytes()).hexdigest()

    def layout(self) -> SourceLayout:
        """Return how the samples are stored."""
        inner = layout_of(self.data)
        if not inner.shards:
            return SourceLayout(len(self))
        window = max(1, -(-inner.window * len(self) // max(inner.length, 1)))
        return SourceLayout(len(self), self._blocks, window)

    def _pieces(self, number: int) -> list[Piece]:
        """Return the pieces of a block; their samples are numbers in the data."""
        ends = np.cumsum(self._blocks)
        shard = int(np.searchsorted(ends, number, side="right"))
        first = sum(self._shards()[:shard])
        pieces = self._plan(shard)[number - int(ends[shard]) + self._blocks[shard]]
        return [Piece(first + piece.sample, piece.begin, piece.end) for piece in pieces]

    def read(self, numbers: Sequence[int]) -> Mapping[int, Any]:
        """Return the samples of these numbers, without those that are damaged and skipped."""
        pieces = {number: self._pieces(number) for number in numbers}
        wanted = sorted({piece.sample for block in pieces.values() for piece in block})
        samples = read_samples(self.data, wanted)
        return {number: self._block(block, samples) for number, block in pieces.items()}

    def name_of(self, number: int) -> str:
        """Return where a sample is stored, for messages."""
        first = self._pieces(number)[0].sample
        inner = self.data.name_of(first) if isinstance(self.data, PreparedDataset) else f"sample {first}"
        return f"block {number}, which begins in {inner}"

    def _block(self, pieces: Sequence[Piece], samples: Mapping[int, Any]) -> dict[str, torch.Tensor]:
        block: dict[str, torch.Tensor] = {}
        documents = torch.full((self.length,), -1, dtype=torch.int64)
        positions = torch.zeros(self.length, dtype=torch.int64)
        at = 0
        for document, piece in enumerate(pieces):
            size = piece.end - piece.begin
            for name, values in _named(samples[piece.sample]).items():
                self._check(piece, values)
                part = torch.as_tensor(values[piece.begin : piece.end])
                if name not in block:
                    shape = (self.length, *part.shape[1:])
                    block[name] = torch.full(shape, self.fill.get(name, 0), dtype=part.dtype)
                block[name][at : at + size] = part
            documents[at : at + size] = document
            positions[at : at + size] = torch.arange(size)
            at += size
        return {**block, DOCUMENTS: documents, POSITIONS: positions}

    def _check(self, piece: Piece, values: Any) -> None:
        assert self._lengths is not None
        if len(values) != (wanted := int(self._lengths[piece.sample])):
            raise DataError(
                f"Sample {piece.sample} has {len(values)} tokens, and had {wanted} when it was measured.",
                "Blocks are planned from the lengths, which must not change or depend on random numbers.",
                "use the same tokenizer and the same map" + (f", or remove {self.path}." if self.path else "."),
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plan = lru_cache(maxsize=KEPT)(self._build)


def _named(sample: Any) -> Mapping[str, Any]:
    """Return the sequences of a sample by name."""
    named = sample if isinstance(sample, Mapping) else {TOKENS: sample}
    for name, values in named.items():
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
            raise DataError(
                f"A sample to pack has a {type(values).__name__} under {name}.",
                "Each value must be a sequence of numbers.",
                "return only such values from `map`: Stream.tar(..., map=tokens)",
            )
    return named


# -- what a model needs to keep documents apart


def next_tokens(input_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
    """Return the target of each position: the next token of its document; -100 where there is none.

    Args:
        input_ids: tokens, [batch, length].
        document_ids: of the same shape, as a Packed data set returns them.
    """
    targets = torch.full_like(input_ids, NO_TARGET)
    same = (document_ids[..., 1:] == document_ids[..., :-1]) & (document_ids[..., 1:] >= 0)
    targets[..., :-1] = torch.where(same, input_ids[..., 1:], targets[..., :-1])
    return targets


def document_mask(document_ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Return which positions attend to which, block-diagonal: bool, [batch, 1, length, length].

    It is an attn_mask of torch.nn.functional.scaled_dot_product_attention. A position that is filled up attends to
    itself alone, so that no row is empty.

    Args:
        document_ids: [batch, length].
        causal: whether a position attends only to those before it.
    """
    length = document_ids.shape[-1]
    rows, columns = document_ids[..., :, None], document_ids[..., None, :]
    mask = (rows == columns) & (rows >= 0)
    if causal:
        mask &= torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    mask |= torch.eye(length, dtype=torch.bool, device=document_ids.device)
    return mask[..., None, :, :]


def document_bounds(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bounds of all documents of a batch, and the longest length: cu_seqlens and max_seqlen of kernels.

    The places at which a block is filled up count as a document. The kernels take the blocks one after the other,
    [batch * length].

    Args:
        document_ids: [batch, length].
    """
    flat = document_ids.reshape(-1)
    changes = torch.ones(flat.numel() + 1, dtype=torch.bool, device=flat.device)
    changes[1:-1] = flat[1:] != flat[:-1]
    changes[:: document_ids.shape[-1]] = True  # a block ends a document
    bounds = changes.nonzero().reshape(-1).to(torch.int32)
    return bounds, int((bounds[1:] - bounds[:-1]).max())
