"""unisono tune: the search space, rounds, processes, draws and pruning."""

from __future__ import annotations

import pytest

from unisono.cli.tuning.round_plan import MoveTimes, RunningTrial, larger, rounds, share, taken
from unisono.cli.tuning.search_space import Dimension, dimension_of, fitted
from unisono.cli.tuning.study_table import TrialRow, pareto_front
from unisono.config import CommandLine
from unisono.errors import Problem

LINE = CommandLine(("unisono", "tune", "train.py"))


@pytest.mark.parametrize("text", ["lr=log(0.0001,0.1)", "depth=[2,4,8]", "width=linear(8,64,8)", "kind=[sgd,adam]"])
def test_a_dimension_is_shown_as_it_is_typed(text: str) -> None:
    assert str(dimension_of(text, LINE)) == text


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("lr=log(1,0.1)", "reversed"),
        ("lr=linear(1,1)", "empty"),
        ("lr=log(0,1)", "positive"),
        ("lr=[]", "empty"),
        ("lr=lgo(1,2)", "no range lgo"),
        ("lr", "name of a setting"),
        ("lr=[1,1]", "twice"),
    ],
)
def test_a_wrong_dimension_is_named(text: str, facts: str) -> None:
    found = dimension_of(text, LINE)
    assert isinstance(found, Problem)
    assert facts in found.facts


def test_a_dimension_fits_its_setting() -> None:
    depth = dimension_of("depth=linear(1,8)", LINE)
    assert isinstance(depth, Dimension)
    assert fitted(depth, {"depth": "a whole number"}, ["depth"], LINE).ends == (1, 8)  # type: ignore[union-attr]
    assert isinstance(fitted(depth, {"depth": "true or false"}, ["depth"], LINE), Problem)
    unknown = fitted(depth, {}, ["depths"], LINE)
    assert isinstance(unknown, Problem)
    assert unknown.facts == "The nearest name is depths."


def test_processes_are_divided_among_trials() -> None:
    assert rounds(10, 4) == [range(4), range(4, 8), range(8, 10)]
    assert [share(4, 4, unfinished) for unfinished in (8, 4, 2, 1)] == [1, 1, 2, 4]
    assert taken(4, [1], 2) == (0, 2)
    long, short = RunningTrial(0, 1, 8, 60.0), RunningTrial(1, 1, 8, 4.0)
    assert larger([short, long], 2, 5.0) == {0: 2}
    assert larger([short], 3, 5.0) == {}
    assert larger([RunningTrial(0, 1, 1, 60.0)], 3, 5.0) == {}


def test_the_time_of_a_move_is_measured() -> None:
    times = MoveTimes()
    assert times.expected_seconds == 0.0
    times.starts += [2.0, 3.0, 10.0]
    assert times.expected_seconds == 3.0  # a move takes a start at least
    times.moves.append(4.0)
    assert (times.expected_seconds, times.as_json()) == (4.0, {"moves": 1, "move_seconds": 4.0})


def test_words_that_toml_reads_as_numbers_stay_words() -> None:
    found = dimension_of("kind=[good,nan,inf]", LINE)
    assert isinstance(found, Dimension)
    assert found.choices == ("good", "nan", "inf")


def test_the_pareto_front_has_trials_that_no_other_surpasses() -> None:
    points = [(1.0, 5.0), (2.0, 9.0), (2.0, 4.0), (3.0, 9.0)]
    rows = [TrialRow(i, "complete", point, {}) for i, point in enumerate(points)]
    assert [row.number for row in pareto_front(rows, ["minimize", "maximize"])] == [0, 1]
