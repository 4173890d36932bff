"""Every sampler and pruner of Optuna, with values in place of runs: the same draws again, and after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("optuna")

from optuna.trial import FrozenTrial, TrialState, create_trial

from unisono.cli.tuning.proposals import Optimizer
from unisono.cli.tuning.search_space import Dimension
from unisono.cli.tuning.variant_names import PRUNERS, SAMPLERS
from unisono.config import CommandLine
from unisono.errors import SettingsError

LISTS = (Dimension("depth", "choices", choices=(1, 2, 4)), Dimension("kind", "choices", choices=("a", "b")))
RANGES = (*LISTS, Dimension("lr", "log", 1e-4, 1e-1))
FINITE = ("grid", "bruteforce")
NEED_OPTIONS = {
    "patient": "patient(patience=3)",
    "percentile": "percentile(percentile=25.0)",
    "threshold": "threshold(upper=1.5)",
}
ROUND, STEPS = 4, 20


def optimizer(dimensions: Sequence[Dimension], sampler: str, pruner: str = "none", objectives: int = 1) -> Optimizer:
    line = CommandLine(("unisono", "tune", "train.py", "--sampler", sampler, "--pruner", pruner))
    directions = ["minimize", "maximize"][:objectives]
    return Optimizer(dimensions=dimensions, directions=directions, sampler=sampler, pruner=pruner, seed=3, line=line)


def value(params: Mapping[str, Any]) -> float:
    return 0.1 * float(params["depth"]) + (params["kind"] == "b") + 10 * float(params.get("lr", 0.0))


def next_round(study: Optimizer, known: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Ask for a round, judge its trials, and return them."""
    proposals = study.ask(known, ROUND)
    states = [
        create_trial(
            state=TrialState.RUNNING,
            params=dict(each.params),
            distributions=study.space,
            system_attrs=dict(each.system_attrs),
        )
        for each in proposals
    ]
    found = []
    for place, proposal in enumerate(proposals):
        judge = study.judge(known, states, place)
        reports = {step: value(proposal.params) + 1 / (step + 1) for step in range(STEPS)}
        end = next((step for step, number in reports.items() if judge.prunes(step, number)), STEPS)
        found.append(
            create_trial(
                state=TrialState.COMPLETE if end == STEPS else TrialState.PRUNED,
                params=dict(proposal.params),
                distributions=study.space,
                values=[value(proposal.params), float(proposal.params["depth"])][: len(study.directions)],
                intermediate_values={step: number for step, number in reports.items() if step <= end},
                system_attrs={**proposal.system_attrs, **judge.system_attrs},
            )
        )
    return found


def run(study: Optimizer, rounds: int = 5) -> list[FrozenTrial]:
    known: list[FrozenTrial] = []
    for _ in range(rounds):
        known += next_round(study, known)
    return known


@pytest.mark.parametrize("objectives", [1, 2])
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each == "gp" else each for each in SAMPLERS]
)
def test_a_sampler_draws_the_same_trials_again(name: str, objectives: int) -> None:
    dimensions = LISTS if name in FINITE else RANGES
    if name == "cmaes" and find_spec("cmaes") is None:
        with pytest.raises(SettingsError, match="--sampler cmaes needs another package"):
            run(optimizer(dimensions, name))
        return
    known = run(optimizer(dimensions, name, objectives=objectives))
    drawn = [trial.params for trial in known]
    again = optimizer(dimensions, name, objectives=objectives)
    assert [trial.params for trial in next_round(again, known[:16])] == drawn[16:]
    assert len({str(params) for params in drawn}) == (6 if name in FINITE else 20)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each == "wilcoxon" else each for each in PRUNERS]
)
def test_a_pruner_prunes_the_same_trials_again(name: str) -> None:
    study = optimizer(RANGES, "random", NEED_OPTIONS.get(name, name))
    known = run(study)
    assert [trial.intermediate_values for trial in next_round(study, known[:16])] == [
        trial.intermediate_values for trial in known[16:]
    ]
    pruned = [trial.state == TrialState.PRUNED for trial in known]
    assert any(pruned) == (name not in ("none", "patient"))  # values that fall leave no patience
    if name != "threshold":
        assert not any(pruned[:ROUND])  # the first round sees no other trial


@pytest.mark.parametrize("name", NEED_OPTIONS)
def test_a_pruner_without_its_option_is_named_with_an_example(name: str) -> None:
    with pytest.raises(SettingsError) as error:
        optimizer(LISTS, "random", name).judge([], [create_trial(state=TrialState.WAITING)], 0)
    assert f"--pruner '{name}(" in error.value.problems[0].remedy


def test_grid_and_bruteforce_name_a_space_that_has_no_end() -> None:
    with pytest.raises(SettingsError, match="The sampler grid needs lists"):
        optimizer(RANGES, "grid").ask([], ROUND)
