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
from sqlalchemy import make_url

from unisono.cli.tuning.proposals import Proposal, quiet
from unisono.config import CommandLine
from unisono.errors import StudyError

JOURNAL = "study.journal"
LOCK_SECONDS = 5
"""After this time the lock of a journal counts as left behind by a process that was killed."""
PATIENCE_SECONDS = 30.0
"""The time for which a study waits for a database of SQLite that another process has locked. Its trials train on."""


class StudyStorage:
    """The trials of one study.

    Args:
        folder: The folder of the study, with its journal.
        url: The address of a database; "": the journal.
        name: The name of the study.
        directions: "minimize" or "maximize", for each objective.
        fresh: Whether the folder is new.
        line: The typed command, for messages.

    Attributes:
        where: The database.
        is_new: Whether the database did not have the study.

    Raises:
        StudyError: The database cannot be used.
    """

    def __init__(
        self, folder: Path, url: str, name: str, directions: Sequence[str], line: CommandLine, *, fresh: bool
    ) -> None:
        self.where, self._line, self._fresh = url or str(folder / JOURNAL), line, fresh
        self._file: Path | None = None
        with self._errors():
            self._storage = _open(folder, url)
            known = {study.study_name for study in self._storage.get_all_studies()}
            self._file = _file_of(url) if url else folder / JOURNAL
        self.is_new = name not in known
        if name in known and fresh and url:
            facts = f"{self.where} has a study {name}, and {folder} has none of its trials."
            raise StudyError("The study exists already.", facts, str(line.flag("--run-dir", f"{folder}-2")))
        with self._errors():
            if self.is_new:
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
            if self._file is not None and not self._file.exists():
                raise FileNotFoundError("it was removed while the study was running")
            with quiet():
                yield
        except StudyError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            facts, do = f"{self.where}: {reason}.", str(self._line.without("--resume").flag("--resume"))
            if not self._fresh or self._file is not None:
                facts += " Trials are in the folder of the study, so nothing is lost."
            else:
                do = f"{self._line.without('--storage')} (a journal in the folder of the study)"
            raise StudyError("The database of the study cannot be used.", facts, do) from error


def _open(folder: Path, url: str) -> BaseStorage:
    if url:
        arguments = {"timeout": PATIENCE_SECONDS} if url.startswith("sqlite") else {}
        return RDBStorage(url, engine_kwargs={"connect_args": arguments})
    path = folder / JOURNAL
    _cut_torn_line(path)
    lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_SECONDS)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _file_of(url: str) -> Path | None:
    """Return the file of a database of SQLite; None: it has none, or is on a server."""
    address = make_url(url)
    return Path(address.database) if address.get_backend_name() == "sqlite" and address.database else None


def _cut_torn_line(path: Path) -> None:
    """Remove a line without end, which a full disk or a power failure has left. Optuna would append to it."""
    data = path.read_bytes() if path.is_file() else b""
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


VERSION = optuna.__version__
"""Optuna's version, on which draws depend."""
