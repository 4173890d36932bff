"""A peer that dies: the others hear of it at once, and say so in words."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from unisono.env import World
from unisono.errors import PeerLost
from unisono.testing import run_ranks
from unisono.world.collectives import peers
from unisono.world.start import group as join


def dies(world: World) -> Any:
    with join(world) as group:
        group.barrier()
        if world.rank == 1:
            os._exit(9)
        before = time.monotonic()
        with (
            pytest.raises(PeerLost, match="Step 3's exchange needed every process of the run"),
            peers("Step 3's exchange"),
        ):
            group.sum_(torch.ones(3))
        assert time.monotonic() - before < 10
        os._exit(7)  # the group cannot be left together any more


def test_a_lost_peer_is_named_as_what_it_is() -> None:
    with pytest.raises(AssertionError, match=r"died with exit code [79]"):
        run_ranks(dies, 2)


def other_errors(world: World) -> str:
    with pytest.raises(RuntimeError, match="size of tensor") as caught, peers("Something"):
        torch.ones(2) + torch.ones(3)
    return type(caught.value).__name__


def test_other_errors_stay_what_they_are() -> None:
    assert run_ranks(other_errors, 1) == ["RuntimeError"]


def values(world: World) -> Any:
    with join(world) as group:
        gathered = group.gather({"rank": world.rank, "text": "ü" * world.rank})
        shared = group.share("from " + str(world.rank) if world.rank == 0 else None)
        weights = torch.full((2, 3), float(world.rank)).t()
        group.share_([weights])
        return gathered, shared, weights.tolist(), group.max_(torch.tensor([world.rank])).item()


@pytest.mark.parametrize("size", [1, 3])
def test_what_travels_arrives(size: int) -> None:
    for gathered, shared, weights, largest in run_ranks(values, size):
        assert gathered == [{"rank": r, "text": "ü" * r} for r in range(size)]
        assert shared == "from 0"
        assert weights == [[0.0, 0.0]] * 3
        assert largest == size - 1
