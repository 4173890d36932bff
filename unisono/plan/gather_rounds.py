"""An all-gather in log2(n) rounds: in each one a process sends all blocks that it has to one other process.

A scatter takes as many rounds: the root sends half of the blocks to one process, then both halve what they have.

A power of two of processes double what they have with a partner. Others pass blocks around a ring, from the process
1, 2, 4, ... places further (Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems, 1997):

    4 processes   round 0: 0 <-> 1, 2 <-> 3        round 1: 0 <-> 2, 1 <-> 3
    3 processes   round 0: 0 <- 1 <- 2 <- 0        round 1: 0 <- 2 <- 1 <- 0

A process receives every block once, so the bytes are the fewest that there can be.
"""

from __future__ import annotations

from typing import NamedTuple


class Blocks(NamedTuple):
    """Consecutive blocks; after the last block of all, the first one follows.

    Attributes:
        first: The number of the first one.
        length: How many.
        of: The number of all blocks.
    """

    first: int
    length: int
    of: int

    def ranges(self) -> list[range]:
        """Return the numbers of these blocks as one or two ranges without a gap."""
        end = self.first + self.length
        if end <= self.of:
            return [range(self.first, end)]
        return [range(self.first, self.of), range(end - self.of)]


class GatherRound(NamedTuple):
    """One round of a process.

    Attributes:
        to: The process to which it sends.
        sent: The blocks that it sends.
        source: The process from which it receives.
        received: The blocks that it receives.
    """

    to: int
    sent: Blocks
    source: int
    received: Blocks


def gather_rounds(place: int, count: int) -> list[GatherRound]:
    """Return the rounds of process `place` of `count`, each of which begins with the block of its own number."""
    found, distance = [], 1
    while distance < count:
        if count & (count - 1):
            to, source = (place - distance) % count, (place + distance) % count
            several = min(distance, count - distance)
            sent, received = Blocks(place, several, count), Blocks(source, several, count)
        else:
            to = source = place ^ distance
            sent, received = (Blocks(each // distance * distance, distance, count) for each in (place, source))
        found.append(GatherRound(to, sent, source, received))
        distance *= 2
    return found


class ScatterRound(NamedTuple):
    """One round of a process in which it takes part.

    Attributes:
        peer: The process with which it communicates.
        blocks: The blocks that move.
        sends: Whether this process sends them.
    """

    peer: int
    blocks: range
    sends: bool


def scatter_rounds(place: int, count: int) -> list[ScatterRound]:
    """Return the rounds in which process 0 of `count` gives each its block; in reverse, those of a gather."""
    found = []
    for bit in reversed(range((count - 1).bit_length())):
        distance = 1 << bit
        if place % (2 * distance) == 0 and place + distance < count:
            blocks = range(place + distance, min(place + 2 * distance, count))
            found.append(ScatterRound(place + distance, blocks, True))
        elif place % (2 * distance) == distance:
            found.append(ScatterRound(place - distance, range(place, min(place + distance, count)), False))
    return found
