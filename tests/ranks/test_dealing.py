"""Virtual ranks go where they are done sooner, and no bit of the result knows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import training
from unisono.env import World
from unisono.settings import DealSettings, LoaderSettings, Settings
from unisono.testing import SlowAt, run_ranks


def slowed(world: World, config: Settings, folder: str, slow: int | None, times: float) -> dict[str, Any]:
    with SlowAt(times) if world.rank == slow else nullcontext():
        return training.train(world, "mlp", config, folder, length=403)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("size", "slow"), [(2, 1), (3, 0)])
def test_a_slow_process_computes_less_and_the_bits_stay(tmp_path: Path, size: int, slow: int, workers: int) -> None:
    config = replace(training.settings(steps=50, batch=48, virtual_ranks=12), loader=LoaderSettings(workers=workers))
    (alone,) = run_ranks(slowed, 1, config, str(tmp_path / "alone"), None, 1.0)
    found = run_ranks(slowed, size, config, str(tmp_path / "slow"), slow, 4.0)
    assert {f["state"] for f in found} == {alone["state"]}
    assert found[0]["losses"] == alone["losses"]
    deals = found[0]["result"]["deals"]
    assert [f["result"]["deals"] for f in found] == [deals] * size
    counts = deals[0]["virtual_ranks"]
    assert counts[slow] == min(counts) < 12 // size
    assert sum(counts) == 12
    assert found[slow]["rounds"] < 50 * 12 // size


def test_switched_off_nothing_moves(tmp_path: Path) -> None:
    config = replace(training.settings(steps=40), deal=DealSettings(by_speed=False))
    found = run_ranks(slowed, 2, config, str(tmp_path), 1, 4.0)
    assert "deals" not in found[0]["result"]
    assert abs(found[0]["rounds"] - found[1]["rounds"]) <= 3  # the last batch of an epoch is short


def test_who_would_only_be_waited_for_gets_nothing_and_is_named(tmp_path: Path) -> None:
    config = replace(training.settings(steps=40, batch=24, virtual_ranks=3))
    found = run_ranks(slowed, 3, config, str(tmp_path), 2, 10.0)
    assert found[0]["result"]["deals"][0]["virtual_ranks"][2] == 0
    (alone,) = run_ranks(slowed, 1, config, str(tmp_path / "alone"), None, 1.0)
    assert {f["state"] for f in found} == {alone["state"]}
