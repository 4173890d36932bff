"""The range of each numeric setting."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, NamedTuple

from unisono.config.command_line import CommandLine
from unisono.config.value_types import shown
from unisono.errors import Problem


class Range(NamedTuple):
    """The values that a setting may have.

    least, most   bounds that are allowed themselves
    above, below  bounds that are not
    instead       values to type if it is out of range, the best one first; by default: the bound that it violates
    """

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf
    instead: tuple[str, ...] = ()

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.least <= value <= self.most and self.above < value < self.below

    def violated(self, value: float) -> tuple[str, str]:
        """Return what a value outside must be, and the nearest bound that is allowed."""
        bounds = [
            (self.least, not value >= self.least, "at least"),
            (self.most, not value <= self.most, "at most"),
            (self.above, not value > self.above, "above"),
            (self.below, not value < self.below, "below"),
        ]
        finite = [(bound, words) for bound, wrong, words in bounds if wrong and isfinite(bound)]
        bound, words = finite[0] if finite else (0, "")
        return (f"{words} {bound}" if finite else "finite"), str(bound)


LIMITS = {
    "steps": Range(1),
    "epochs": Range(1),
    "batch": Range(1),
    "micro_batch": Range(1),
    "virtual_ranks": Range(1),
    "seed": Range(0, 2**64 - 1),  # keys are made of 64 bits
    "clip": Range(above=0, instead=("1.0", "none")),
    "threads": Range(1),
    "checkpoint.every": Range(0),
    "checkpoint.keep": Range(1),
    "checkpoint.keep_every": Range(0),
    "loader.workers": Range(0),
    "loader.prefetch": Range(1),
    "parallel.model_parallel_devices": Range(1),
    "parallel.data_parallel_devices": Range(1),
    "parallel.stages_per_rank": Range(1),
    "ddp.bucket_mb": Range(0.001),
    "compress.start_step": Range(0),
    "compress.groups": Range(2),
    "compress.rank": Range(1),
    "compress.ratio": Range(above=0, most=1, instead=("0.01",)),
    "server.count": Range(1),
    "server.staleness": Range(0),
    "local_sgd.sites": Range(2),
    "local_sgd.sync_every": Range(1),
    "local_sgd.warmup_steps": Range(0),
    "local_sgd.outer_lr": Range(above=0, below=inf, instead=("0.7",)),
    "local_sgd.outer_momentum": Range(0, below=1, instead=("0.9",)),
    "local_sgd.num_fragments": Range(1),
    "local_sgd.sync_delay": Range(0),
    "divergence.every": Range(0),
    "audit_every": Range(0),
    "promise.min_interval": Range(0),
    "watchdog.timeout": Range(0),
}
"""By the settings' names. None is always allowed where the type allows it."""


def out_of_range(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """Return a message for each setting whose value is out of its range."""
    problems = []
    for name, limits in LIMITS.items():
        value = values.get(name)
        if value is None or value in limits:
            continue
        must, bound = limits.violated(value)
        dos = [str(line.setting(f"{name}={each}")) for each in limits.instead or (bound,)]
        problems.append(Problem(f"{name} = {shown(value)} is out of range.", f"It must be {must}.", ", or: ".join(dos)))
    return problems
