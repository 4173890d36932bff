"""Read the lines of a timeline, without those that a crash or a full disk has damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.json_forms import Form, fits, is_count, is_number, is_object, is_size, is_text, list_of, maybe, object_of
from unisono.monitor.timeline import decode


def is_span(value: Any) -> bool:
    """Return whether a value is [low, high] of counts."""
    return list_of(is_count)(value) and len(value) == 2 and bool(value[0] <= value[1])


STEP: Mapping[str, Form] = {
    "n": is_size,
    "seconds": object_of(is_number),
    **dict.fromkeys(("wait", "cpu", "gc", "samples", "weight"), is_number),
    "log": is_object,
}

EVENT: Mapping[str, Form] = {
    **dict.fromkeys(("step", "checkpoint", "resumed_at", "pid"), is_count),
    **dict.fromkeys(("event", "media", "name", "file", "host", "device"), is_text),
    "t": is_number,
    "total": maybe(is_count),
    "counts": list_of(is_number),
    "edges": list_of(is_number),
}

NEEDED: Mapping[str, Mapping[str, Form]] = {
    "start": {"t": is_number},
    "assignment": {"step": is_count, "virtual_ranks": is_span},
    "death": {"t": is_number, "step": is_count, "ranks": list_of(is_count)},
    "join": {"step": is_count, "ranks": list_of(is_count)},
}
"""What events of some kinds must have."""

NEEDED_BY_MEDIA: Mapping[str, Form] = {"name": is_text, "step": is_count}

BLOCK: Mapping[str, Form] = {
    "bytes": is_span,
    "steps": is_span,
    "t": lambda value: list_of(is_number)(value) and len(value) == 2,
    "n": is_size,
    "us": list_of(is_number),
    "longest": is_number,
}
"""What a block of a timeline must have."""


def valid_line(line: bytes) -> dict[str, Any] | None:
    """Return a line of a timeline, as `timeline.decode` does; None for a line that is damaged."""
    try:
        entry = decode(line)
    except (OverflowError, RecursionError):
        return None
    return entry if entry is not None and is_valid(entry) else None


def is_valid(entry: Mapping[str, Any]) -> bool:
    """Return whether a line, as `timeline.decode` returns it, has the form that timeline.py and its callers write."""
    if "seconds" in entry:
        return is_count(entry.get("step")) and is_number(entry.get("t")) and fits(entry, STEP)
    needed = NEEDED_BY_MEDIA if "media" in entry else NEEDED.get(str(entry.get("event")), {})
    return fits(entry, EVENT) and all(name in entry and form(entry[name]) for name, form in needed.items())


def is_valid_block(block: Mapping[str, Any]) -> bool:
    """Return whether a block (timeline_blocks.py) has its form. Lines of other blocks are read from the timeline."""
    return BLOCK.keys() <= block.keys() and fits(block, {**BLOCK, **STEP, "events": list_of(is_object)})
