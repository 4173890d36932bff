"""The table of a study's trials, the best of them, and the Pareto front of several objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.config import shown

ROWS = 20
"""Trials in the table, at most."""


@dataclass(frozen=True)
class TrialRow:
    """A finished trial.

    Attributes:
        number: Its number.
        state: "complete", "pruned" or "failed".
        values: The values of the objectives; (): it failed.
        params: The values of its settings.
        facts: steps, total, weights_sha256, promise, and the reason of a failure.
    """

    number: int
    state: str
    values: tuple[float, ...]
    params: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the row for --json."""
        values, params = list(self.values), dict(self.params)
        return {"trial": self.number, "state": self.state, "values": values, "settings": params, **self.facts}

    @property
    def sets(self) -> str:
        """Its settings as they are typed."""
        return " ".join(f"{name}={shown(value)}" for name, value in self.params.items())


def pareto_front(rows: Sequence[TrialRow], directions: Sequence[str]) -> list[TrialRow]:
    """Return the completed trials that no other one surpasses: equal or better in all objectives, better in one.

    With one objective, these are the best trial and those that equal it.
    """
    signs = [1.0 if each == "minimize" else -1.0 for each in directions]
    points = {row.number: [s * v for s, v in zip(signs, row.values, strict=True)] for row in complete(rows)}

    def surpassed(number: int) -> bool:
        mine = points[number]
        return any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in points.values())

    return [row for row in complete(rows) if not surpassed(row.number)]


def complete(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the completed trials."""
    return [row for row in rows if row.state == "complete"]


def table(rows: Sequence[TrialRow], names: Sequence[str], directions: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table: the best trials first by the first objective, with * those of the Pareto front."""
    front = {row.number for row in pareto_front(rows, directions)}
    sign = 1.0 if directions[0] == "minimize" else -1.0
    done = sorted(complete(rows), key=lambda row: (sign * row.values[0], row.number))
    others = [row for row in rows if row.state != "complete"]
    lines = [("trial", *names, "steps", "settings")]
    for row in [*done, *others][:ROWS]:
        mark = "*" if row.number in front else ""
        values = [f"{value:.6g}" for value in row.values] or ["failed", *[""] * (len(names) - 1)]
        state = "" if row.state != "pruned" else " pruned"
        lines.append((f"{row.number}{mark}", *values, f"{row.facts.get('steps', '')}{state}", row.sets))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    for line in lines:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
    if len(rows) > ROWS:
        yield f"and {len(rows) - ROWS} more: --json lists all"
