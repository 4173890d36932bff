"""The flags of `unisono tune` for a population, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from unisono.cli.request.suggestions import WHOLE
from unisono.cli.tuning.search_space import Dimension
from unisono.config import CommandLine
from unisono.config.entries import library_settings
from unisono.errors import Problem

POPULATION = Group("Population", sort_key=1)

QUANTILE, FACTORS, RESAMPLE = 0.2, (0.8, 1.2), 0.25
"""Defaults. The first two are those of the paper (exploit_explore.py)."""

LEAST = 2
"""The smallest population: one member copies the other."""

CHANGEABLE = ("clip",)
"""Settings of the library that can change while a run trains. The others are part of the order of samples, of the
layout, or of the state of exchanges."""

OF_TRIALS = {
    "--trials": "A population has one run for each member.",
    "--round-size": "A generation is a round of all members.",
    "--sampler": "Members draw their first settings at random, and perturb those of better members.",
    "--pruner": "A member that falls behind copies a better one, and does not end.",
    "--storage": "The state of a population is in the run directories of its members.",
    "--no-move": "Members do not move.",
}
"""Flags that do not go with --population, and why."""


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class PopulationFlags:
    """The flags of a population.

    Parameters
    ----------
    population
        Population-based training with this many members, at least 2, in place of trials.
    interval
        Steps after which the worst members copy the state of the best ones and perturb their settings.
    quantile
        The fraction of members that copy, and of those that are copied, by default 0.2.
    factors
        By which a setting is multiplied: LOW,HIGH, by default 0.8,1.2.
    resample
        The probability with which a setting is drawn again in place of that, by default 0.25.
    """

    population: Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False, group=POPULATION)] = None
    interval: Annotated[int | None, WHOLE, Parameter(metavar="STEPS", show_default=False, group=POPULATION)] = None
    quantile: Annotated[float | None, Parameter(metavar="Q", show_default=False, group=POPULATION)] = None
    factors: Annotated[str, Parameter(metavar="LOW,HIGH", show_default=False, group=POPULATION)] = ""
    resample: Annotated[float | None, Parameter(metavar="P", show_default=False, group=POPULATION)] = None

    def words(self) -> list[str]:
        """Return the flags as they are typed."""
        values = {name: value for name, value in vars(self).items() if value not in (None, "")}
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]

    def problems_without_population(self, line: CommandLine) -> list[Problem]:
        """Return what is wrong with these flags in a study without a population."""
        return [
            Problem(
                f"--{name} needs --population.", "Trials of Optuna copy no state.", str(line.flag("--population", "4"))
            )
            for name, value in vars(self).items()
            if value not in (None, "")
        ]

    def problems(self, typed: Mapping[str, Any], line: CommandLine) -> list[Problem]:
        """Return what is wrong with the flags of a new population.

        Args:
            typed: The flags of trials, by name; None or "": not typed.
            line: The typed command, for messages.
        """
        found = [
            Problem(f"{flag} does not go with --population.", reason, str(line.without(flag)))
            for flag, reason in OF_TRIALS.items()
            if typed[flag] not in (None, "", False)
        ]
        if self.population is not None and self.population < LEAST:
            facts = "One member copies another one, so there are at least 2."
            do = str(line.flag("--population", "4"))
            found.append(Problem(f"--population {self.population} is out of range.", facts, do))
        if self.interval is not None and self.interval < 1:
            facts = "A generation has at least one step."
            found.append(
                Problem(f"--interval {self.interval} is out of range.", facts, str(line.flag("--interval", "100")))
            )
        if self.quantile is not None and not 0 < self.quantile <= 0.5:
            facts, do = "Above 0, and at most 0.5.", str(line.flag("--quantile", f"{QUANTILE:g}"))
            found.append(Problem(f"--quantile {self.quantile:g} is out of range.", facts, do))
        if self.resample is not None and not 0 <= self.resample <= 1:
            facts, do = "From 0 to 1.", str(line.flag("--resample", f"{RESAMPLE:g}"))
            found.append(Problem(f"--resample {self.resample:g} is out of range.", facts, do))
        if self.factors and factors_of(self.factors) is None:
            facts = "There are two factors: one above 0 and below 1, and one above 1."
            do = str(line.flag("--factors", "0.8,1.2"))
            found.append(Problem(f"Invalid value for --factors: {self.factors}", facts, do))
        return found


def factors_of(text: str) -> tuple[float, float] | None:
    """Return the two factors; None if the text has no such factors."""
    try:
        low, high = sorted(float(word) for word in text.split(","))
    except ValueError:
        return None
    return (low, high) if 0 < low < 1 < high and math.isfinite(high) else None


def problems_of_space(dimensions: Sequence[Dimension], results: Sequence[str], line: CommandLine) -> list[Problem]:
    """Return a problem for each searched setting that cannot change while a run trains.

    Args:
        dimensions: The search space.
        results: The settings of the script that results depend on; (): not known.
        line: The typed command, for messages.
    """
    found = []
    for dimension in dimensions:
        name = dimension.name
        typed = next((word for word in line.words if word.replace(" ", "").startswith(f"{name}=")), "")
        do = str(line.without("--search", typed)) if len(dimensions) > 1 else str(line.without("--population"))
        if name in library_settings() and name not in CHANGEABLE:
            facts = f"A member continues with other settings. Of those that every run has, {CHANGEABLE[0]} can change."
            found.append(Problem(f"{name} cannot change while a run trains.", facts, do))
        elif results and name not in results:
            facts = "The script says so (changes_bits), and members differ in their results."
            found.append(Problem(f"No result depends on {name}.", facts, do))
    return found
