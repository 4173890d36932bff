"""The result does not depend on the number of processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pairs import every_pair
from tests.ranks.training import settings, train
from unisono.config import LoaderSettings
from unisono.plan.assignment import assign_evenly
from unisono.plan.reduction_tree import Plan
from unisono.testing import run_ranks


def results(tmp_path: Path, size: int, kind: str, config: Any, **more: Any) -> list[dict[str, Any]]:
    folder = tmp_path / f"{kind}-{size}-{len(list(tmp_path.iterdir()))}"
    return run_ranks(partial(train, **more), size, kind, config, str(folder))


def assert_same(runs: list[dict[str, Any]]) -> None:
    """Check that all processes of all runs have the same weights, losses, norms and sums."""
    first = runs[0]
    for run in runs:
        assert run["state"] == first["state"]
        assert run["losses"] == first["losses"]
        assert run["norms"] == first["norms"]
        assert run["result"]["right"] == first["result"]["right"]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip": 0.2},
    "two loader workers": {"loader": {"workers": 2}},
    "accumulation 3": {"batch": 24, "virtual_ranks": 4, "micro_batch": 2},
    "five virtual ranks": {"virtual_ranks": 5, "batch": 15},
    "more virtual ranks than a batch has samples to spare": {"batch": 9},
    "twelve virtual ranks, most of them empty at an epoch's end": {"batch": 24, "virtual_ranks": 12},
}


@pytest.mark.parametrize(("case", "kind"), every_pair(CASES, ["gpt", "mlp"]))
def test_bits_do_not_depend_on_the_number_of_processes(tmp_path: Path, kind: str, case: str) -> None:
    changes: dict[str, Any] = dict(CASES[case])
    if "loader" in changes:
        changes["loader"] = LoaderSettings(**changes["loader"])
    config = settings(**changes)
    # 53 is prime: the last batch of an epoch is smaller, and some virtual ranks are empty in it.
    sizes = (1, 2, 3, 5) if config.virtual_ranks == 5 else (1, 3, 4) if config.virtual_ranks == 4 else (1, 2, 3, 8)
    runs = [run for size in sizes for run in results(tmp_path, size, kind, config, length=53)]
    assert_same(runs)
    assert runs[0]["losses"][0] != runs[0]["losses"][-1]


def test_other_micro_batches_give_other_bits(tmp_path: Path) -> None:
    """The comparison above can fail: another micro-batch size is another computation."""
    one = results(tmp_path, 1, "mlp", settings())[0]
    two = results(tmp_path, 1, "mlp", settings(micro_batch=1))[0]
    assert one["state"] != two["state"]


def test_processes_without_samples(tmp_path: Path) -> None:
    """With 3 samples on 8 virtual ranks, five of eight processes compute nothing."""
    config = settings(batch=8, virtual_ranks=8, steps=4)
    runs = [run for size in (1, 8) for run in results(tmp_path, size, "gpt", config, length=3)]
    assert_same(runs)
    assert sorted(run["rounds"] for run in runs[1:]) == [0] * 5 + [4] * 3


def test_unused_parameter_has_no_gradient(tmp_path: Path) -> None:
    for run in results(tmp_path, 2, "gpt", settings(steps=2)):
        assert run["unused"] is None


@pytest.mark.parametrize("workers", [0, 2])
def test_reassignment_does_not_change_bits(tmp_path: Path, workers: int) -> None:
    config = settings(steps=14, loader=LoaderSettings(workers=workers))
    deals = {2: ((0, 7), (7, 8), (8, 8)), 7: ((0, 1), (1, 2), (2, 8))}
    undisturbed = results(tmp_path, 1, "mlp", config)
    dealt = results(tmp_path, 3, "mlp", config, deals=deals)
    assert_same([*undisturbed, *dealt])
    held = dealt[0]["held"]
    assert (
        held == dealt[1]["held"] == dealt[2]["held"]
    )  # equal, although processes had prefetched different numbers of batches
    assert 2 + bool(workers) <= held[2] < 7
    assert dealt[0]["rounds"] > dealt[1]["rounds"]


def test_random_numbers_outside_micro_batches_are_equal(tmp_path: Path) -> None:
    """Draw numbers before the micro-batches and add noise to gradients after them, also after a resume."""
    for virtual_ranks in (1, 4):
        config = settings(virtual_ranks=virtual_ranks)
        sizes = (1,) if virtual_ranks == 1 else (1, 3)
        runs = [run for size in sizes for run in results(tmp_path, size, "mlp", config, noise=True)]
        assert_same(runs)
        assert runs[0]["state"] != results(tmp_path, 1, "mlp", config)[0]["state"]
        halves = str(tmp_path / f"halves-{virtual_ranks}")
        run_ranks(partial(train, noise=True, stop_after=3), 1, "mlp", config, halves)
        resumed = run_ranks(partial(train, noise=True, resume=True), sizes[-1], "mlp", config, halves)
        assert resumed[0]["state"] == runs[0]["state"]


@pytest.mark.parametrize("virtual_ranks", [1, 4])
def test_tensor_datasets_are_read_in_batches_with_the_same_bits(tmp_path: Path, virtual_ranks: int) -> None:
    """This includes loader workers and a resume. With one virtual rank no seeding is needed."""
    config = settings(virtual_ranks=virtual_ranks)
    runs = [run for size in {1, virtual_ranks} for run in results(tmp_path, size, "tensors", config)]
    runs += results(tmp_path, 1, "tensors", replace(config, loader=LoaderSettings(workers=2)))
    assert_same(runs)
    halves = str(tmp_path / "halves")
    run_ranks(partial(train, stop_after=3), virtual_ranks, "tensors", config, halves)
    (resumed,) = run_ranks(partial(train, resume=True), 1, "tensors", config, halves)
    assert resumed["state"] == runs[0]["state"]
    assert runs[0]["state"] != results(tmp_path, 1, "tensors", replace(config, seed=1))[0]["state"]


def test_allreduce_agrees_up_to_rounding_and_promises_tolerance(tmp_path: Path) -> None:
    tree = results(tmp_path, 1, "mlp", settings())[0]
    for size in (1, 3):
        for run in results(tmp_path, size, "mlp", settings(exchange="allreduce")):
            assert run["losses"] == pytest.approx(tree["losses"], rel=1e-4)
            assert run["result"]["promise"] == "tolerance"
    assert tree["result"]["promise"] == "exact"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_flat_copy_per_partial_sum_that_is_sent(tmp_path: Path, size: int) -> None:
    sends = Plan(8, assign_evenly(8, size))
    expected = [len(sends.sends(rank)) for rank in range(size)]
    assert [run["copies"] for run in results(tmp_path, size, "mlp", settings(steps=3))] == expected
