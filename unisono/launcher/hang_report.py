"""Is a run stuck, and who is to blame? From the places of its processes (status_file.py), in words. No torch.

A run is stuck when none of its processes has moved for its limit. Who waits for others is not to blame as long as
somebody does not; where all wait, those are who wait elsewhere than most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from unisono.errors import StuckError
from unisono.launcher.status_file import COMPUTES, ProcessStatus

FOR_OTHERS = ("others", "meeting", "store")


class HangDiagnosis(NamedTuple):
    """What is told of a stuck run.

    guilty   ranks that keep the others waiting
    works    does one of those compute? Then it is slow rather than stuck, and nobody is ended for that
    then     what is to be done: end (the run), kill (the guilty, if there are any), or wait
    """

    error: StuckError
    guilty: tuple[int, ...]
    works: bool
    then: str


def judge(places: Sequence[ProcessStatus]) -> HangDiagnosis | None:
    """The verdict on the processes that there are (at least one); None: something goes on, or a person looks."""
    idle = min(place.idle for place in places)
    limit = max(place.limit for place in [p for p in places if not p.silent] or places)  # a silent one's may be old
    if not limit or idle < limit or any(place.waits == "person" for place in places):
        return None
    places = sorted(places, key=lambda place: place.rank)
    guilty, why = _blame(places)
    works = any((place.share or 0.0) > COMPUTES for place in places if place.waits not in FOR_OTHERS)
    step = next((place.step for place in places if place.step is not None), None)
    asked = "The run was to begin its first step." if step is None else f"Step {step} was to go on."
    true = f"Nothing has moved for {idle:.0f} s. {why}\n\n{table(places, guilty)}\n"
    do = (
        "look at that line; --set watchdog.timeout=SECONDS waits longer (0: for ever), --set watchdog.action=wait "
        "only tells."
    )
    if works:
        do = f"wait: the run is not ended while somebody computes. Or {do}"
    then = "wait" if works else places[0].then
    return HangDiagnosis(StuckError(asked, true, do), tuple(place.rank for place in guilty), works, then)


def _blame(places: Sequence[ProcessStatus]) -> tuple[list[ProcessStatus], str]:
    """Who is to blame, and a sentence that says so."""
    free = [place for place in places if place.waits not in FOR_OTHERS]
    waiting = [place for place in places if place.waits in FOR_OTHERS]
    if free:
        if len({what_it_does(place) for place in free}) > 1:
            said = "; ".join(f"rank {place.rank} {what_it_does(place)}" for place in free)
        else:
            said = f"{'it' if len(free) == 1 else 'each'} {what_it_does(free[0])}"
        if waiting:
            return free, f"{_ranks(waiting, 'Rank')} wait{'s' * (len(waiting) == 1)} for {_ranks(free)}: {said}."
        return free, f"{_ranks(free, 'Rank')}: {said}."
    kinds = Counter(map(_kind, places))
    if len(kinds) == 1:
        if places[0].waits in ("meeting", "store"):
            return [], _meeting(places)
        return [], "All wait in the same place: what they wait for is sent by nobody, or does not arrive."
    most = kinds.most_common(1)[0][1]
    usual = [kind for kind, count in kinds.items() if count == most]
    odd = [place for place in places if _kind(place) not in usual or len(usual) > 1]
    told = "; ".join(f"rank {place.rank} {what_it_does(place)}" for place in _one_each(places))
    return odd, f"They wait for each other, in different places: {told}."


def _meeting(places: Sequence[ProcessStatus]) -> str:
    """All who are there wait where processes meet."""
    absent = sorted(set(range(places[0].size)) - {place.rank for place in places})
    if absent and all(place.step is None and place.waits == "meeting" for place in places):
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        return f"All others wait for {who} to come to unisono.main."
    return "All wait where processes meet: that place (the store) does not answer, or somebody never came."


def _kind(place: ProcessStatus) -> tuple[str, str, str]:
    """What those who wait for each other in the same place have in common."""
    return place.waits, place.call.partition(" #")[0], place.where


def _one_each(places: Sequence[ProcessStatus]) -> list[ProcessStatus]:
    """The first rank of each kind."""
    seen: dict[tuple[str, ...], ProcessStatus] = {}
    for place in places:
        seen.setdefault(_kind(place), place)
    return list(seen.values())


def what_it_does(place: ProcessStatus) -> str:
    """What a process does, in a few words."""
    at = f" at {place.where}" if place.where else ""
    code = f" ({place.code})" if place.code else ""
    if place.silent:
        return f"{place.silent}{at}"
    if place.waits in FOR_OTHERS:
        return f"waits {f'in {place.call}' if place.call else WAITS[place.waits]}{at}{code}"
    if place.waits == "workers":
        what = f", {'; '.join(place.workers)}" if place.workers else ""
        return f"waits for its loader's workers{at}{what}"
    if place.share is not None and place.share > COMPUTES:
        return f"computes{at}{code}"
    return f"sleeps{at}{code}"


WAITS = {"others": "for a message", "meeting": "where processes meet", "store": "where processes meet"}


def table(places: Sequence[ProcessStatus], guilty: Sequence[ProcessStatus]) -> str:
    """Who waits and whom for, a line each."""
    blamed = {place.rank for place in guilty}
    head = ("rank", "waits for", "step", "phase", "virtual rank", "still for", "what it does")
    rows = [head]
    for place in places:
        for_whom = _waits_for(place, blamed, len(places))
        v = "" if place.virtual_rank is None else str(place.virtual_rank)
        step = "" if place.step is None else f"{place.step}{'+' * bool(place.silent)}"  # when it was last seen
        rows.append((str(place.rank), for_whom, step, place.phase, v, f"{place.idle:.0f} s", what_it_does(place)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)] for row in rows]
    return "\n".join("  ".join(["  ", *cells, row[-1]]) for cells, row in zip(lines, rows, strict=True))


def _waits_for(place: ProcessStatus, blamed: set[int], size: int) -> str:
    if place.waits == "workers":
        return "its workers"
    if place.waits not in FOR_OTHERS:
        return "nobody"
    others = sorted(blamed - {place.rank})
    if not others or len(others) == size - 1:
        return "all others" if size > 1 else "others"
    return ", ".join(map(str, others))


def _ranks(places: Sequence[ProcessStatus], word: str = "rank") -> str:
    """rank 0; ranks 0, 2 and 3."""
    *rest, last = [str(place.rank) for place in places]
    return f"{word}s {', '.join(rest)} and {last}" if rest else f"{word} {last}"


class ReportBackoff:
    """A run that is stuck and goes on is told of at its limit, and then each time that has doubled."""

    def __init__(self) -> None:
        self._next = 0.0

    def reset(self) -> None:
        """Something goes on again."""
        self._next = 0.0

    def is_due(self, idle: float) -> bool:
        """Is it to be told now, after so many seconds?"""
        if idle < self._next:
            return False
        self._next = 2 * idle
        return True
