"""Blocks of a fixed length from samples of many lengths: which parts of which samples each block has.

Samples are packed in the order in which they are stored, once: a block is the same in every epoch, and the blocks are
what is shuffled. So a block follows from its number and the lengths.

    cut     samples  | a a a a a | b b | c c c c |      length 4
            blocks   | a a a a | a b b c | c c c . |    only the last block of a shard is short

    fit     samples  | a a a a a | b b | c c c c |      a sample that is too long is divided into pieces first
            blocks   | a a a a | c c c c | a b b . |    no other sample is divided

`fit` is best fit, decreasing, within a group of consecutive samples: the longest piece first, each into the fullest
block that has room (Ding et al. 2024, Fewer Truncations Improve Language Modeling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """A part of a sample: its number, and the bounds [begin, end) within it."""

    sample: int
    begin: int
    end: int


@dataclass(frozen=True)
class CutBlocks:
    """Blocks that are full, with samples that are divided where a block ends.

    Attributes:
        ends: the sum of the lengths up to the end of each sample.
        length: of a block.
    """

    ends: Lengths
    length: int

    def __len__(self) -> int:
        return -(-int(self.ends[-1]) // self.length) if len(self.ends) else 0

    def __getitem__(self, number: int) -> list[Piece]:
        begin, pieces = number * self.length, []
        end = min(begin + self.length, int(self.ends[-1]))
        sample = int(np.searchsorted(self.ends, begin, side="right"))
        while begin < end:
            first = int(self.ends[sample - 1]) if sample else 0
            last = min(int(self.ends[sample]), end)
            if last > begin:
                pieces.append(Piece(sample, begin - first, last - first))
            begin, sample = last, sample + 1
        return pieces


@dataclass(frozen=True)
class FitBlocks:
    """Blocks of whole samples.

    Attributes:
        blocks: the pieces of each block, in the order of the samples.
    """

    blocks: tuple[tuple[Piece, ...], ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> list[Piece]:
        return list(self.blocks[number])


def cut_blocks(lengths: Lengths, length: int) -> CutBlocks:
    """Return the blocks of samples of these lengths, which are divided where a block ends."""
    return CutBlocks(np.cumsum(lengths, dtype=np.int64), length)


def fit_blocks(lengths: Lengths, length: int, group: int) -> FitBlocks:
    """Return the blocks of samples of these lengths, each within one block if it fits into one.

    Args:
        lengths: of the samples.
        length: of a block.
        group: samples that are packed together. A block has samples of one group.
    """
    blocks: list[tuple[Piece, ...]] = []
    for first in range(0, len(lengths), group):
        blocks += _fit_group(lengths[first : first + group], length, first)
    return FitBlocks(tuple(blocks))


def _fit_group(lengths: Lengths, length: int, first: int) -> list[tuple[Piece, ...]]:
    pieces = [
        Piece(first + number, begin, min(begin + length, size))
        for number, size in enumerate(lengths.tolist())
        for begin in range(0, size, length)
    ]
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].begin - pieces[i].end, i))
    blocks: list[list[Piece]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # blocks with this much room
    rooms = 0  # bit r is set if a block has r places left
    for index in order:
        piece = pieces[index]
        size = piece.end - piece.begin
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            block = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            blocks[block].append(piece)
        else:
            room, block = length, len(blocks)
            blocks.append([piece])
        if left := room - size:
            by_room[left].append(block)
            rooms |= 1 << left
    return sorted(tuple(sorted(block)) for block in blocks)
