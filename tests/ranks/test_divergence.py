"""The divergence watch: replicas that no longer hold the same are noticed, named, and healed if that is asked for."""

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
    """Of rank 2, say: one bit of a weight, when the model is called in step 3."""
    return BitFlip(3, of="weights", element=4)


def watched(world: World, folder: Path, cases: dict[str, tuple[Settings, BitFlip | None]], rank: int) -> dict[str, Any]:
    """What comes of each of these, one after the other, with the fault on that rank."""

    def loop(run: Run[Any]) -> Any:
        told = train(run)
        watch = extension_of(run, DivergenceCheck)
        return {"told": told, "compared": watch.compared if watch else 0, "result": run_result(run)}

    found = {}
    for name, (settings, fault) in cases.items():
        with fault if fault is not None and world.rank == rank else nullcontext():
            found[name] = attempt(world, folder / name, loop, settings)
    return found


def watching(every: int, **changes: Any) -> Settings:
    return replace(SEVEN, divergence=DivergenceSettings(every=every, repair=changes.pop("repair", False)), **changes)


def test_who_holds_other_weights_is_told(tmp_path: Path) -> None:
    saving = watching(1000, checkpoint=CheckpointSettings(every=2, keep=9))
    cases: dict[str, tuple[Settings, BitFlip | None]] = {
        "often": (watching(2), flip()),
        "before a checkpoint": (saving, flip()),
        "gradient": (watching(1), BitFlip(3, of="gradient")),
        "off": (watching(0), flip()),
        "sound": (watching(1), None),
    }
    everybody = run_ranks(watched, 3, tmp_path, cases, 2)
    said, other, also = everybody
    for name in ("often", "before a checkpoint", "gradient"):
        assert said[name] == other[name] == also[name]
    true = "Rank 2 holds another weight than the 2 others (1 of 2 tensors): 1 of 6 elements, the first at [1, 1]: "
    assert true in said["often"]
    assert "of it). After 2 steps all was the same." in said["often"]
    assert true in said["before a checkpoint"]
    assert [steps for steps, _ in manifest.checkpoints(tmp_path / "before a checkpoint")] == [2]
    assert "Rank 2 holds another the gradient" not in said["gradient"]
    assert "Rank 2 holds another gradient of weight than the 2 others (1 of 2 tensors). After 3" in said["gradient"]
    assert len({str(rank["off"]["told"]) for rank in everybody}) > 1, "it went on, in two ways"
    assert len({str(rank["sound"]["told"]) for rank in everybody}) == 1
    assert said["sound"]["compared"] == 7


def test_the_majority_heals(tmp_path: Path) -> None:
    cases: dict[str, tuple[Settings, BitFlip | None]] = {"healed": (watching(2, repair=True), flip())}
    found = [rank["healed"] for rank in run_ranks(watched, 3, tmp_path, cases, 1)]
    assert found[0]["told"] == found[1]["told"] == found[2]["told"]
    result = found[0]["result"]
    assert result["promise"] == "exact until step 2"
    assert result["reason"] == (
        "then other mathematics: the weights of rank 1 from those of all to others, until healed after 4 steps"
    )


def test_two_cannot_say_who_is_right(tmp_path: Path) -> None:
    cases: dict[str, tuple[Settings, BitFlip | None]] = {"two": (watching(2, repair=True), flip())}
    one, other = (rank["two"] for rank in run_ranks(watched, 2, tmp_path, cases, 0))
    assert one == other
    assert "Ranks 0 and 1 hold different values of weight, and no majority says which is right (1 of 2" in one
    assert "So nobody can be healed." in one


@pytest.mark.slow
def test_replicas_of_shards_are_compared_with_their_like(tmp_path: Path) -> None:
    shards = ParallelSettings(replicate=2, shard=2)
    cases: dict[str, tuple[Settings, BitFlip | None]] = {
        "sound": (watching(1, parallel=shards), None),
        "gathered": (watching(1, parallel=replace(shards, reshard="step")), None),
        "shards": (watching(2, parallel=shards), flip()),
    }
    found = run_ranks(watched, 4, tmp_path, cases, 3)
    assert found[0]["sound"]["compared"] == found[0]["gathered"]["compared"] == 7
    assert "Ranks 1 and 3 hold different values of weight" in found[0]["shards"], found[0]["shards"]
