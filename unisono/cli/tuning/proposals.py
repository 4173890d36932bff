"""Ask Optuna for the trials of a round, and whether a trial is pruned, as functions of earlier rounds alone.

For each round, the study is built anew in memory from the trials of earlier rounds, with a sampler whose seed follows
from the seed of the study and the number of earlier trials. So neither the order in which trials end, nor a restart of
the command changes a draw. What samplers and pruners store besides a trial's parameters (system attributes) is stored
with the trial.

A pruner compares a trial with those of earlier rounds. Trials of the same round are there without any value.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from unisono.cli.tuning.search_space import Choice, Dimension
from unisono.cli.tuning.variant_names import build_pruner, build_sampler
from unisono.config import CommandLine
from unisono.errors import StudyError, UnisonoError

STUDY_ATTRIBUTES = "unisono:study"
"""The system attribute of a trial with those of its study, after the trial was asked for."""

IN_MEMORY = "study"
"""The name of studies in memory. Hyperband chooses the bracket of a trial by the name of its study."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's notes and warnings about experimental features during a block."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)


def distribution_of(dimension: Dimension) -> BaseDistribution:
    """Return the distribution of Optuna for a dimension."""
    if dimension.kind == "choices":
        return CategoricalDistribution(dimension.choices)
    log = dimension.kind == "log"
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=log, step=int(dimension.step) or 1)
    return FloatDistribution(dimension.low, dimension.high, log=log, step=dimension.step or None)


@dataclass(frozen=True)
class Proposal:
    """A trial to run: the values of its settings, and what the sampler stores with it."""

    params: Mapping[str, Choice]
    system_attrs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The parts of a study on which draws and pruning depend.

    Attributes:
        dimensions: The search space.
        directions: "minimize" or "maximize", for each objective.
        sampler: The value of --sampler.
        pruner: The value of --pruner.
        seed: The seed of the study.
        line: The typed command, for messages.
    """

    dimensions: Sequence[Dimension]
    directions: Sequence[str]
    sampler: str
    pruner: str
    seed: int
    line: CommandLine = field(default_factory=CommandLine)

    @property
    def space(self) -> dict[str, BaseDistribution]:
        """The distributions by the names of the settings."""
        return {dimension.name: distribution_of(dimension) for dimension in self.dimensions}

    def ask(self, earlier: Sequence[FrozenTrial], count: int) -> list[Proposal]:
        """Return the trials of the next round.

        Args:
            earlier: All trials of earlier rounds, by number.
            count: The number of trials to ask for.
        """
        with quiet(), self._errors():
            sampler = build_sampler(self.sampler, (self.seed * 1_000_003 + len(earlier)) % 2**32, self.space, self.line)
            study, storage = self._study(earlier, sampler)
            for _ in range(count):
                study.ask(self.space)
            asked = study.get_trials(deepcopy=False)[len(earlier) :]
            shared = storage.get_study_system_attrs(storage.get_study_id_from_name(IN_MEMORY))
        return [Proposal(trial.params, {**trial.system_attrs, STUDY_ATTRIBUTES: shared}) for trial in asked]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the sampler in place of an error that it raises only once it draws."""
        try:
            yield
        except UnisonoError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            line = self.line.without("--resume").without("--sampler")
            raise StudyError(
                f"The sampler {self.sampler} cannot draw trials.", f"Optuna: {reason}", str(line)
            ) from error

    def judge(self, earlier: Sequence[FrozenTrial], asked: Sequence[FrozenTrial], place: int) -> PruningJudge:
        """Return what decides whether a trial is pruned.

        Args:
            earlier: All trials of earlier rounds, by number.
            asked: The trials of the round.
            place: The place of the trial in the round.
        """
        with quiet():
            study, _ = self._study(earlier, optuna.samplers.RandomSampler(0))
            for other in asked[:place]:
                study.add_trial(_copy(other, TrialState.RUNNING))
            study.add_trial(_copy(asked[place], TrialState.WAITING))
            return PruningJudge(study, study.ask(), active=len(self.directions) == 1)

    def _study(
        self, earlier: Sequence[FrozenTrial], sampler: optuna.samplers.BaseSampler
    ) -> tuple[optuna.Study, InMemoryStorage]:
        """Return a study in memory with these trials, and its storage."""
        storage = InMemoryStorage()
        study = optuna.create_study(
            storage=storage,
            sampler=sampler,
            pruner=build_pruner(self.pruner, self.line),
            study_name=IN_MEMORY,
            directions=[StudyDirection[each.upper()] for each in self.directions],
        )
        study.add_trials(earlier)
        if earlier:
            number = storage.get_study_id_from_name(IN_MEMORY)
            for name, value in earlier[-1].system_attrs.get(STUDY_ATTRIBUTES, {}).items():
                storage.set_study_system_attr(number, name, value)
        return study, storage


def _copy(trial: FrozenTrial, state: TrialState) -> FrozenTrial:
    """Return a trial without any value, in another state."""
    return create_trial(
        state=state, params=trial.params, distributions=trial.distributions, system_attrs=trial.system_attrs
    )


class PruningJudge:
    """Decide whether a trial is pruned, from its values in the order of its steps.

    Args:
        study: A study with the trials of earlier rounds.
        trial: The trial in it.
        active: False: nothing is pruned, because pruners compare one objective.
    """

    def __init__(self, study: optuna.Study, trial: optuna.Trial, *, active: bool) -> None:
        self._study, self._trial, self._active = study, trial, active

    def prunes(self, step: int, value: float) -> bool:
        """Return whether the trial is pruned after this step."""
        if not self._active:
            return False
        with quiet():
            self._trial.report(value, step)
            return self._trial.should_prune()

    @property
    def system_attrs(self) -> Mapping[str, Any]:
        """What the pruner stores with the trial."""
        return self._study.get_trials(deepcopy=False)[-1].system_attrs
