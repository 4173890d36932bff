"""The record of a study, study.json: everything on which its trials depend. A study continues only with the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from unisono.cli.request.run_dir import write
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError
from unisono.json_forms import parse

FILE = "study.json"
MEASURED = ("seconds", "memory")
"""Objectives that are measured. Their values differ from run to run, and so do the draws of a study."""

BUILT_IN = (*MEASURED, "parameters")
"""Objectives that need not be logged."""


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """Everything on which the trials of a study depend, besides the script itself.

    Attributes:
        script: The script.
        sets: The settings of all trials, and `settings_file`, a file with others.
        own: The script's own arguments.
        search: The search space.
        objectives: Names with "minimize" or "maximize".
        sampler: The sampler, and `pruner`, the pruner.
        seed: The seed of the study.
        round_size: The number of trials of a round.
        storage: The address of the database; "": the journal.
        optuna: The version of Optuna.
        trials: The number of trials. A study that continues may have another one.
    """

    script: str
    sets: tuple[str, ...]
    settings_file: str
    own: tuple[str, ...]
    search: tuple[str, ...]
    objectives: tuple[tuple[str, str], ...]
    sampler: str
    pruner: str
    seed: int
    round_size: int
    storage: str
    optuna: str
    trials: int

    @property
    def names(self) -> list[str]:
        """The names of the objectives."""
        return [name for name, _ in self.objectives]

    @property
    def directions(self) -> list[str]:
        """The directions of the objectives, "minimize" or "maximize"."""
        return [direction for _, direction in self.objectives]

    @property
    def is_measured(self) -> bool:
        """Whether an objective is measured."""
        return any(name in MEASURED for name in self.names)

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the study."""
        write(folder / FILE, json.dumps(asdict(self), indent=1) + "\n")

    def problems_against(self, folder: Path, line: CommandLine) -> list[Problem]:
        """Return the differences to the record in a folder, where a study is to continue."""
        before = read_record(folder)
        now = json.loads(json.dumps(asdict(self)))
        found = []
        for name in (field.name for field in fields(self) if field.name != "trials"):
            if before.get(name) != now[name]:
                facts = f"It was {before.get(name)}, and is {now[name]}."
                do = f"the same as before, or a new study: {line.without('--resume').flag('--run-dir', f'{folder}-2')}"
                found.append(Problem(f"The study in {folder} has another {name.replace('_', ' ')}.", facts, do))
        return found


def read_record(folder: Path) -> Mapping[str, Any]:
    """Return the record in the folder of a study. Raises SettingsError if it is damaged."""
    found = parse((folder / FILE).read_bytes())
    if found is None:
        facts = f"{folder / FILE} is no JSON object."
        raise SettingsError("The record of the study is damaged.", facts, f"restore it, or remove {folder}")
    return found
