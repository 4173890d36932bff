"""The ledger of steps: each step is used once and within the staleness bound, with slow, dead and hung workers."""

from __future__ import annotations

import random

import pytest

from unisono.param_server.ledger import LEAST_SECONDS, Ledger


def play(steps: int, workers: int, bound: int | None, seed: int, deaths: float) -> tuple[list[int], Ledger]:
    """Simulate a run with random events; return the numbers of the used steps, and the ledger."""
    dice, ledger, used = random.Random(seed), Ledger(0, steps, bound), []
    alive, now = set(range(workers)), 0.0
    computing: dict[int, int] = {}
    for _ in range(100 * steps):
        if ledger.is_over:
            break
        now += dice.random() * 0.1
        idle = [w for w in alive if w not in computing and w not in ledger.out]
        for worker in idle:
            number = ledger.hand(worker, now)
            if number is not None:
                computing[worker] = number
        worker = dice.choice(sorted(computing) or [0])
        if worker in computing and dice.random() < 0.7 / (1 + worker):  # each worker is slower than the one before
            ledger.arrive(worker, computing.pop(worker), now)
        elif worker in computing and len(alive) > 1 and dice.random() < deaths:
            alive.remove(worker)
            del computing[worker]
            ledger.lose(worker)
        while (turn := ledger.turn()) is not None:
            used.append(ledger.out[turn].number)
            ledger.use(turn)
        ledger.overtake(now, idle=any(w not in computing and w not in ledger.out for w in alive))
    return used, ledger


@pytest.mark.parametrize(
    ("workers", "bound"),
    [
        (workers, bound)
        for workers in (1, 2, 3, 5)
        for bound in (None, 0, 1, 2, 4, 9)
        if bound is None or bound >= workers - 1
    ],
)
def test_every_step_is_used_once_within_the_staleness_bound(workers: int, bound: int | None) -> None:
    """A lower bound, with which some workers would always wait, is refused."""
    for seed in range(20):
        used, ledger = play(40, workers, bound, seed, deaths=0.05 * (seed % 2))
        assert sorted(used) == list(range(40))
        assert bound is None or ledger.latest <= bound
        assert ledger.version == 40


def test_one_worker_is_never_late_and_in_order() -> None:
    used, ledger = play(20, 1, None, 0, 0.0)
    assert (used, ledger.late) == (list(range(20)), 0)


def test_the_oldest_step_is_waited_for_at_the_staleness_bound() -> None:
    ledger = Ledger(0, 10, 1)
    assert [ledger.hand(w, 0.0) for w in (1, 2)] == [0, 1]
    ledger.arrive(1, 0, 1.0)
    assert ledger.turn() == 1  # step 1 is then late by one
    ledger.use(1)
    ledger.hand(1, 1.0)
    ledger.arrive(1, 2, 2.0)
    assert ledger.turn() is None
    ledger.arrive(2, 1, 3.0)
    assert ledger.turn() == 2
    ledger.use(2)
    assert ledger.turn() == 1


def test_a_worker_that_delays_the_others_is_overtaken_and_its_gradient_dropped() -> None:
    ledger = Ledger(0, 10, 1)
    ledger.hand(1, 0.0), ledger.hand(2, 0.0)
    ledger.arrive(1, 0, 0.1)
    ledger.use(1)
    ledger.hand(1, 0.1)
    ledger.arrive(1, 2, 0.2)
    assert ledger.overtake(LEAST_SECONDS / 2, idle=False) == []
    assert ledger.overtake(2 * LEAST_SECONDS, idle=False) == [2]
    assert ledger.turn() == 1
    ledger.use(1)
    assert ledger.hand(1, 2.0) == 1
    assert not ledger.arrive(2, 1, 3.0)
    assert (ledger.again, ledger.dropped) == (1, 1)


def test_a_received_gradient_counts_after_the_death_of_its_worker() -> None:
    ledger = Ledger(0, 10, None)
    ledger.hand(1, 0.0)
    ledger.arrive(1, 0, 0.1)
    assert ledger.lose(1) is None
    assert ledger.turn() == 1


def test_a_checkpoint_knows_which_steps_are_done() -> None:
    ledger = Ledger(0, 10, None)
    for worker in (1, 2, 3):
        ledger.hand(worker, 0.0)
    for worker in (1, 3):
        ledger.arrive(worker, worker - 1, 0.1)
        ledger.use(worker)
    saved = ledger.state_dict()
    assert saved == {"updates": 2, "begin": 1, "done": [2]}
    again = Ledger(2, 10, None)
    again.load_state_dict(saved)
    assert [again.hand(worker, 0.0) for worker in (1, 2, 3)] == [1, 3, 4]


def test_a_state_of_an_earlier_step_is_ignored() -> None:
    again = Ledger(5, 10, None)
    again.load_state_dict({"updates": 2, "begin": 1, "done": [2]})
    assert again.hand(1, 0.0) == 5
