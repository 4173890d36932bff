"""Format bandwidths, durations and sizes."""

from __future__ import annotations


def bandwidth(bytes_per_second: float) -> str:
    """Format bytes per second with three digits. 1 MB is a million bytes here."""
    megabytes = bytes_per_second / 1e6
    return f"{megabytes / 1e3:.3g} GB/s" if megabytes >= 1000 else f"{megabytes:.3g} MB/s"


def duration(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    if seconds >= 0.1:
        return f"{seconds:.2g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def size_of(count: int) -> str:
    """Format the size of a tensor as --sizes takes it: 1 kB is 1024 bytes here."""
    for unit, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
