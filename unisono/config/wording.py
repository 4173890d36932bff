"""Words for messages: the name that was probably meant, how many of a thing there are, and how many bytes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The known name that was probably meant: the same last part, or nearly the same letters."""
    names = list(names)
    same_end = [other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = difflib.get_close_matches(name, names, 1, 0.6)
    ends = {other.rpartition(".")[2]: other for other in names}
    near_end = difflib.get_close_matches(name.rpartition(".")[2], ends, 1, 0.75)
    return next(iter(same_end + near + [ends[end] for end in near_end]), None)


def plural(count: int, one: str, many: str = "") -> str:
    """1 step, 2 steps."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def size(num_bytes: float) -> str:
    """412 MB, 1.24 GB: three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB" if num_bytes < 999.5 else f"{num_bytes:.0f} TB"
