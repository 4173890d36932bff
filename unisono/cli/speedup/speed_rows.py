"""The results of `unisono speedup`, one row for each option, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from unisono.cli.speedup.speed_options import SpeedOption
from unisono.config import size

WARM_UP = 3
"""First steps of a trial that are not timed: memory is allocated in them, and code is compiled."""

LEAST_COMPILE_SECONDS = 0.5
"""Additional time of the first steps up to which the table shows none."""

COLUMNS = {"step": ">9", "of the step time now": "21", "memory": ">8", "compile": ">8", "pays after": ">13"}
"""The columns between the name and the bits, with their formats."""


@dataclass
class TimedTrial:
    """One trial.

    Attributes:
        seconds: The time of each step of the main process.
        memory: The peak memory in bytes, of the process that has most.
        weights: The hash of the weights after the last step.
        promise: The promise of the run.
        reason: The reason of the promise.
    """

    seconds: Sequence[float]
    memory: int
    weights: str | None
    promise: str
    reason: str

    @property
    def step(self) -> float:
        """The median time of a step after the first ones."""
        return median(self.seconds[WARM_UP:] or self.seconds[-1:])

    @property
    def excess(self) -> float:
        """The seconds that all steps took, beyond those of as many median steps."""
        return max(sum(self.seconds) - len(self.seconds) * self.step, 0.0)


@dataclass
class SpeedRow:
    """The trials of one option.

    Attributes:
        option: The option.
        first: The first trial, with cold caches of compiled code and with the checks of the promise.
        trials: The timed trials, by round.
        ratios: For each round, the time of a step divided by that without the option, the mean of two trials.
        why_not: Why it was not tried; "": it was.
        failure: Why a trial failed; "": none did.
    """

    option: SpeedOption
    first: TimedTrial | None = None
    trials: dict[int, TimedTrial] = field(default_factory=dict)
    ratios: dict[int, float] = field(default_factory=dict)
    why_not: str = ""
    failure: str = ""

    @property
    def ratio(self) -> float | None:
        """The median ratio of the rounds; None if no round is complete."""
        return median(self.ratios.values()) if self.ratios and not self.failure else None

    def compile_seconds(self, base: SpeedRow) -> float:
        """Return how much longer the first steps take than those without the option."""
        if self.first is None or base.first is None:
            return 0.0
        return max(self.first.excess - base.first.excess, 0.0)

    def paid_after(self, base: SpeedRow) -> int | None:
        """Return the number of steps after which the time for compiling is saved; None: never."""
        if self.ratio is None or self.ratio >= 1:
            return None
        usual = median(trial.step for trial in base.trials.values())
        return math.ceil(self.compile_seconds(base) / (usual * (1 - self.ratio)))

    def bits(self, base: SpeedRow) -> str:
        """Return how the weights and the promise compare with those without the option."""
        one, two = base.first, self.first
        if one is None or two is None or self is base:
            return f"promise: {two.promise}" if two is not None else ""
        if two.promise != one.promise:
            return f"promise lowered to: {two.promise}"
        if one.weights is None or two.weights is None:
            return f"promise stays {two.promise}"
        return "same bits" if one.weights == two.weights else f"other bits, promise stays {two.promise}"

    def line(self, base: SpeedRow, width: int, *, pays: bool) -> str:
        """Return the line of the table. `pays`: whether the option is clearly faster."""
        step = median(trial.step for trial in self.trials.values()) if self.trials else None
        ratios = self.ratios.values()
        spread = f"{self.ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if self.ratio is not None else ""
        seconds, after = self.compile_seconds(base), self.paid_after(base)
        paid = "never" if after is None else f"{after} steps" if pays else "unclear"
        compiles = seconds > LEAST_COMPILE_SECONDS and self is not base
        cells = (
            f"{step:.4f} s" if step is not None else "",
            spread,
            size(max(trial.memory for trial in self.trials.values())) if self.trials else "",
            f"{seconds:.0f} s" if compiles else "",
            paid if compiles and self.trials else "",
        )
        padded = [f"{cell:{form}}" for cell, form in zip(cells, COLUMNS.values(), strict=True)]
        return "  ".join([f"{self.option.name:{width}}", *padded, self.bits(base)]).rstrip()

    def as_json(self, base: SpeedRow, *, pays: bool) -> dict[str, Any]:
        """Return the row for --json. `pays`: whether the option is clearly faster."""
        row: dict[str, Any] = {"option": self.option.name, "set": list(self.option.sets)}
        if self.why_not:
            return {**row, "not_tried": self.why_not}
        if self.failure:
            return {**row, "failed": self.failure}
        return {
            **row,
            "step_seconds": [trial.step for trial in self.trials.values()],
            "ratio": self.ratio,
            "ratios": list(self.ratios.values()),
            "memory": max((trial.memory for trial in self.trials.values()), default=None),
            "compile_seconds": self.compile_seconds(base),
            "pays_after_steps": self.paid_after(base) if pays else None,
            "pays": pays,
            "bits": self.bits(base),
            "promise": self.first.promise if self.first is not None else None,
            "reason": self.first.reason if self.first is not None else None,
            "fewer_digits": self.option.fewer_digits,
        }


def header(width: int) -> str:
    """Return the header of the table."""
    return "  ".join([f"{'option':{width}}", *(f"{name:{form}}" for name, form in COLUMNS.items()), "weights"])
