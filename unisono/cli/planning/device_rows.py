"""The part of a plan that compares devices: memory, step time, and time and cost of the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from unisono.config import CommandLine, size
from unisono.costs.device_costs import DeviceOffer, smallest_need
from unisono.costs.device_table import HERE, Device
from unisono.costs.recorded_costs import RecordedCosts

SHOWN = 4
"""Placements that are shown for each kind of device."""


def device_lines(offers: Sequence[DeviceOffer], line_of: Callable[[DeviceOffer], CommandLine]) -> Iterator[str]:
    """Yield the table of devices, by kind, quickest first, then the quickest and the cheapest of all.

    Args:
        offers: Placements that fit, quickest first for each kind.
        line_of: Returns the command that trains with a placement.
    """
    if not offers:
        return
    names = list(dict.fromkeys(each.device.name for each in offers))
    steps = offers[0].steps
    wide = max(len(name) for name in (*names, "device"))
    width = max(len(str(each.candidate.placement)) for each in offers)
    yield ""
    head = f"{'device':{wide}}  {'placement':{width}}  {'count':>5}  {'memory':>8}  {'of':>8}  {'step':>9}"
    yield f"{head}  {f'{steps} steps':>12}  {'cost':>9}"
    for name in names:
        for each in [offer for offer in offers if offer.device.name == name][:SHOWN]:
            yield _row(each, wide, width)
    if any(each.estimated for each in offers):
        yield (
            "~ is an estimate: operations over the peak rate times a utilization (0.4, or that of the file), bytes of "
            "messages over the link, nothing overlapped. Small models take longer."
        )
    timed = [each for each in offers if each.seconds is not None]
    priced = [each for each in timed if each.cost is not None]
    if timed:
        first = min(timed, key=lambda each: each.seconds or 0.0)
        yield f"Quickest: {_name(first)}, {duration(first.seconds)}."
        yield f"    {line_of(first)}"
    if priced:
        least = min(priced, key=lambda each: (each.cost or 0.0, each.seconds))
        yield f"Cheapest: {_name(least)}, {duration(least.seconds)}, {least.cost:.3g}."
        yield f"    {line_of(least)}"


def _name(each: DeviceOffer) -> str:
    return f"{each.candidate.placement.processes} x {each.device.name}, {each.candidate.placement}"


def _row(each: DeviceOffer, wide: int, width: int) -> str:
    found, mark = each.candidate, "~" if each.estimated else ""
    memory = size(found.memory.total) if found.memory is not None else "?"
    step = f"{mark}{found.seconds:.3g} s" if found.seconds is not None else "?"
    cost = f"{mark}{each.cost:.3g}" if each.cost is not None else "?"
    text = f"{each.device.name:{wide}}  {found.placement!s:{width}}  {found.placement.processes:>5}  {memory:>8}"
    time = mark + duration(each.seconds) if each.seconds is not None else "?"
    return f"{text}  {size(each.device.memory):>8}  {step:>9}  {time:>12}  {cost:>9}"


def duration(seconds: float | None) -> str:
    """Return a time as 3.2 s, 0:12:30 or 2 days, 1:00:00."""
    if seconds is None:
        return "?"
    return f"{seconds:.2g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def small_devices(
    devices: Sequence[Device], plain: RecordedCosts, again: RecordedCosts | None, offers: Sequence[DeviceOffer]
) -> Iterator[str]:
    """Yield a line about each device that no placement fits on."""
    for device in devices:
        if device.name == HERE or any(each.device.name == device.name for each in offers):
            continue
        need, placement = smallest_need(device, plain, again)
        has = f"the least is {size(need)} ({placement}), and it has {size(device.memory)}"
        yield f"Nothing fits on {device.name}: {has}."


def device_entries(
    devices: Sequence[Device], offers: Sequence[DeviceOffer], line_of: Callable[[DeviceOffer], CommandLine]
) -> list[dict[str, Any]]:
    """Return the devices for --json, each with its placements that fit."""
    return [
        {
            "device": device.name,
            "count": device.count,
            "price": device.price,
            "candidates": [
                {
                    "placement": str(each.candidate.placement),
                    "processes": each.candidate.placement.processes,
                    "memory": each.candidate.memory.total if each.candidate.memory is not None else None,
                    "step_seconds": each.candidate.seconds,
                    "seconds": each.seconds,
                    "cost": each.cost,
                    "estimated": each.estimated,
                    "line": str(line_of(each)),
                }
                for each in offers
                if each.device.name == device.name
            ],
        }
        for device in devices
    ]
