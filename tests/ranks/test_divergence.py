"""Divergence checks: replicas that differ are detected, named, and repaired if enabled."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.loops import SETTINGS, attempt, train
from unisono.checkpoint import manifest
from unisono.config import CheckpointSettings, DivergenceSettings, ParallelSettings, Settings
from unisono.environment import World
from unisono.testing import extension_of, run_ranks, run_result
from unisono.testing.faults import BitFlip
from unisono.train.diagnostics.divergence import DivergenceCheck
from unisono.train.run import Run

SEVEN = replace(SETTINGS, steps=7)


def flip() -> BitFlip:
    """Return a fault that flips one bit of a weight in the forward pass of step 3."""
    return BitFlip(3, of="weights", element=4)


def train_with_faults(
    world: World, folder: Path, cases: dict[str, tuple[Settings, BitFlip | None]], rank: int
) -> dict[str, Any]:
    """Run the cases one after the other, with the fault on that rank."""

    def loop(run: Run[Any]) -> Any:
        results = train(run)
        watch = extension_of(run, DivergenceCheck)
        return {"results": results, "compared": watch.compared if watch else 0, "result": run_result(run)}

    found = {}
    for name, (settings, fault) in cases.items():
        with fault if fault is not None and world.rank == rank else nullcontext():
            found[name] = attempt(world, folder / name, loop, settings)
    return found


def with_checks(every: int, **changes: Any) -> Settings:
    return replace(SEVEN, divergence=DivergenceSettings(every=every, repair=changes.pop("repair", False)), **changes)


def test_rank_with_other_weights_is_named(tmp_path: Path) -> None:
    saving = with_checks(1000, checkpoint=CheckpointSettings(every=2, keep=9))
    cases: dict[str, tuple[Settings, BitFlip | None]] = {
        "often": (with_checks(2), flip()),
        "before a checkpoint": (saving, flip()),
        "gradient": (with_checks(1), BitFlip(3, of="gradient")),
        "off": (with_checks(0), flip()),
        "sound": (with_checks(1), None),
    }
    by_rank = run_ranks(train_with_faults, 3, tmp_path, cases, 2)
    first, other, third = by_rank
    for name in ("often", "before a checkpoint", "gradient"):
        assert first[name] == other[name] == third[name]
    true = "Rank 2 holds another weight than the 2 others (1 of 2 tensors): 1 of 6 elements, the first at [1, 1]: "
    assert true in first["often"]
    assert "of it). After 2 steps all was the same." in first["often"]
    assert true in first["before a checkpoint"]
    assert [steps for steps, _ in manifest.checkpoints(tmp_path / "before a checkpoint")] == [2]
    assert "Rank 2 holds another the gradient" not in first["gradient"]
    assert "Rank 2 holds another gradient of weight than the 2 others (1 of 2 tensors). After 3" in first["gradient"]
    assert len({str(rank["off"]["results"]) for rank in by_rank}) > 1, "it went on, in two ways"
    assert len({str(rank["sound"]["results"]) for rank in by_rank}) == 1
    assert first["sound"]["compared"] == 7


def test_majority_repairs_a_replica(tmp_path: Path) -> None:
    cases: dict[str, tuple[Settings, BitFlip | None]] = {"healed": (with_checks(2, repair=True), flip())}
    found = [rank["healed"] for rank in run_ranks(train_with_faults, 3, tmp_path, cases, 1)]
    assert found[0]["results"] == found[1]["results"] == found[2]["results"]
    result = found[0]["result"]
    assert result["promise"] == "exact until step 2"
    assert result["reason"] == (
        "then other computations: the weights of rank 1 from those of all to others, until healed after 4 steps"
    )


def test_two_replicas_have_no_majority(tmp_path: Path) -> None:
    cases: dict[str, tuple[Settings, BitFlip | None]] = {"two": (with_checks(2, repair=True), flip())}
    one, other = (rank["two"] for rank in run_ranks(train_with_faults, 2, tmp_path, cases, 0))
    assert one == other
    assert "Ranks 0 and 1 hold different values of weight, and no majority says which is right (1 of 2" in one
    assert "So no rank can be repaired." in one


@pytest.mark.slow
def test_shards_are_compared_among_replicas(tmp_path: Path) -> None:
    shards = ParallelSettings(replicate=2, shard=2)
    cases: dict[str, tuple[Settings, BitFlip | None]] = {
        "sound": (with_checks(1, parallel=shards), None),
        "gathered": (with_checks(1, parallel=replace(shards, reshard="step")), None),
        "shards": (with_checks(2, parallel=shards), flip()),
    }
    found = run_ranks(train_with_faults, 4, tmp_path, cases, 3)
    assert found[0]["sound"]["compared"] == found[0]["gathered"]["compared"] == 7
    assert "Ranks 1 and 3 hold different values of weight" in found[0]["shards"], found[0]["shards"]
