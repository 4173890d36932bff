"""Estimate what placements take on devices that are not here, from their rates.

    micro-batch   counted operations / (peak rate x utilization), or the measured time / relative speed
    update        parameters, gradients and optimizer state are read, and parameters and state written / bandwidth
    messages      bytes that a process sends in a ring / link; nothing hides them

Memory is counted as on this machine, without that of Python, torch and data: an accelerator holds tensors and the
context of its driver. All of this is an estimate. Small models wait for kernel launches, and take longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from unisono.costs.candidates import Candidate, candidate, ranked
from unisono.costs.device_table import Device
from unisono.costs.placements import Placement, counts_up_to, placements
from unisono.costs.recorded_costs import RecordedCosts, StepSeconds
from unisono.costs.time_model import ShortRuns

CONTEXT = 500_000_000
"""Bytes of a device that the driver's context and libraries take: an assumption."""

HOUR = 3600.0


@dataclass(frozen=True)
class DeviceOffer:
    """A placement on a kind of device, with what a run costs.

    Attributes:
        device: The device.
        candidate: The placement with its memory and its step time.
        steps: The steps of the run.
        estimated: Whether its time is an estimate, and no measurement.
    """

    device: Device
    candidate: Candidate
    steps: int
    estimated: bool

    @property
    def seconds(self) -> float | None:
        """The time of the run's steps; None: not known."""
        return self.candidate.seconds * self.steps if self.candidate.seconds is not None else None

    @property
    def cost(self) -> float | None:
        """The price of the devices in use during these steps; None: time or price are not known."""
        if self.seconds is None or self.device.price is None:
            return None
        return self.seconds / HOUR * self.device.price * self.candidate.placement.processes


def costs_on(device: Device, costs: RecordedCosts) -> RecordedCosts:
    """Return what a step takes on one device. `costs` are those of one process here."""
    rate, here = device.rate(costs.precision), costs.seconds
    state = costs.state
    if device.speed and here is not None:
        seconds = StepSeconds(here.round / device.speed, here.update / device.speed, here.rest / device.speed)
    elif rate and costs.flops:
        touched = 2 * (state.parameters + state.optimizer) + state.gradients
        seconds = StepSeconds(costs.flops / rate, touched / device.bandwidth if device.bandwidth else 0.0, 0.0)
    else:
        return replace(costs, process=CONTEXT, peak=0, shard_imports=0, seconds=None)
    return replace(costs, process=CONTEXT, peak=0, shard_imports=0, seconds=seconds)


def runs_on(device: Device, costs: RecordedCosts, wanted: Iterable[Placement]) -> ShortRuns:
    """Return the times of steps on several of these devices, from the bytes of messages over the link."""
    alone, state = costs.seconds, costs.state
    if alone is None or not device.link:
        return ShortRuns(alone)

    def step(placement: Placement) -> StepSeconds:
        shards, groups = placement.shards, placement.spans
        gather, add = ((count - 1) / count / device.link for count in (shards, groups))
        by_layer = shards > 1 and placement.by_layer
        moved = gather * (2 * state.parameters + state.gradients) if by_layer else 0.0
        rest = 2 * add * state.gradients / (shards if by_layer else 1)
        rest += 0.0 if by_layer else gather * state.parameters
        return StepSeconds(alone.round + moved, alone.update / shards, alone.rest + rest)

    return ShortRuns(alone, {each: step(each) for each in wanted if each.processes > 1})


def offers_of(device: Device, plain: RecordedCosts, again: RecordedCosts | None) -> list[DeviceOffer]:
    """Return the placements that fit on devices of a kind, quickest first.

    Args:
        device: The device.
        plain: What one process needs here.
        again: The same with recomputed activations; None: that changes nothing.
    """
    most = min(device.count, len(plain.micro_batches))
    costs = {False: costs_on(device, plain), **({True: costs_on(device, again)} if again is not None else {})}
    runs = runs_on(device, costs[False], placements(most, recompute=False))
    found = [
        candidate(placement, costs[placement.recompute], runs)
        for placement in placements(most, recompute=again is not None)
    ]
    limits = dict.fromkeys(counts_up_to(most), device.memory)
    return [DeviceOffer(device, each, plain.total_steps, True) for each in ranked(found, limits)]


def smallest_need(device: Device, plain: RecordedCosts, again: RecordedCosts | None) -> tuple[int, Placement]:
    """Return the least memory that any placement needs on one device, and the placement. Memory must be known."""
    huge = replace(device, memory=2**63)
    needs = [
        (each.candidate.memory.total, each.candidate.placement)
        for each in offers_of(huge, plain, again)
        if each.candidate.memory is not None
    ]
    return min(needs, key=lambda need: need[0])
