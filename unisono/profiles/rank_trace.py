"""The trace of one rank: what torch's profiler recorded, and the rank's own spans, in named and ordered tracks.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format of events. Tracks,
from the top:

    steps, phases, virtual ranks, waiting       spans of Unisono
    collectives, collectives 2, ...             torch's spans of collectives and messages, which may overlap
    training, ring, ...                         operators, by thread
    GPU 0: stream 7, ...                        kernels

A process of a trace is a rank. Its number is rank + 1 (and tracks are numbered from 1), because viewers treat process 0
and thread 0 as idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from unisono.profiles.profile_folder import KEY

Event = dict[str, Any]
"""An event: `ph` (its kind), `name`, `pid`, `tid`, `ts` and `dur` in microseconds, `cat` (its category), `args`."""

SPANS = "unisono"
"""Category of our own spans."""

COLLECTIVES = "collective"
"""Category of collectives and messages."""

OPERATORS = ("cpu_op", "user_annotation")
"""Categories of operators, and of blocks that torch or the script has named (torch.profiler.record_function)."""

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on an accelerator."""

ALLOCATION = "[memory]"
"""The name of torch's events of allocations."""

ALLOCATED = "allocated"
"""The name of our counter of the bytes that are allocated."""

STEPS, PHASES, VIRTUAL_RANKS, WAITING = "steps", "phases", "virtual ranks", "waiting"
OWN_TRACKS = (STEPS, PHASES, VIRTUAL_RANKS, WAITING)
"""Tracks of our own spans, in their order."""

COLLECTIVE = re.compile(r"(gloo|nccl|rccl|xccl|mpi|ucc|hccl|mccl):")
"""The beginning of the name of a collective's span, which torch sets to the back end."""


class OwnSpan(NamedTuple):
    """A span of our own.

    Attributes:
        track: The track that it is drawn in.
        name: Its name.
        begin: Its beginning, in nanoseconds since 1970.
        end: Its end.
        args: What a viewer shows about it.
    """

    track: str
    name: str
    begin: int
    end: int
    args: Mapping[str, Any] = {}


class RecordedRank(NamedTuple):
    """The facts about the recording of a rank.

    Attributes:
        rank: The rank.
        host: The name of its host.
        pid: Its process id.
        device: The device on which it computes.
        steps: The first and the last recorded step.
        began: The beginning of the first recorded step, in nanoseconds since 1970.
        ended: The end of the last one.
        torch: The version of torch.
    """

    rank: int
    host: str
    pid: int
    device: str
    steps: tuple[int, int]
    began: int
    ended: int
    torch: str

    def facts(self) -> dict[str, Any]:
        """Return them as JSON can hold them."""
        return {**self._asdict(), "steps": list(self.steps)}


def build_rank_trace(
    torch_trace: Mapping[str, Any], recorded: RecordedRank, spans: Sequence[OwnSpan], threads: Mapping[int, str]
) -> dict[str, Any]:
    """Return the trace of a rank.

    Args:
        torch_trace: The trace that torch has exported.
        recorded: The facts about the recording.
        spans: Our own spans.
        threads: Names of threads by the numbers that the system gives them.
    """
    base = int(torch_trace.get("baseTimeNanoseconds", 0))
    tracks = _Tracks(recorded.rank + 1)
    events: list[Event] = []
    for span in spans:
        ts, dur = (span.begin - base) / 1000, (span.end - span.begin) / 1000
        place = tracks.own(span.track)
        events.append({"ph": "X", "cat": SPANS, "name": span.name, **place, "ts": ts, "dur": dur, "args": span.args})
    found = list(torch_trace["traceEvents"])
    names = _names_of_threads(found, recorded.pid, threads)
    found = [each for each in found if each.get("ph") != "M" and _is_placed(each)]
    collectives = [each for each in found if _is_collective(each)]
    for number, each in _in_lanes(collectives):
        thread = names.get((each["pid"], each["tid"]), "")
        args = {**each.get("args", {}), "thread": thread}
        events.append({**each, "cat": COLLECTIVES, **tracks.lane(number), "args": args})
    allocated = 0
    for each in found:
        if not _is_collective(each):
            key = each["pid"], each["tid"]
            events.append({**each, **tracks.thread(key, names.get(key, f"thread {each['tid']}"))})
        if is_cpu_allocation(each):
            allocated = max(0, allocated + int(each["args"]["Bytes"]))
            counted = {"bytes": allocated}
            events.append({"ph": "C", "name": ALLOCATED, "pid": tracks.pid, "ts": each["ts"], "args": counted})
    return {
        KEY: recorded.facts(),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "traceEvents": [*_names_of_process(recorded), *tracks.names(), *events],
    }


