"""Compare the output that a page quotes with that of the command: what is the same on every machine must be the same.

    figures with a unit of time, size or speed   not compared, nor are dates, addresses, ports, paths and process ids
    steps of a fault, virtual ranks by speed     not compared
    other figures with a decimal point           equal to one in a hundred: kinds of processors round differently
    whole numbers, and all words                 equal
    fingerprints                                 equal in the page where, and only where, they are equal in the output

The quoted lines must come in their order; "..." and lines that the page leaves out may be between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

UNITS = r"us|µs|ms|s|min|h|kB|MB|GB|TB|kB/s|MB/s|GB/s|samples/s|steps/s|bytes|%|W|J"
HASH = r"\b[0-9a-f]{64}\b"
MASKED = (
    (rf"[+-]?\d[\d.,]*(?: to \d[\d.,]*)? ?(?:{UNITS})(?![\w/])", "N unit"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?", "date"),
    (r"\b\d{8}-\d{6}\b", "date"),
    (r"\b\d+\.\d+\.\d+\.\d+(?::\d+)?", "address"),
    (r"http://\S+", "address"),
    (r"(?:after|step|steps|at step|within|from step|port|process|pid|\(pid) \d+(?:(?:/| of )\d+)?(?= steps?\b)?", "N"),
    (r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*", "path"),
    (r"\S*/bin/python[\d.]*", "path"),
    (r"compute \d+(?:, \d+)+ virtual ranks", "compute N virtual ranks"),
    (r"unisono \d+\.\d+\.\d+", "unisono version"),
)
"""What differs from start to start. Steps are those of a fault, or those at which speeds became known."""
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
TOLERANCE = 0.01


class Quotes:
    """Compares the quotes of one page, which share fingerprints."""

    def __init__(self) -> None:
        self._real: dict[str, str] = {}

    def missing(self, quoted: Iterable[str], output: str) -> str | None:
        """Return the first quoted line that the output does not have in this place; None if it has all."""
        lines = iter(output.splitlines())
        for line in quoted:
            if line.strip() in ("", "..."):
                continue
            if not any(self._is_same(line, other) for other in lines):
                return line
        return None

    def _is_same(self, quoted: str, real: str) -> bool:
        shown, found = re.findall(HASH, quoted), re.findall(HASH, real)
        if len(shown) != len(found) or not same_line(re.sub(HASH, "hash", quoted), re.sub(HASH, "hash", real)):
            return False
        known = {**self._real}
        for one, other in zip(shown, found, strict=True):
            if known.setdefault(one, other) != other or list(known.values()).count(other) > 1:
                return False
        self._real = known
        return True


def same_line(quoted: str, real: str) -> bool:
    """Return whether two lines are the same apart from what differs from start to start."""
    one, other = masked(quoted), masked(real)
    if "..." in one:  # a part of the line is left out
        pattern = ".*".join(re.escape(part) for part in one.split("..."))
        return re.fullmatch(pattern, other) is not None
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    return all(_same_number(a, b) for a, b in zip(_numbers(one), _numbers(other), strict=True))


def masked(line: str) -> str:
    """Return a line with one space between its words, and without the values that differ from start to start."""
    text = " ".join(line.split())
    for pattern, stand_in in MASKED:
        text = re.sub(pattern, stand_in, text)
    return text


def _numbers(line: str) -> Iterator[str]:
    return (found[0] for found in NUMBER.finditer(line))


def _same_number(quoted: str, real: str) -> bool:
    if "." not in quoted + real:
        return quoted == real
    return abs(float(quoted) - float(real)) <= TOLERANCE * max(abs(float(quoted)), abs(float(real)))
