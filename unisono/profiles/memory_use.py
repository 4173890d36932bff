"""The memory of the CPU that the recorded steps allocate: its course, its peak, and which operators hold it then.

Memory that was allocated before the recording, such as parameters, is not known and not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unisono.profiles.rank_trace import PHASES, STEPS, Event, events_in, is_cpu_allocation, own_spans

POINTS = 200
"""Number of points in the course of the memory."""


class Holder(NamedTuple):
    """The memory that an operator has allocated, and that is in use at the peak.

    Attributes:
        name: The outermost operator that has allocated it, and the phase.
        bytes: The number of bytes.
        blocks: The number of allocations.
    """

    name: str
    bytes: int
    blocks: int


class MemoryUse(NamedTuple):
    """The memory that was allocated since the recording began.

    Attributes:
        peak: The largest number of bytes at a time.
        at_ms: The time of the peak, in milliseconds since the recording began.
        step: The step of the peak; None: it is between two steps.
        holders: The memory in use at the peak, largest first.
        course: (milliseconds, bytes) over time: of each of some hundred intervals the largest number.
    """

    peak: int
    at_ms: float
    step: int | None
    holders: list[Holder]
    course: list[tuple[float, int]]


def memory_use(trace: Mapping[str, Any]) -> MemoryUse | None:
    """Return the use of memory in the trace of a rank; None if allocations were not recorded."""
    events = sorted(filter(is_cpu_allocation, trace["traceEvents"]), key=lambda each: each["ts"])
    if not events:
        return None
    live: dict[int, int] = {}  # by address: the number of the allocation
    total = peak = 0
    at = events[0]
    sums = []
    for number, each in enumerate(events):
        address, count = each["args"]["Addr"], int(each["args"]["Bytes"])
        if count > 0:
            live[address] = number
            total += count
        elif (allocation := live.pop(address, None)) is not None:
            total -= int(events[allocation]["args"]["Bytes"])
        sums.append((each["ts"], total))
        if total > peak:
            peak, at = total, each
    steps = own_spans(trace, STEPS)
    began = steps[0]["ts"] if steps else events[0]["ts"]
    within = _span_at(steps, at["ts"])
    step = int(within["args"]["step"]) if within is not None else None
    holders = _holders(trace, _live_at(events, at))
    return MemoryUse(peak, (at["ts"] - began) / 1000, step, holders, _course(sums, began))


def _live_at(events: Sequence[Event], last: Event) -> list[Event]:
    """Return the allocations that are in use after this event."""
    live: dict[int, Event] = {}
    for each in events:
        if int(each["args"]["Bytes"]) > 0:
            live[each["args"]["Addr"]] = each
        else:
            live.pop(each["args"]["Addr"], None)
        if each is last:
            break
    return list(live.values())


def _holders(trace: Mapping[str, Any], allocations: Sequence[Event]) -> list[Holder]:
    """Return which operators have made these allocations."""
    phases = own_spans(trace, PHASES)
    outermost: dict[int, list[Event]] = defaultdict(list)
    for each in events_in(trace, ["cpu_op"]):
        spans = outermost[each["tid"]]
        if not spans or each["ts"] >= spans[-1]["ts"] + spans[-1]["dur"]:
            spans.append(each)
    found: dict[str, list[int]] = defaultdict(list)
    for each in allocations:
        operator, phase = _span_at(outermost[each["tid"]], each["ts"]), _span_at(phases, each["ts"])
        name = operator["name"] if operator is not None else "(no operator)"
        found[f"{name}, {phase['name']}" if phase is not None else name].append(int(each["args"]["Bytes"]))
    holders = [Holder(name, sum(counts), len(counts)) for name, counts in found.items()]
    return sorted(holders, key=lambda holder: (-holder.bytes, holder.name))


def _span_at(spans: Sequence[Event], time: float) -> Event | None:
    """Return the span that covers this time, of spans in order that do not overlap."""
    place = bisect_right(spans, time, key=lambda each: each["ts"]) - 1
    if place < 0 or time > spans[place]["ts"] + spans[place]["dur"]:
        return None
    return spans[place]


def _course(sums: Sequence[tuple[float, int]], began: float) -> list[tuple[float, int]]:
    """Return the largest number of each of POINTS intervals, with its time."""
    first, last = sums[0][0], sums[-1][0]
    width = (last - first) / POINTS or 1.0
    largest: dict[int, tuple[float, int]] = {}
    for time, total in sums:
        place = int((time - first) / width)
        if place not in largest or total > largest[place][1]:
            largest[place] = ((time - began) / 1000, total)
    return list(largest.values())