def is_cpu_allocation(event: Event) -> bool:
    """Return whether an event is an allocation or a release of memory of the CPU."""
    return event.get("name") == ALLOCATION and event.get("args", {}).get("Device Type") == 0


def events_in(trace: Mapping[str, Any], categories: Iterable[str]) -> list[Event]:
    """Return the events of a rank's trace that have a duration and one of these categories, in order of time.

    An event comes before those inside it.
    """
    chosen = set(categories)
    found = [each for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") in chosen]
    return sorted(found, key=lambda each: (each["ts"], -each["dur"]))


def own_spans(trace: Mapping[str, Any], track: str) -> list[Event]:
    """Return the spans of one of our tracks in a rank's trace."""
    number = OWN_TRACKS.index(track) + 1
    return [each for each in events_in(trace, [SPANS]) if each["tid"] == number]


class _Tracks:
    """Numbers of tracks, and their names."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._own = {name: number for number, name in enumerate(OWN_TRACKS, 1)}
        self._more: dict[Any, tuple[int, str]] = {}

    def own(self, name: str) -> dict[str, int]:
        """Return the place of one of our tracks, or of a further one."""
        if name in self._own:
            return {"pid": self.pid, "tid": self._own[name]}
        return self.thread(name, name)

    def lane(self, number: int) -> dict[str, int]:
        """Return the place of a track of collectives."""
        return self.thread(("lane", number), "collectives" + f" {number + 1}" * (number > 0))

    def thread(self, key: Any, name: str) -> dict[str, int]:
        """Return the place of a track of a thread or a stream."""
        if key not in self._more:
            self._more[key] = len(self._own) + len(self._more) + 1, name
        return {"pid": self.pid, "tid": self._more[key][0]}

    def names(self) -> list[Event]:
        """Return the events that name and order the tracks."""
        tracks = [*((number, name) for name, number in self._own.items()), *self._more.values()]
        return [event for number, name in tracks for event in _named(self.pid, number, name)]


def _named(pid: int, tid: int, name: str) -> list[Event]:
    place = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
    return [
        {**place, "name": "thread_name", "args": {"name": name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def _names_of_process(recorded: RecordedRank) -> list[Event]:
    place = {"ph": "M", "pid": recorded.rank + 1, "tid": 0, "ts": 0}
    return [
        {**place, "name": "process_name", "args": {"name": f"rank {recorded.rank} on {recorded.host}"}},
        {**place, "name": "process_labels", "args": {"labels": recorded.device}},
        {**place, "name": "process_sort_index", "args": {"sort_index": recorded.rank}},
    ]


def _names_of_threads(events: Sequence[Event], pid: int, threads: Mapping[int, str]) -> dict[Any, str]:
    """Return the names of torch's tracks, by (pid, tid). The process id of a track of kernels is a device's index."""
    said: dict[Any, str] = {}
    labels: dict[Any, str] = {}
    for each in events:
        if each.get("ph") != "M":
            continue
        args = each.get("args", {})
        if each["name"] == "process_labels":
            labels[each["pid"]] = str(args.get("labels", ""))
        elif each["name"] == "thread_name":
            # a thread of a library has its own name and that of the program: "thread 12 (pt_gloo_runloop)"
            named = re.sub(r"^thread \d+ \((.*)\)$", r"\1", str(args.get("name", "")))
            key = each["pid"], each["tid"]
            if key not in said or not named.startswith("python"):
                said[key] = named
    for (process, tid), name in said.items():
        if process != pid:
            said[process, tid] = f"{labels.get(process) or process}: {name}"
    return {**said, **{(pid, tid): name for tid, name in threads.items()}}


def _is_placed(event: Event) -> bool:
    """Return whether an event belongs to a thread or a stream. Others describe the profiler itself."""
    return isinstance(event.get("pid"), int) and isinstance(event.get("tid"), int) and "ts" in event


def _is_collective(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and COLLECTIVE.match(event["name"]) is not None


def _in_lanes(events: Iterable[Event]) -> list[tuple[int, Event]]:
    """Divide spans that overlap among lanes, so that those of a lane do not."""
    free: list[float] = []  # the end of the last span of each lane
    placed = []
    for each in sorted(events, key=lambda each: each["ts"]):
        lane = next((number for number, end in enumerate(free) if end <= each["ts"]), len(free))
        free[lane : lane + 1] = [each["ts"] + each["dur"]]
        placed.append((lane, each))
    return placed
