"""Parts of messages: the nearest known name, plurals, and sizes in bytes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant: with the same last part, or similar letters."""
    names = list(names)
    same_end = [other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = difflib.get_close_matches(name, names, 1, 0.6)
    ends = {other.rpartition(".")[2]: other for other in names}
    near_end = difflib.get_close_matches(name.rpartition(".")[2], ends, 1, 0.75)
    return next(iter(same_end + near + [ends[end] for end in near_end]), None)


def plural(count: int, one: str, many: str = "") -> str:
    """Return "1 step", "2 steps"."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def size(num_bytes: float) -> str:
    """Return "412 MB", "1.24 GB": three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB" if num_bytes < 999.5 else f"{num_bytes:.0f} TB"
