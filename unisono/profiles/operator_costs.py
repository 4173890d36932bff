"""The cost of each operator and of each phase in the trace of a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from unisono.profiles.rank_trace import KERNELS, OPERATORS, PHASES, STEPS, WAITING, events_in, own_spans

NO_OPERATOR = "(no operator)"
"""The name for kernels that no operator has started."""


class OperatorCost(NamedTuple):
    """The cost of all calls of an operator.

    Attributes:
        name: Its name.
        calls: The number of calls.
        cpu_us: Microseconds on the CPU, without those of the operators that it calls.
        device_us: Microseconds of the kernels that it starts itself on an accelerator.
    """

    name: str
    calls: int
    cpu_us: float
    device_us: float


def operator_costs(trace: Mapping[str, Any]) -> list[OperatorCost]:
    """Return the operators in the trace of a rank, the costliest first: on the accelerator, then on the CPU."""
    calls: dict[str, int] = defaultdict(int)
    cpu: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    by_id: dict[Any, str] = {}
    within: dict[int, list[tuple[float, str]]] = defaultdict(list)  # by thread: the end of each open call, its name
    for each in events_in(trace, OPERATORS):
        name, stack, end = each["name"], within[each["tid"]], each["ts"] + each["dur"]
        while stack and stack[-1][0] <= each["ts"]:
            stack.pop()
        caller = stack[-1][1] if stack else None
        if caller is not None:
            cpu[caller] -= each["dur"]
        stack.append((end, name))
        calls[name] += name != caller  # an operator may be computed by another overload of its own
        cpu[name] += each["dur"]
        by_id[each.get("args", {}).get("External id")] = name
    for each in events_in(trace, KERNELS):
        device[by_id.get(each.get("args", {}).get("External id", ""), NO_OPERATOR)] += each["dur"]
    costs = [OperatorCost(name, calls[name], cpu[name], device[name]) for name in {**cpu, **device}]
    return sorted(costs, key=lambda cost: (-cost.device_us, -cost.cpu_us, cost.name))


def phase_times(trace: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds in each phase in the trace of a rank, the longest first."""
    spent: dict[str, float] = defaultdict(float)
    for each in own_spans(trace, PHASES):
        spent[each["name"]] += each["dur"] / 1000
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def waiting_time(trace: Mapping[str, Any]) -> float:
    """Return the milliseconds in which the training thread waited for messages of others."""
    return sum(each["dur"] for each in own_spans(trace, WAITING)) / 1000


def step_times(trace: Mapping[str, Any]) -> dict[int, float]:
    """Return the milliseconds of each step."""
    return {int(each["args"]["step"]): each["dur"] / 1000 for each in own_spans(trace, STEPS)}
