"""The record of a population, study.json: everything on which its members depend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from unisono.cli.request.run_dir import write
from unisono.cli.tuning.population.exploit_explore import Rules
from unisono.cli.tuning.study_record import FILE, MEASURED
from unisono.config import CommandLine
from unisono.errors import Problem


@dataclass(frozen=True, kw_only=True)
class PopulationRecord:
    """Everything on which the members of a population depend, besides the script itself.

    Attributes:
        script: The script.
        sets: The settings of all members, and `settings_file`, a file with others.
        own: The script's own arguments.
        search: The search space.
        objectives: One name with "minimize" or "maximize".
        seed: The seed of the study.
        population: The number of members.
        interval: The number of steps of a generation.
        quantile: The fraction of members that copy others.
        factors: By which settings are multiplied.
        resample: The probability with which a setting is drawn again.
    """

    script: str
    sets: tuple[str, ...]
    settings_file: str
    own: tuple[str, ...]
    search: tuple[str, ...]
    objectives: tuple[tuple[str, str], ...]
    seed: int
    population: int
    interval: int
    quantile: float
    factors: tuple[float, float]
    resample: float

    @property
    def name(self) -> str:
        """The name of the objective."""
        return self.objectives[0][0]

    @property
    def direction(self) -> str:
        """The direction of the objective, "minimize" or "maximize"."""
        return self.objectives[0][1]

    @property
    def is_measured(self) -> bool:
        """Whether the objective is measured."""
        return self.name in MEASURED

    @property
    def rules(self) -> Rules:
        """How the population changes from one generation to the next."""
        return Rules(quantile=self.quantile, factors=self.factors, resample=self.resample, seed=self.seed)

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the study."""
        write(folder / FILE, json.dumps(asdict(self), indent=1) + "\n")

    def problems_against(self, before: Mapping[str, Any], folder: Path, line: CommandLine) -> list[Problem]:
        """Return the differences to an earlier record, whose study is to continue."""
        new = f"{line.without('--resume').flag('--run-dir', f'{folder}-2')}"
        if "population" not in before:
            facts = "It asks Optuna for trials, each of which trains alone."
            return [Problem(f"The study in {folder} has no population.", facts, new)]
        now = json.loads(json.dumps(asdict(self)))
        return [
            Problem(
                f"The study in {folder} has another {field.name.replace('_', ' ')}.",
                f"It was {before.get(field.name)}, and is {now[field.name]}.",
                f"the same as before, or a new study: {new}",
            )
            for field in fields(self)
            if before.get(field.name) != now[field.name]
        ]
