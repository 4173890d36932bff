"""Keys for random numbers: randomness is keyed, not consumed.

A key is a 64-bit number made of the run's seed and coordinates (the purpose, the step, the micro-batch). Every process
and every worker seeds a micro-batch from the same key, at any time.

The mixer is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), chained over
the coordinates. It is implemented here so that no new version of a library can change the order of samples.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

ORDER, ROUND, INIT, EVALUATE, STEP, UPDATE, SCRIPT, SHARDS, MIXTURE = range(1, 10)
"""Purposes of keys. Two purposes never share a stream of random numbers."""

_MASK = (1 << 64) - 1


def mix(*coordinates: int) -> int:
    """Mix integers (any size; taken modulo 2^64) into one 64-bit key. Order matters: mix(1, 2) != mix(2, 1)."""
    h = 0
    for x in coordinates:
        h = _extend(h, x)
    return h


def _extend(h: int, x: int) -> int:
    """Return the key of h's coordinates with x after them."""
    h = ((h ^ (x & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
    return h ^ (h >> 31)


_mix_one = lru_cache(maxsize=64)(mix)


def micro_batch_key(run_key: int, step: int, virtual_rank: int, number: int) -> int:
    """Return the key of a micro-batch: mix of `run_key` and its position, packed into one coordinate.

    Packing is one to one below 2^32 steps, 2^16 virtual ranks and 2^16 micro-batches each.
    """
    return _extend(_mix_one(run_key), step << 32 | virtual_rank << 16 | number)


def shuffled(length: int, key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of 0 to length - 1, shape [length]: the numbers sorted by their hashes under `key`.

    Sorting is slower than shuffling (about 0.1 s for a million) and takes 24 bytes a sample meanwhile, once an epoch.
    In return the order is plain integer arithmetic, the same on any machine.
    """
    return np.argsort(hashed(0, length, key), kind="stable")


def hashed(first: int, last: int, key: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each of first to last - 1 under `key`, shape [last - first]."""
    with np.errstate(over="ignore"):
        h = np.arange(first, last, dtype=np.uint64) ^ np.uint64(key & _MASK)
        h += np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    return h
