"""Measure how long this process works on a pass. The time in which it waits for other processes does not count.

An accelerator runs asynchronously: when a process has launched all kernels, the device has only begun to compute.
Therefore the timer uses the time between two events on the device
(https://docs.pytorch.org/docs/2.13/generated/torch.Event.html):

    process   begin  launch 1  launch 2 done                    seconds  (waits for the second event)
    device    |      [ micro-batch 1 ][ micro-batch 2 ]|        --------^
"""

from __future__ import annotations

import time

import torch

from unisono import phases


class StepTimer:
    """Measure the time of a pass on `device`, which computes it."""

    def __init__(self, device: torch.device) -> None:
        self._began = self._waited = self._busy = self._idle = 0.0
        self._count = 0  # number of micro-batches
        self._events = [] if device.type == "cpu" else [torch.Event(device, enable_timing=True) for _ in range(3)]

    def begin(self) -> None:
        """Begin a pass."""
        self._began, self._waited, self._count = time.perf_counter(), phases.CommWait.seconds, 0
        if self._events:
            self._events[2].record()

    def done(self) -> None:
        """Record that a micro-batch is computed, or that all its kernels are launched."""
        self._idle = phases.CommWait.seconds - self._waited
        self._busy = time.perf_counter() - self._began - self._idle
        if self._events:
            self._count += 1
            self._events[self._count % 2].record()

    def keep_up(self) -> None:
        """Wait until all micro-batches but the last one are computed.

        A process that launches kernels far ahead of the device would appear to be idle although its device is busy.
        """
        if self._events and self._count > 1:
            self._events[(self._count - 1) % 2].synchronize()

    def seconds(self) -> float:
        """Return the seconds from the beginning of the pass to its last `done`."""
        if not self._events or not self._count:
            return self._busy
        begin, end = self._events[2], self._events[self._count % 2]
        end.synchronize()
        return max(self._busy, begin.elapsed_time(end) / 1000 - self._idle)
