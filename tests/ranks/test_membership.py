"""Processes detect a death, agree on the remaining ones, and form a new group; others join them."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from tests.ranks.elastic import ElasticProcesses
from unisono.distributed.init import join_process_group as join
from unisono.distributed.membership.membership import membership_of
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World


def total(group: ProcessGroup) -> float:
    return float(group.sum_(torch.tensor([1.0])).item())


def confirm(membership: Any, error: RuntimeError) -> None:
    if not membership.is_peer_loss(error):
        raise error


def survive(world: World, victims: tuple[int, ...], *, chain: bool) -> Any:
    with join(world) as group:
        membership = membership_of(group)
        assert membership is not None
        found = [total(group)]
        if membership.number in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if chain and group.rank == 0:  # rank 0 waits for a living process, which waits for the dead one
                group.send_and_receive([], [_message(1)])[0].wait()
            else:
                group.sum_(torch.ones(100_000))
        except RuntimeError as error:
            confirm(membership, error)
        while len(found) < 2:
            formed = membership.regroup(group, step=7)
            try:
                found.append(total(group))
            except RuntimeError as error:  # the second one died a little later
                confirm(membership, error)
        return found, (group.rank, group.size), formed.roster, sorted(formed.lost), sorted(group.neighbors)


def _message(peer: int) -> Any:
    from unisono.distributed.process_group import Message

    return Message(torch.zeros(10), peer)


def test_the_remaining_processes_form_a_group(tmp_path: Any) -> None:
    with ElasticProcesses(survive_alone, 4) as processes:
        processes.killed = {0}
        found = processes.results()
    assert found == {
        number: ([4.0, 3.0], (number - 1, 3), (1, 2, 3), [0], [r for r in range(3) if r != number - 1])
        for number in (1, 2, 3)
    }
    formed = [event for event in processes.events if "formed" in event]
    assert [event["formed"]["generation"] for event in formed] == [1, 2]
    assert formed[1]["facts"] == [{"step": 7}] * 3


def survive_alone(world: World) -> Any:
    return survive(world, (0,), chain=False)


def survive_chain(world: World) -> Any:
    return survive(world, (2, 3), chain=True)


def test_a_process_that_waits_for_a_survivor_is_woken() -> None:
    with ElasticProcesses(survive_chain, 4) as processes:
        processes.killed = {2, 3}
        found = processes.results()
    assert [value[:3] for _, value in sorted(found.items())] == [([4.0, 2.0], (r, 2), (0, 1)) for r in range(2)]


def last_one(world: World) -> Any:
    with join(world) as group:
        membership = membership_of(group)
        assert membership is not None
        sizes = [group.size]
        for number in range(3):
            if membership.number == number:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                while True:
                    total(group)
            except RuntimeError as error:
                confirm(membership, error)
            membership.regroup(group)
            sizes.append(group.size)
        return sizes, total(group)


def test_processes_die_until_one_is_left() -> None:
    with ElasticProcesses(last_one, 4) as processes:
        processes.killed = {0, 1, 2}
        assert processes.results() == {3: ([4, 3, 2, 1], 1.0)}


def admit(world: World) -> Any:
    with join(world) as group:
        membership = membership_of(group)
        assert membership is not None
        sizes: list[int] = [group.size]
        came: list[int] = []
        while group.size < 4:
            if group.size == 1 or group.sum_(torch.tensor([float(membership.join_requested)])).item():
                came += membership.regroup(group, admit=True).joined
                sizes.append(group.size)
        return sizes[0], sizes[-1], group.rank, came, total(group)


def test_new_processes_join() -> None:
    with ElasticProcesses(admit, 2) as processes:
        processes.start(2, joins=True)
        processes.start(3, joins=True)
        found = processes.results()
    assert {number: value[:2] for number, value in found.items()} == {0: (2, 4), 1: (2, 4), 2: (1, 4), 3: (1, 4)}
    assert sorted(value[2] for value in found.values()) == [0, 1, 2, 3]
    assert sorted(found[0][3]) == sorted(found[1][3]) == [2, 3]
    assert [value[4] for value in found.values()] == [4.0] * 4
