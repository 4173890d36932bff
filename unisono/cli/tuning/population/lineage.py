"""What a population found: its members at the end, which one copied which, and the schedule of settings of the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unisono.cli.tuning.population.exploit_explore import Turn, Values
from unisono.cli.tuning.population.member_segment import EXACT, SegmentResult, as_json
from unisono.cli.tuning.population.population_record import PopulationRecord
from unisono.config import shown


class Generation(NamedTuple):
    """The members of a population over one interval.

    Attributes:
        begin: The number of steps at its beginning.
        turns: What each member does, by number.
        results: The result of each.
    """

    begin: int
    turns: Sequence[Turn]
    results: Sequence[SegmentResult]


class Period(NamedTuple):
    """A part of a run with the same settings.

    Attributes:
        step: Its first step.
        member: The member that trained.
        values: Its settings.
    """

    step: int
    member: int
    values: Values


def text_of(values: Values) -> str:
    """Return settings as they are typed."""
    return " ".join(f"{name}={shown(value)}" for name, value in values.items())


def ranked(generation: Generation, direction: str) -> list[int]:
    """Return the members that have completed a generation, the best one first."""
    sign = 1.0 if direction == "minimize" else -1.0
    found = [(sign * each.value, member) for member, each in enumerate(generation.results) if each.value is not None]
    return [member for _, member in sorted(found)]


def schedule_of(generations: Sequence[Generation], member: int) -> list[Period]:
    """Return the settings with which the state of a member was trained, from step 0 on.

    It follows the member back through the generations, and to the member that it copied.
    """
    found: list[Period] = []
    for generation in reversed(generations):
        turn = generation.turns[member]
        found.append(Period(generation.begin, member, turn.values))
        member = turn.parent
    found.reverse()
    return [
        period
        for before, period in zip([None, *found], found, strict=False)
        if before is None or (before.member, before.values) != (period.member, period.values)
    ]


def result_of(generations: Sequence[Generation], record: PopulationRecord) -> dict[str, Any]:
    """Return the result of a study for JSON."""
    last = generations[-1]
    promises = {each.promise for each in generation_results(generations) if each.value is not None}
    exact = promises <= {EXACT} and not record.is_measured
    reason = "every member is exact, and its changes follow from the seed and from results of earlier generations"
    if record.is_measured:
        reason = "the objective is measured, and members copy others by it"
    elif not exact:
        reason = f"members promise {', '.join(sorted(promises))}"
    best = ranked(last, record.direction)[:1]
    return {
        "promise": EXACT if exact else "tolerance",
        "reason": reason,
        "objectives": [record.name],
        "best": best,
        "population": record.population,
        "interval": record.interval,
        "members": [as_json(*pair) for pair in zip(last.turns, last.results, strict=True)],
        "schedule": [
            {"step": each.step, "member": each.member, "settings": dict(each.values)}
            for member in best
            for each in schedule_of(generations, member)
        ],
        "generations": [
            {
                "begin": generation.begin,
                "members": [as_json(*pair) for pair in zip(generation.turns, generation.results, strict=True)],
            }
            for generation in generations
        ],
        "steps": sum(each.end - each.begin for each in generation_results(generations)),
    }


def generation_results(generations: Sequence[Generation]) -> list[SegmentResult]:
    """Return the results of all members in all generations."""
    return [each for generation in generations for each in generation.results]


def lines_of(generations: Sequence[Generation], record: PopulationRecord, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of members, the best one first, the schedule of the best, and the promise."""
    last = generations[-1]
    order = ranked(last, record.direction)
    order += [turn.member for turn in last.turns if turn.member not in order]
    rows = [("member", record.name, "steps", "settings")]
    for member in order:
        found = last.results[member]
        value = "failed" if found.value is None else f"{found.value:.6g}"
        more = f"  {found.reason}" if found.reason else ""
        rows.append((f"{member}", value, f"{found.end}", f"{text_of(last.turns[member].values)}{more}"))
    yield from _aligned(rows)
    for member in result["best"]:
        yield f"\nschedule of member {member}:"
        periods = schedule_of(generations, member)
        yield from _aligned(
            [("step", "member", "settings"), *((f"{p.step}", f"{p.member}", text_of(p.values)) for p in periods)]
        )
    copies = sum(turn.is_copy for generation in generations for turn in generation.turns)
    yield f"\n{len(last.turns)} members, {len(generations)} generations: {copies} copies."
    yield f"promise: {result['promise']} ({result['reason']})"


def copy_lines(before: Generation, turns: Sequence[Turn]) -> Iterator[str]:
    """Yield a line for each member that copies another one."""
    for turn in turns:
        if turn.is_copy:
            was = before.turns[turn.parent].values
            changes = ", ".join(f"{name} {shown(was[name])} -> {shown(value)}" for name, value in turn.values.items())
            yield f"step {before.results[turn.parent].end}: member {turn.member} copies member {turn.parent}: {changes}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
