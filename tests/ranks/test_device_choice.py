"""Processes that another launcher has started choose different accelerators of those that they see."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.standin import standin
from unisono.distributed.init import find_device_index
from unisono.environment import World
from unisono.testing import run_ranks


def chosen_index(world: World, library: str, folder: str, shown: str) -> int | None:
    """Return the index that this process chooses.

    `shown`: for each process, the accelerator that it sees under the number 0; -: none.
    """
    mine = shown[world.rank]
    os.environ[standin.NAME] = mine
    standin.equip(library, equipped=mine != "-")
    world = replace(world, local_rank=world.rank, local_size=world.size)
    index = find_device_index(world, dist.FileStore(f"{folder}/store", world.size))
    return None if mine == "-" else index


@pytest.mark.parametrize(
    ("shown", "choices"),
    [
        pytest.param("aa", [[0, 1]], id="all see the same ones"),
        pytest.param("ab", [[0, 0]], id="each is shown its own, as Slurm does by cgroups"),
        pytest.param("a-", [[0, None]], id="one is shown none"),
        pytest.param("-a", [[None, 0]], id="the first one is shown none"),
        pytest.param("abb", [[0, 0, 1], [0, 1, 0]], id="two see the same ones"),
    ],
)
def test_each_takes_its_own(accelerator: str, tmp_path: Path, shown: str, choices: list[list[int | None]]) -> None:
    if not accelerator:
        pytest.skip("the accelerators of this machine have names of their own")
    assert run_ranks(chosen_index, len(shown), accelerator, str(tmp_path), shown) in choices
