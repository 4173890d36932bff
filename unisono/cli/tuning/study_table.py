"""The table of a study's trials, the best of them, and the Pareto front of several objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.cli.tuning.study_record import StudyRecord
from unisono.config import CommandLine, plural, shown
from unisono.errors import StudyError

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


def result_of(rows: Sequence[TrialRow], record: StudyRecord) -> dict[str, Any]:
    """Return the result of a study for JSON."""
    promises = {row.facts.get("promise") for row in complete(rows)}
    exact = promises <= {"exact"} and not record.is_measured
    reason = "every trial is exact, and draws depend on results of earlier rounds"
    if record.is_measured:
        reason = "an objective is measured, and draws depend on it"
    elif not exact:
        reason = f"trials promise {', '.join(sorted(str(each) for each in promises))}"
    return {
        "promise": "exact" if exact else "tolerance",
        "reason": reason,
        "objectives": record.names,
        "best": [row.number for row in pareto_front(rows, record.directions)],
        "trials": [row.as_json() for row in rows],
        "steps": sum(row.facts.get("steps", 0) for row in rows),
        "steps_without_pruning": sum(row.facts.get("total" if row.state == "pruned" else "steps", 0) for row in rows),
    }


def print_study(rows: Sequence[TrialRow], record: StudyRecord, result: Mapping[str, Any], line: CommandLine) -> None:
    """Print the table of a study and the command that trains with the best settings."""
    print("\n" + "\n".join(table(rows, record.names, record.directions)))
    states = [row.state for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("complete", "pruned", "failed"))
    saved = 1 - result["steps"] / max(1, result["steps_without_pruning"])
    print(f"\n{plural(len(rows), 'trial')}: {counts}. Pruning saved {saved:.0%} of the steps.")
    print(f"promise: {result['promise']} ({result['reason']})")
    for number in result["best"][:3]:
        print(f"  Next: {_training(rows[number], record, line)}")


def _training(row: TrialRow, record: StudyRecord, line: CommandLine) -> CommandLine:
    """Return the command that trains with the settings of a trial."""
    sets = [word for each in (*record.sets, *row.sets.split()) for word in ("--set", each)]
    return CommandLine(("unisono", "run", line.words[2], *sets))


def require_complete(rows: Sequence[TrialRow], record: StudyRecord, line: CommandLine) -> None:
    """Raise StudyError if no trial has completed."""
    failed = [row for row in rows if row.state == "failed"]
    if failed and not complete(rows):
        facts = f"{plural(len(failed), 'trial')} failed, the last one: {failed[-1].facts.get('reason')}"
        raise StudyError("No trial has completed.", facts, str(_training(failed[-1], record, line)))
