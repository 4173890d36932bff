"""Numbers as people say them: bandwidths, times, sizes."""

from __future__ import annotations


def megabytes(bytes_per_second: float) -> str:
    """Millions of bytes a second, in three digits."""
    value = bytes_per_second / 1e6
    return f"{value:.0f} MB/s" if value >= 10 else f"{value:.2g} MB/s"


def micros(seconds: float) -> str:
    """A time in the unit that people would use for it."""
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def size_of(count: int) -> str:
    """Bytes, as a size is asked for: a kB is 1024 of them."""
    for unit, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
