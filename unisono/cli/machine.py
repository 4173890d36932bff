"""What a request needs of this machine beside processes: devices, a compiler. torch is loaded where it must be."""

from __future__ import annotations

from typing import Any

from unisono.errors import Problem
from unisono.settings import Line


def problems_here(settings: Any, processes: int, line: Line) -> list[Problem]:
    """What this machine lacks for these settings, which are well by themselves, and so many processes."""
    parallel = settings.parallel
    if parallel.split == parallel.threads == 1 and not parallel.compile:
        return []
    from unisono.parallel.devices import problems_of_machine  # a second

    return problems_of_machine(parallel, processes, line)
