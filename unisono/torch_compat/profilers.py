"""The private names of torch's profilers that Unisono uses.

https://docs.pytorch.org/docs/2.13/torch_cuda_memory.html documents the history of allocations under these names. The
profiler records the threads that Unisono starts only with an experimental setting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

MAX_ALLOCATIONS = 100_000
"""Number of allocations and releases in the history; each takes some kB in the file."""


def all_threads() -> Any:
    """Return the setting of torch's profiler with which it records all threads of the process."""
    return _ExperimentalConfig(profile_all_threads=True)


def is_profiling() -> bool:
    """Return whether a profiler of torch is recording this thread. A second one would take its events."""
    return bool(torch._C._autograd._profiler_enabled())


def record_allocations() -> None:
    """Record from now on the allocations on CUDA devices, with the calls that make them."""
    torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)


def dump_allocations(path: Path) -> None:
    """Write the allocations that were recorded, and stop recording."""
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
