"""Randomness is keyed, not consumed.

A key is a 64-bit number made from the run's seed and the coordinates of what is about to happen (which purpose, which
step, which micro-batch). Whoever computes a micro-batch, in whatever process, worker or year, seeds from the same key.

The mixer is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), chained over
the coordinates. It is ours so that no library's next version can change the order of anybody's data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ORDER, ROUND, INIT, EVALUATE, STEP, UPDATE, SCRIPT, SHARDS = range(1, 9)
"""What a key is for; two purposes never share a stream."""

_MASK = (1 << 64) - 1


def mix(*coordinates: int) -> int:
    """Mix integers (any size; taken modulo 2^64) into one 64-bit key. Order matters: mix(1, 2) != mix(2, 1)."""
    h = 0
    for x in coordinates:
        h = ((h ^ (x & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h


def micro_batch_key(run_key: int, step: int, virtual_rank: int, number: int) -> int:
    """The key of a micro-batch under `run_key`: mix of both, with its place packed into one coordinate.

    Packing is one to one below 2^32 steps, 2^16 virtual ranks and 2^16 micro-batches each.
    """
    return mix(run_key, step << 32 | virtual_rank << 16 | number)


def shuffled(length: int, key: int) -> npt.NDArray[np.int64]:
    """The numbers 0 .. length-1, each sorted by its own key under `key`: a permutation, shape [length].

    Sorting keys is slower than shuffling (about 0.1 s for a million) and costs 24 bytes a sample for that moment, once
    an epoch. In return the order is plain integer arithmetic that can be written down, on any machine.
    """
    return np.argsort(hashed(0, length, key), kind="stable")


def hashed(first: int, last: int, key: int) -> npt.NDArray[np.uint64]:
    """A number of 64 bits for each of first .. last-1 under `key`, shape [last - first]."""
    with np.errstate(over="ignore"):
        h = np.arange(first, last, dtype=np.uint64) ^ np.uint64(key & _MASK)
        h += np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    return h
