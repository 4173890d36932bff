"""The device of the GPU benchmarks: a CUDA device, or in a dry run the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12, "B200": 2250e12}
"""Dense bf16 products and sums per second, by a word of the device's name (the vendors' data sheets)."""


class Device(NamedTuple):
    """A device that is measured. Without CUDA the figures have no meaning."""

    device: torch.device
    dry: bool

    @property
    def name(self) -> str:
        return "cpu (dry run)" if self.dry else torch.cuda.get_device_name(self.device)

    @property
    def peak_flops(self) -> float | None:
        """Peak speed in bf16, in operations per second; None: unknown."""
        return next((flops for word, flops in PEAK_FLOPS.items() if word in self.name), None)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        if not self.dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Return the largest number of bytes of tensors since `reset_peak`."""
        return 0 if self.dry else torch.cuda.max_memory_allocated(self.device)

    def bytes_now(self) -> int:
        """Return the number of bytes of tensors."""
        return 0 if self.dry else torch.cuda.memory_allocated(self.device)

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Return the mean time of a call, over `times` calls after one that is not counted."""
        work()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.synchronize()
        return (time.perf_counter() - start) / times

    def bandwidth(self, times: int = 20) -> float:
        """Return the bytes per second that a copy on the device reads and writes."""
        source = torch.zeros(1 << (20 if self.dry else 29), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source), times)


def measured_device() -> Device:
    """Return the first CUDA device, or the CPU for a dry run."""
    if torch.cuda.is_available():
        return Device(torch.device("cuda", 0), False)
    return Device(torch.device("cpu"), True)
