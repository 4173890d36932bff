"""A store in process 0: a port that another program uses is an error, and two runs are never mixed."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from unisono.distributed.init import join_process_group
from unisono.distributed.rendezvous.hosted_store import host_store
from unisono.distributed.rendezvous.reachable import Patience
from unisono.distributed.rendezvous.store_prefix import LINES_KEY
from unisono.environment import World
from unisono.errors import WorldError
from unisono.testing import run_ranks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def joined(world: World, port: int) -> list[str]:
    place = f"hosted://127.0.0.1:{port}/17.0-0"
    with join_process_group(World(rank=world.rank, size=world.size, store=place, launcher="srun")) as all_:
        return [str(each) for each in all_.all_gather_object(f"process {world.rank}")]


def test_processes_connect_by_port_and_name() -> None:
    assert run_ranks(joined, 2, free_port()) == [["process 0", "process 1"]] * 2


def test_a_used_port_is_an_error_that_proposes_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorldError, match="cannot be opened") as caught:
            host_store(World(size=2, store=f"hosted://127.0.0.1:{port}/17.0-0"), Patience())
    assert f"export MASTER_PORT={port + 1}" in caught.value.problems[0].remedy


def test_the_store_of_another_run_is_not_joined() -> None:
    port = free_port()
    theirs = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    theirs.set("unisono-16.0-0", "here")
    world = World(rank=1, size=2, store=f"hosted://127.0.0.1:{port}/17.0-0")
    with pytest.raises(WorldError, match="does not answer there"):
        host_store(world, Patience(), timeout=timedelta(seconds=0.2))


def test_an_unknown_host_is_an_error_at_once() -> None:
    with pytest.raises(WorldError, match=r"The name nobody\.invalid does not resolve") as caught:
        host_store(World(size=2, store="hosted://nobody.invalid:20000/17.0-0"), Patience(lookup=0.0))
    assert "MASTER_ADDR=" in caught.value.problems[0].remedy


def met_after_an_earlier_run(world: World, port: int) -> str:
    """Return the prefix of the store. Process 0 first acts as an earlier run of the same job that is about to end."""
    place = World(rank=world.rank, size=2, store=f"hosted://127.0.0.1:{port}/job-0")
    if world.rank == 0:
        earlier = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        earlier.set("unisono-job-0", "here")
        while not dist.PrefixStore("job-0", earlier).check([LINES_KEY]):
            time.sleep(0.01)
        del earlier
    store = host_store(place, Patience())
    store.set(f"rank-{world.rank}", str(world.rank))
    found = store.get(f"rank-{1 - world.rank}").decode()
    store.add("ended", 1)
    while world.rank == 0 and store.add("ended", 0) < 2:
        time.sleep(0.01)
    return found


def test_the_store_of_an_earlier_run_of_the_job_is_left() -> None:
    """Two commands in one task of SkyPilot: node 1 starts the second one while node 0 still ends the first."""
    assert run_ranks(met_after_an_earlier_run, 2, free_port()) == ["1", "0"]
