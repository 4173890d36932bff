"""Train the ppo recipe with small settings: placements, a resume, a death; the physics; and with its defaults."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.training import assert_same_run, resume_on_three_processes, train_on_one_process, train_recipe
from unisono.config import ParallelSettings
from unisono.errors import SettingsError
from unisono.recipes.ppo import Policy, Settings, has_fallen, play, push, start

TOY = {
    "steps": 6,
    "batch": 20,  # not a multiple of 8: shares of 2 and 3 carts
    "moves": 12,
    "passes": 2,
    "parts": 3,
    "width": 8,
    "episodes": 10,
}

train = partial(train_recipe, "ppo", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("ppo", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.ci
def test_two_and_three_processes_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    for ranks in (2, 3):
        result, screen = train(tmp_path / str(ranks), ranks)
        assert f"validation: mean return {result['mean_return']:.1f} of 10 episodes" in screen
        assert_same_run(result, reference, "mean_return", "falls")


@pytest.mark.slow
def test_resumed_and_sharded_runs_match_one_process(tmp_path: Path, reference: dict[str, Any]) -> None:
    assert_same_run(resume_on_three_processes("ppo", tmp_path / "run", TOY), reference, "mean_return")
    sharded, _ = train(tmp_path / "sharded", 2, sets={**TOY, "parallel.shard": 2})
    assert_same_run(sharded, reference, "mean_return")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pole_is_balanced_with_the_defaults(tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2, sets={})[0]["mean_return"] > 400


def test_moves_follow_from_the_random_numbers() -> None:
    torch.manual_seed(1)
    player = Policy(8)
    settings = Settings(moves=40, passes=2)
    torch.manual_seed(2)
    moves = play(player, 5, torch.device("cpu"), settings)
    torch.manual_seed(2)
    again = play(player, 5, torch.device("cpu"), settings)
    assert all(torch.equal(a, b) for a, b in zip(moves, again, strict=True))
    assert moves.states.shape == (200, 4)
    assert moves.orders.sort(1).values.tolist() == [list(range(200))] * 2
    assert moves.falls.sum() > 0
    assert abs(moves.advantages.mean()) < 1e-5


def test_returns_are_those_of_a_sum_by_hand() -> None:
    """With lambda = 1 the estimate is the discounted sum of rewards up to the fall, or up to the value of the end."""
    torch.manual_seed(1)
    player, settings = Policy(8), Settings(moves=30, decay=1.0)
    moves = play(player, 1, torch.device("cpu"), settings)
    falls = moves.falls.tolist()
    assert True in falls
    first = falls.index(True)
    for t in range(first + 1):
        expected = sum(0.99**i for i in range(first - t + 1))
        assert moves.returns[t].item() == pytest.approx(expected, rel=1e-4)


def test_a_pushed_cart() -> None:
    """The first move of gym's CartPole-v1 from a standstill: a speed of 0.195 and a turn of -0.293."""
    state = torch.zeros(2, 4)
    moved = push(state, torch.tensor([0, 1]))
    assert moved[1].tolist() == pytest.approx([0.0, 0.19512195, 0.0, -0.29268292], abs=1e-5)
    assert torch.equal(moved[0], -moved[1])
    for _ in range(200):
        moved = push(moved, torch.tensor([0, 1]))
    assert has_fallen(moved).all()
    assert not has_fallen(start(4, torch.device("cpu"))).any()
    assert has_fallen(torch.tensor([[2.5, 0, 0, 0], [0, 0, math.radians(13), 0]])).all()


def test_unsupported_parallelism_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"does not support parallel\.tensor=2"):
        Settings(parallel=ParallelSettings(tensor=2))
