"""Which steps are verified: 0, 1, 2, 4 and 8, then powers of two and the first step of an epoch, with pauses."""

from __future__ import annotations

ALWAYS = (0, 1, 2, 4, 8)
"""Steps, counted from where this run began or was resumed, that are verified whatever the time."""


def is_early(offset: int) -> bool:
    """Return whether the step this many steps after the first one is verified without regard to time."""
    return offset in ALWAYS


def is_candidate(offset: int, *, begins_epoch: bool) -> bool:
    """Return whether a later step is verified if the last verification is long enough ago."""
    return begins_epoch or (offset > 0 and offset & (offset - 1) == 0)
