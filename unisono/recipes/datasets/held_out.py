"""Choose validation samples by a hash of their names, which does not depend on their order or on other samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

HASH_RANGE = 2**64


def keyed_hash(name: str, key: str) -> int:
    """Return a hash of `name`, uniform in [0, HASH_RANGE). Each `key` gives a hash function of its own."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8, key=key.encode()).digest()
    return int.from_bytes(digest)


def held_out(names: Iterable[str], fraction: float, key: str) -> set[str]:
    """Return this fraction of the names, at least one: those with the smallest hashes."""
    ranked = sorted(names, key=lambda name: keyed_hash(name, key))
    return set(ranked[: max(1, round(fraction * len(ranked)))])
