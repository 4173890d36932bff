"""A process that stands still when a new group is to be formed is taken for dead, and the others go on without it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.ranks.company import Company
from tests.ranks.test_membership import confirm, total
from unisono.distributed.init import join_process_group as join
from unisono.distributed.membership import membership, regroup_timeout
from unisono.distributed.process_group import Message, ProcessGroup
from unisono.environment import World


def hurry() -> None:
    """Limits of a second, in this process."""
    regroup_timeout.FORM_SECONDS, membership.BEAT_SECONDS = 1.0, 0.1


def send_into_the_end(world: World) -> int:
    """Send just after our sockets were shut to somebody who waits for it; how many sends then hang?"""
    hung = 0
    with join(world) as group:
        company: Any = group.company
        for _ in range(12):
            if group.rank == 0:
                time.sleep(0.02)  # it waits by now, and its word of that is here
                company._abort_sockets()
            try:
                (work,) = messages(group, 1 - group.rank, 10, sends=group.rank == 0)
                work.work.wait(timedelta(seconds=0.5))
            except RuntimeError as error:
                hung += group.rank == 0 and "Timed out" in str(error)
            company.regroup(group)
    return hung


def messages(group: ProcessGroup, peer: int, size: int, *, sends: bool) -> Any:
    message = [Message(torch.zeros(size), peer)]
    return group.send_and_receive(message, []) if sends else group.send_and_receive([], message)


def test_who_sends_while_the_sockets_are_shut_does_not_hang() -> None:
    with Company(send_into_the_end, 2) as company:
        assert company.results() == {0: 0, 1: 0}


def half_a_message(world: World) -> Any:
    """What gloo forgets: process 3 dies when a message to it is half on its way. Process 2 only computes, for long."""
    hurry()
    with join(world) as group:
        company: Any = group.company
        company.watchful = True
        if company.number == 3:
            messages(group, 0, 20_000_000, sends=False)
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            if company.number == 0:
                works = messages(group, 3, 20_000_000, sends=True)
                time.sleep(0.2)
                company.report(sent=True)
                works[0].wait()
            if company.number == 2:
                time.sleep(2.0)
            total(group)
        except RuntimeError as error:
            confirm(company, error)
        return company.regroup(group).roster, total(group)


def test_who_hangs_in_gloo_is_left_behind_and_who_computes_is_waited_for() -> None:
    with Company(half_a_message, 4) as company:
        company.await_("sent")
        company.kill(3)
        found = company.await_("silent")
        company.kill(0)
        assert company.results() == {1: ((1, 2), 2.0), 2: ((1, 2), 2.0)}
    assert found == {"silent": 0, "why": "waits in a collective of a group that is gone"}


def stand_still(world: World, where: str) -> Any:
    """Process 2 dies, and process 1, which was to form a group with process 0 then, stands still."""
    hurry()
    with join(world) as group:
        company: Any = group.company
        company.watchful = True
        if company.number == 1 and where == "stopped":
            company._abort_sockets = lambda: os.kill(os.getpid(), signal.SIGSTOP)
        elif company.number == 1:
            setattr(membership, where, lambda *_, **__: time.sleep(1e6))
        if company.number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.sum_(torch.ones(100_000))
        except RuntimeError as error:
            confirm(company, error)
        return company.regroup(group).roster, total(group)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("leave_group", "leaves its group"),
        pytest.param("connect", "connects", marks=pytest.mark.slow),
        pytest.param("stopped", None, marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_without_one_that_stands_still(where: str, why: str | None) -> None:
    with Company(stand_still, 3, where, silence=3.0) as company:
        company.killed = {2}
        found = company.await_("silent")
        company.kill(1)
        assert company.results() == {0: ((0,), 1.0)}
    assert (found["silent"], found.get("why")) == (1, why)
