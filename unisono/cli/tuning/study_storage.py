"""The trials of a study in a journal file or in a database, by Optuna's storages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from unisono.cli.tuning.proposals import Proposal, quiet
from unisono.config import CommandLine
from unisono.errors import StudyError

JOURNAL = "study.journal"
LOCK_SECONDS = 5
"""After this time the lock of a journal counts as left behind by a process that was killed."""


class StudyStorage:
    """The trials of one study.

    Args:
        folder: The folder of the study, with its journal.
        url: The address of a database; "": the journal.
        name: The name of the study.
        directions: "minimize" or "maximize", for each objective.
        fresh: Whether the folder is new, and `ran`, whether a trial of the study has begun.
        line: The typed command, for messages.

    Raises:
        StudyError: The database cannot be used.
    """

    def __init__(
        self, folder: Path, url: str, name: str, directions: Sequence[str], line: CommandLine, *, fresh: bool, ran: bool
    ) -> None:
        self._where, self._line = url or str(folder / JOURNAL), line
        with self._errors():
            self._storage = _open(folder, url)
            known = {study.study_name for study in self._storage.get_all_studies()}
        if name not in known and ran:
            facts = f"{self._where} has no study {name}, and {folder} has trials of it."
            raise StudyError("The trials of the study are gone.", facts, f"restore {self._where}, then: {line}")
        if name in known and fresh and url:
            facts = f"{self._where} has a study {name}, and {folder} has none of its trials."
            raise StudyError("The study exists already.", facts, str(line.flag("--run-dir", f"{folder}-2")))
        with self._errors():
            if name not in known:
                self._storage.create_new_study([StudyDirection[each.upper()] for each in directions], name)
            self._study = self._storage.get_study_id_from_name(name)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        with self._errors():
            return sorted(self._storage.get_all_trials(self._study), key=lambda trial: trial.number)

    def add(self, proposal: Proposal, space: Mapping[str, BaseDistribution]) -> None:
        """Add a trial that is running."""
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(proposal.params),
            distributions=dict(space),
            system_attrs=dict(proposal.system_attrs),
        )
        with self._errors():
            self._storage.create_new_trial(self._study, template_trial=trial)

    def report(self, number: int, step: int, value: float) -> None:
        """Add an intermediate value of a trial."""
        with self._errors():
            self._storage.set_trial_intermediate_value(self._id(number), step, value)

    def finish(
        self,
        number: int,
        state: TrialState,
        values: Sequence[float] | None,
        facts: Mapping[str, Any],
        attrs: Mapping[str, Any],
    ) -> None:
        """End a trial.

        Args:
            number: Its number.
            state: COMPLETE, PRUNED or FAIL.
            values: The values of the objectives; None: it failed.
            facts: What else is known of it (user attributes).
            attrs: What the pruner stores with it (system attributes).
        """
        with self._errors():
            trial = self._id(number)
            for name, value in attrs.items():
                self._storage.set_trial_system_attr(trial, name, value)
            for name, value in facts.items():
                self._storage.set_trial_user_attr(trial, name, value)
            self._storage.set_trial_state_values(trial, state, values)

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study, number)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the database in place of an error of Optuna, SQLAlchemy or a driver."""
        try:
            with quiet():
                yield
        except StudyError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            facts = f"{self._where}: {reason}. Trials that ran are in the folder of the study, so nothing is lost."
            raise StudyError(
                "The database of the study cannot be used.", facts, f"{self._line.flag('--resume')}"
            ) from error


def _open(folder: Path, url: str) -> BaseStorage:
    if url:
        return RDBStorage(url)
    path = str(folder / JOURNAL)
    return JournalStorage(JournalFileBackend(path, lock_obj=JournalFileSymlinkLock(path, grace_period=LOCK_SECONDS)))


VERSION = optuna.__version__
"""Optuna's version, on which draws depend."""
