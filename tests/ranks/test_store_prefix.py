"""Each start of a run has its own keys in a store that outlives the processes."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from unisono.distributed.rendezvous.connect import count_arrivals
from unisono.distributed.rendezvous.store_prefix import enter_round
from unisono.environment import World
from unisono.errors import WorldError
from unisono.testing import run_ranks

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.3)


@pytest.fixture
def store() -> dist.TCPStore:
    """Return the store of an agent, which outlives the processes."""
    return dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)


def here(world: World, port: int) -> list[int]:
    """Count the processes twice, under the same names in every start."""
    agent = dist.TCPStore(socket.gethostname(), port, is_master=False)
    own = enter_round(agent, world.rank, world.size, LONG)
    return [count_arrivals(own, world.size, "here"), count_arrivals(own, world.size, "even", world.rank % 2 == 0)]


def part_of_them(world: World, port: int, there: list[int]) -> str:
    """Start only some of the processes, as when others die at their start."""
    agent = dist.TCPStore(socket.gethostname(), port, is_master=False)
    if world.rank not in there:
        return ""
    with pytest.raises(WorldError, match="Not all of them have started") as error:
        enter_round(agent, world.rank, world.size, SHORT)
    return str(error.value)


def test_a_restart_counts_its_own_processes_only(store: dist.TCPStore) -> None:
    assert run_ranks(here, 3, store.port) == [[3, 2]] * 3
    for there in ([0, 1], [1, 2], [0]):
        run_ranks(part_of_them, 3, store.port, there)
        assert run_ranks(here, 3, store.port) == [[3, 2]] * 3
    assert run_ranks(here, 2, store.port) == [[2, 1]] * 2


def test_a_process_answered_by_an_earlier_rank_0_is_answered_again(store: dist.TCPStore) -> None:
    """Rank 0 of an earlier round still runs for a moment, on another host."""
    assert run_ranks(answered_twice, 2, store.port) == [1, 1]


def answered_twice(world: World, port: int) -> int:
    agent = dist.TCPStore(socket.gethostname(), port, is_master=False)
    if world.rank == 0:  # first the old rank 0, which answers and then dies; of three processes
        with pytest.raises(WorldError):
            enter_round(agent, 0, 3, SHORT)
    own = enter_round(agent, world.rank, 2, LONG)
    own.add("both", 1)
    return count_arrivals(own, 2, "rank 1 is here", world.rank == 1)
