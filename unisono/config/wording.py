"""Parts of messages: the nearest known name, plurals, sizes in bytes, and lines of a width."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "global_batch_size": "batch",
    "micro_batch_size": "micro_batch",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "max_grad_norm": "clip",
    "grad_clip": "clip",
    "num_workers": "loader.workers",
}
"""Settings, by the names that they have in other libraries."""


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant: with the same last part, or similar letters."""
    names = list(names)
    if (ours := OTHER_NAMES.get(name)) in names:
        return ours
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


def wrapped(text: str, width: int) -> str:
    """Return text whose lines are at most `width` columns; 0: as it is.

    What is typed or copied stays whole: a command after "Next: ", which gets a line of its own, and words such as
    paths. So do the lines of a traceback.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    start = line.lstrip()
    indent = line[: len(line) - len(start)]
    if not width or len(line) <= width or len(indent) >= 4 or start.startswith(("Next: ", "File ")):
        return [line]
    before, next_, command = line.partition("Next: ")
    lines = textwrap.wrap(
        before, max(width, 20), subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )
    return [*lines, f"{indent}  {next_}{command}"] if next_ else lines
