"""Short runs of placements: which are measured again, and which of them counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.test_costs import COSTS
from unisono.costs.candidates import ranked
from unisono.costs.memory_model import memory_of
from unisono.costs.placement_trials import MOST_CLOSE, PlacementTrial, PlacementTrials
from unisono.costs.placements import Placement, placements
from unisono.costs.recorded_costs import RoundBytes, StepSeconds

ONE, TWO, FOUR = Placement(), Placement(2), Placement(4)
AGAIN = replace(
    COSTS, rounds=RoundBytes(10**7, 8 * 10**7, 2 * 10**7, 5 * 10**6, {}), seconds=StepSeconds(0.13, 0.02, 0.01)
)


def short_run(step: float, peak: int = 0) -> PlacementTrial:
    """Return a run whose steps take so long, all of it in the update."""
    return PlacementTrial(StepSeconds(0.0, step, 0.0), peak)


def trials(**steps: float) -> PlacementTrials:
    """Return one short run of each placement, beside the one on one process: 0.83 s a step."""
    found = PlacementTrials(COSTS)
    for name, step in steps.items():
        found.add({"two": TWO, "four": FOUR}[name], short_run(step))
    return found


def turn(found: PlacementTrials, wanted: int = 3) -> list[Placement]:
    """Return the placements to measure next, of those on one process and of those that were measured."""
    return found.turn(ranked([found.candidate(each) for each in (ONE, TWO, FOUR) if found.count(each)]), wanted)


def test_placements_that_are_close_to_the_quickest_are_measured_again_in_turns() -> None:
    found = trials(two=0.5, four=0.52)
    for _ in range(2):
        assert turn(found) == [TWO, FOUR]
        for placement in (TWO, FOUR):
            found.add(placement, short_run(0.5))
    assert turn(found) == []
    assert found.candidate(TWO).trials == 3
    assert found.candidate(ONE).trials == 1


def test_placements_whose_runs_differ_are_measured_more_often() -> None:
    found = trials(two=0.5, four=0.56)
    for _ in range(2):
        assert turn(found) == [TWO, FOUR]
        found.add(TWO, short_run(0.6))
        found.add(FOUR, short_run(0.62))
    for _ in range(6):
        assert set(turn(found)) == {TWO, FOUR}
        found.add(TWO, short_run(0.6))
        found.add(FOUR, short_run(0.62))
    assert turn(found) == [], "nine runs of each"


def test_a_placement_that_falls_behind_is_left_out() -> None:
    found = trials(two=0.5, four=0.56)
    assert turn(found) == [TWO, FOUR]
    for _ in range(2):
        found.add(TWO, short_run(0.5))
        found.add(FOUR, short_run(0.66))
    assert turn(found) == [], "nothing else is close to the quickest"


def test_a_placement_that_is_ahead_of_all_others_is_not_measured_again() -> None:
    assert turn(trials(two=0.5, four=0.65)) == []
    assert turn(trials(two=0.8), wanted=1) == []


def test_one_process_is_measured_again_if_it_is_close() -> None:
    found = trials(two=0.8)
    assert turn(found) == [TWO, ONE]
    found.add(ONE, short_run(0.7))
    found.add(ONE, short_run(0.6))
    assert found.candidate(ONE).seconds == pytest.approx(0.7), "the first run took 0.83 s"


def test_the_run_of_median_time_counts_and_the_largest_memory() -> None:
    found = trials(two=0.5)
    base = memory_of(COSTS, TWO).total
    for step, more in ((0.4, 5), (0.9, 3)):
        found.add(TWO, short_run(step, base + more))
    each = found.candidate(TWO)
    assert each.seconds == pytest.approx(0.5)
    assert each.memory is not None
    assert each.memory.total == base + 5
    found.add(TWO, short_run(0.6))
    assert found.candidate(TWO).seconds == pytest.approx(0.5), "of two runs in the middle the quicker one"


def test_the_first_choice_is_measured_even_if_its_time_was_predicted() -> None:
    found = PlacementTrials(COSTS, AGAIN)
    found.add(TWO, short_run(0.5))
    predicted = replace(found.candidate(replace(TWO, recompute=True)), seconds=0.2)
    assert predicted.trials == 0
    assert found.turn([predicted, found.candidate(TWO)], 3) == [predicted.placement]
    found.add(predicted.placement, short_run(0.3))
    assert found.candidate(predicted.placement).seconds == pytest.approx(0.3)


def test_a_placement_that_fails_is_not_tried_again() -> None:
    found = trials(two=0.5, four=0.55)
    found.add(FOUR, None)
    assert turn(found) == [TWO]
    found.add(TWO, None)
    assert turn(found) == []
    assert found.candidate(TWO).seconds == pytest.approx(0.5), "the run before"


def test_a_turn_has_a_few_placements() -> None:
    found = PlacementTrials(COSTS)
    listed = list(placements(4, recompute=False))
    for placement in listed:
        found.add(placement, short_run(0.5))
    assert len(found.turn(ranked([found.candidate(each) for each in listed]), 3)) == MOST_CLOSE < len(listed)


def test_without_times_nothing_is_measured_again() -> None:
    found = PlacementTrials(replace(COSTS, seconds=None))
    assert found.turn([found.candidate(each) for each in (ONE, TWO)], 3) == []


def test_a_note_names_the_placement_whose_runs_differ_most() -> None:
    found = trials(two=0.5, four=0.5)
    found.add(TWO, short_run(0.55))
    assert found.notes() == []
    found.add(FOUR, short_run(0.7))
    assert found.notes() == [
        "Short runs of 4 replicas differ by 40%: the speed of this machine varies. "
        "Placements that differ by less may change their order."
    ]
