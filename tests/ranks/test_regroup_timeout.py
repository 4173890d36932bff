"""A process that hangs while a new group is formed counts as dead, and the others continue without it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.ranks.elastic import ElasticProcesses
from tests.ranks.test_membership import confirm, total
from unisono.distributed.init import join_process_group as join
from unisono.distributed.membership import heartbeats, membership, regroup_timeout
from unisono.distributed.process_group import Message, ProcessGroup
from unisono.environment import World


def hurry() -> None:
    """Shorten the time limits in this process to a second."""
    regroup_timeout.FORM_SECONDS, heartbeats.BEAT_SECONDS = 1.0, 0.1


def send_into_the_end(world: World) -> int:
    """Return the number of messages that hang after they were sent just after the shutdown of the sockets."""
    hung = 0
    with join(world) as group:
        member: Any = membership.membership_of(group)
        for _ in range(12):
            if group.rank == 0:
                time.sleep(0.02)  # the peer waits by now, and its notice has arrived
                member._abort_sockets()
            try:
                (work,) = messages(group, 1 - group.rank, 10, sends=group.rank == 0)
                work.work.wait(timedelta(seconds=0.5))
            except RuntimeError as error:
                hung += group.rank == 0 and "Timed out" in str(error)
            member.regroup(group)
    return hung


def messages(group: ProcessGroup, peer: int, size: int, *, sends: bool) -> Any:
    message = [Message(torch.zeros(size), peer)]
    return group.send_and_receive(message, []) if sends else group.send_and_receive([], message)


def test_a_send_after_the_shutdown_of_sockets_does_not_hang() -> None:
    with ElasticProcesses(send_into_the_end, 2) as processes:
        assert processes.results() == {0: 0, 1: 0}


def half_a_message(world: World) -> Any:
    """Stop process 3 when a message to it is half written, which gloo drops. Process 2 computes for a long time."""
    hurry()
    with join(world) as group:
        member: Any = membership.membership_of(group)
        member.tolerant = True
        if member.number == 3:
            messages(group, 0, 20_000_000, sends=False)
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            if member.number == 0:
                works = messages(group, 3, 20_000_000, sends=True)
                time.sleep(0.2)
                member.report(sent=True)
                works[0].wait()
            if member.number == 2:
                time.sleep(2.0)
            total(group)
        except RuntimeError as error:
            confirm(member, error)
        return member.regroup(group).roster, total(group)


def test_a_hanging_process_is_left_behind_and_a_computing_one_is_not() -> None:
    with ElasticProcesses(half_a_message, 4) as processes:
        processes.await_("sent")
        processes.kill(3)
        found = processes.await_("silent")
        processes.kill(0)
        assert processes.results() == {1: ((1, 2), 2.0), 2: ((1, 2), 2.0)}
    assert found == {"silent": 0, "why": "hangs in a collective of a group that lost a process"}


def hang(world: World, where: str) -> Any:
    """Kill process 2; process 1 then hangs instead of forming a group with process 0."""
    hurry()
    with join(world) as group:
        member: Any = membership.membership_of(group)
        member.tolerant = True
        if member.number == 1 and where == "stopped":
            member._abort_sockets = lambda: os.kill(os.getpid(), signal.SIGSTOP)
        elif member.number == 1:
            setattr(membership, where, lambda *_, **__: time.sleep(1e6))
        if member.number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.sum_(torch.ones(100_000))
        except RuntimeError as error:
            confirm(member, error)
        return member.regroup(group).roster, total(group)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("leave_group", "hangs while leaving its group"),
        pytest.param("connect", "hangs while connecting", marks=pytest.mark.slow),
        pytest.param("stopped", None, marks=pytest.mark.slow),
    ],
)
def test_the_others_continue_without_a_process_that_hangs(where: str, why: str | None) -> None:
    with ElasticProcesses(hang, 3, where, silence=3.0) as processes:
        processes.killed = {2}
        found = processes.await_("silent")
        processes.kill(1)
        assert processes.results() == {0: ((0,), 1.0)}
    assert (found["silent"], found.get("why")) == (1, why)
