"""Decide whether a run hangs and which ranks cause it, from the status of its processes (status_file.py). No torch.

A run hangs when none of its processes has made progress for the time limit. A rank that waits for others is not to
blame as long as another rank does not wait. If all ranks wait, those at the less common places are to blame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from unisono.errors import StuckError
from unisono.launcher.status_file import COMPUTES, ProcessStatus

FOR_OTHERS = ("others", "meeting", "store")
"""Values of ProcessStatus.waits for which a process waits for other processes."""


class HangDiagnosis(NamedTuple):
    """The diagnosis of a hang.

    Attributes:
        error: the message.
        guilty: the ranks for which the others wait.
        works: whether one of these ranks computes. Then it is slow rather than stuck, and no process is ended.
        then: the action: end (the run), kill (the guilty ranks, if any), or wait.
    """

    error: StuckError
    guilty: tuple[int, ...]
    works: bool
    then: str


def judge(statuses: Sequence[ProcessStatus]) -> HangDiagnosis | None:
    """Diagnose the status of all processes (at least one). Return None if one makes progress or is in a debugger."""
    idle = min(status.idle for status in statuses)
    limit = max(s.limit for s in [s for s in statuses if not s.silent] or statuses)  # a silent one's may be old
    if not limit or idle < limit or any(status.waits == "person" for status in statuses):
        return None
    statuses = sorted(statuses, key=lambda status: status.rank)
    guilty, cause = _blame(statuses)
    works = any((status.share or 0.0) > COMPUTES for status in statuses if status.waits not in FOR_OTHERS)
    step = next((status.step for status in statuses if status.step is not None), None)
    subject = "The run" if step is None else f"Step {step}"
    error_line = f"{subject} makes no progress{' before its first step' if step is None else ''}."
    facts = f"No process has made progress for {idle:.0f} s. {cause}\n\n{table(statuses, guilty)}\n"
    next_step = (
        "look at that line; --set watchdog.timeout=SECONDS waits longer (0: no limit), --set watchdog.action=wait "
        "only reports."
    )
    if works:
        next_step = f"wait: a run is not ended while a process computes. Or {next_step}"
    then = "wait" if works else statuses[0].then
    ranks = tuple(status.rank for status in guilty)
    return HangDiagnosis(StuckError(error_line, facts, next_step), ranks, works, then)


def _blame(statuses: Sequence[ProcessStatus]) -> tuple[list[ProcessStatus], str]:
    """Return the processes to blame, and a sentence about them."""
    active = [status for status in statuses if status.waits not in FOR_OTHERS]
    waiting = [status for status in statuses if status.waits in FOR_OTHERS]
    if active:
        if len({activity(status) for status in active}) > 1:
            activities = "; ".join(f"rank {status.rank} {activity(status)}" for status in active)
        else:
            activities = f"{'it' if len(active) == 1 else 'each'} {activity(active[0])}"
        if waiting:
            verb = f"wait{'s' * (len(waiting) == 1)}"
            return active, f"{_ranks(waiting, 'Rank')} {verb} for {_ranks(active)}: {activities}."
        return active, f"{_ranks(active, 'Rank')}: {activities}."
    places = Counter(map(_waiting_place, statuses))
    if len(places) == 1:
        if statuses[0].waits in ("meeting", "store"):
            return [], _rendezvous_cause(statuses)
        return [], "All ranks wait in the same place: no process sends the message, or it does not arrive."
    most = places.most_common(1)[0][1]
    usual = [place for place, count in places.items() if count == most]
    odd = [status for status in statuses if _waiting_place(status) not in usual or len(usual) > 1]
    activities = "; ".join(f"rank {status.rank} {activity(status)}" for status in _one_of_each_place(statuses))
    return odd, f"The ranks wait for each other in different places: {activities}."


def _rendezvous_cause(statuses: Sequence[ProcessStatus]) -> str:
    """Return the cause if all known processes wait for the rendezvous."""
    absent = sorted(set(range(statuses[0].size)) - {status.rank for status in statuses})
    if absent and all(status.step is None and status.waits == "meeting" for status in statuses):
        missing = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        return f"All other ranks wait for {missing} to call unisono.main."
    return "All ranks wait for the rendezvous: its store does not answer, or a process did not start."


def _waiting_place(status: ProcessStatus) -> tuple[str, str, str]:
    """Return a key that is equal for processes that wait for each other in the same place."""
    return status.waits, status.call.partition(" #")[0], status.where


def _one_of_each_place(statuses: Sequence[ProcessStatus]) -> list[ProcessStatus]:
    """Return the first rank in each place."""
    first: dict[tuple[str, ...], ProcessStatus] = {}
    for status in statuses:
        first.setdefault(_waiting_place(status), status)
    return list(first.values())


def activity(status: ProcessStatus) -> str:
    """Return the activity of a process, as a predicate."""
    at = f" at {status.where}" if status.where else ""
    code = f" ({status.code})" if status.code else ""
    if status.silent:
        return f"{status.silent}{at}"
    if status.waits in FOR_OTHERS:
        return f"waits {f'in {status.call}' if status.call else WAITS[status.waits]}{at}{code}"
    if status.waits == "workers":
        workers = f", {'; '.join(status.workers)}" if status.workers else ""
        return f"waits for its loader's workers{at}{workers}"
    if status.share is not None and status.share > COMPUTES:
        return f"computes{at}{code}"
    return f"sleeps{at}{code}"


WAITS = {"others": "for a message", "meeting": "for the rendezvous", "store": "for the rendezvous"}


def table(statuses: Sequence[ProcessStatus], guilty: Sequence[ProcessStatus]) -> str:
    """Return a table with a line for each rank: the ranks for which it waits, and its activity."""
    blamed = {status.rank for status in guilty}
    head = ("rank", "waits for", "step", "phase", "virtual rank", "idle", "activity")
    rows = [head]
    for status in statuses:
        waits_for = _waits_for(status, blamed, len(statuses))
        v = "" if status.virtual_rank is None else str(status.virtual_rank)
        step = "" if status.step is None else f"{status.step}{'+' * bool(status.silent)}"  # at least, if silent
        rows.append((str(status.rank), waits_for, step, status.phase, v, f"{status.idle:.0f} s", activity(status)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)] for row in rows]
    return "\n".join("  ".join(["  ", *cells, row[-1]]) for cells, row in zip(lines, rows, strict=True))


def _waits_for(status: ProcessStatus, blamed: set[int], size: int) -> str:
    if status.waits == "workers":
        return "its workers"
    if status.waits not in FOR_OTHERS:
        return "-"
    others = sorted(blamed - {status.rank})
    if not others or len(others) == size - 1:
        return "all others" if size > 1 else "others"
    return ", ".join(map(str, others))


def _ranks(statuses: Sequence[ProcessStatus], word: str = "rank") -> str:
    """Return the ranks as text: "rank 0", "ranks 0, 2 and 3"."""
    *rest, last = [str(status.rank) for status in statuses]
    return f"{word}s {', '.join(rest)} and {last}" if rest else f"{word} {last}"


class ReportBackoff:
    """Decide when to report a hang that is not ended: at the time limit, and each time the idle time has doubled."""

    def __init__(self) -> None:
        self._next = 0.0

    def reset(self) -> None:
        """Start again, because the run makes progress."""
        self._next = 0.0

    def is_due(self, idle: float) -> bool:
        """Return whether to report after this many idle seconds."""
        if idle < self._next:
            return False
        self._next = 2 * idle
        return True
