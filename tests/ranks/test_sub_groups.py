"""Messages between two processes, and sub-groups, as scripts use them: results, errors, and deaths."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.ranks.test_collectives import of, same
from unisono.distributed.collectives import Collectives
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.errors import LoopError, PeerLostError
from unisono.testing import run_ranks


def talked(world: World) -> list[str]:
    """Return the wrong results of messages and of sub-groups."""
    wrong: list[str] = []

    def expect(name: str, got: Any, wanted: Any) -> None:
        if not same(got, wanted):
            wrong.append(f"{name}: {got}")

    with join(world) as group:
        c, rank, last = Collectives(group), group.rank, group.size - 1
        plain = {"x": torch.arange(5), "y": (torch.ones(2, dtype=torch.int16), torch.tensor(True)), "z": [()]}
        if rank == 0:  # of any form, in order; the others do not take part
            c.send(plain, to=last)
            c.send(torch.empty(0, 3), to=last)
        elif rank == last:
            expect("first", c.receive(0), plain)
            expect("second", c.receive(0), torch.empty(0, 3))
        for ranks in ([0, last], [last, 0], list(range(group.size)), [last]):  # the same ranks twice, too
            part = c.sub_group(ranks)
            assert (part is not None) == (rank in ranks)
            if part is None:
                continue
            members = sorted(ranks)
            assert (part.rank, part.size) == (members.index(rank), len(members))
            expect("all_gather", part.all_gather(of(rank)), [of(r) for r in members])
            expect("sum", part.all_reduce(torch.tensor([float(rank)])), torch.tensor([float(sum(members))]))
            expect("broadcast", part.broadcast(plain if part.rank == part.size - 1 else None, part.size - 1), plain)
            expect("shift", part.shift(torch.tensor([rank])), torch.tensor([members[part.rank - 1]]))
            assert part.all_gather_object(rank) == members
            if part.size > 1 and part.rank == 0:
                part.send(torch.tensor(7), to=1)
            elif part.rank == 1:
                expect("inside", part.receive(0), torch.tensor(7))
        c.barrier()
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_messages_and_sub_groups(size: int) -> None:
    assert run_ranks(talked, size) == [[]] * size


def refused(world: World) -> list[str]:
    """Return the messages of wrong calls, which leave the collectives usable."""
    messages = []
    with join(world) as group:
        c = Collectives(group)
        part = c.sub_group([0, 1])
        wrong: list[Any] = [
            lambda: c.send(torch.ones(1), to=c.size),
            lambda: c.send(torch.ones(1), to=c.rank),
            lambda: c.receive(-1),
            lambda: c.send({"loss": 1.0}, to=(c.rank + 1) % c.size),
            lambda: c.sub_group([0, c.size]),
            lambda: c.sub_group([1, 1]),
            lambda: c.sub_group([]),
            lambda: c.sub_group([0, 1 + (c.rank == 1)]),
            lambda: c.sub_group([0, 1]) if c.rank else c.barrier(),
            lambda: part.sub_group([0, 1]) if part is not None else c.send(torch.ones(1), to=c.rank),
        ]
        for call in wrong:
            try:
                messages.append(f"no error: {call()}")
            except LoopError as error:
                messages.append(str(error))
        assert c.all_reduce(torch.ones(1)).item() == c.size
    return messages


def test_wrong_ranks_are_errors_on_every_process_that_calls() -> None:
    facts = ["The rank is 3; ranks are 0 to 2", "is this process itself", "The rank is -1", "one thing is a float"]
    facts += ["The ranks are [0, 3]", "The ranks are [1, 1]", "The ranks are []", "Rank 0 has 1, rank 1 2"]
    facts += ["Rank 0 called barrier, rank 1 called sub_group"]
    for rank, messages in enumerate(run_ranks(refused, 3)):
        assert all("Next: " in message for message in messages), messages
        last = "is this process itself" if rank == 2 else "Sub-groups are made by all processes of the run"
        assert [m for m, fact in zip(messages, [*facts, last], strict=True) if fact not in m] == []


def _wait_for_both(folder: str, seconds: float = 60.0) -> None:
    """Wait until processes 0 and 1 have written their messages. A process that exits earlier ends the others."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(os.path.exists(f"{folder}/{rank}") for rank in (0, 1)):
        time.sleep(0.05)


def _die(folder: str) -> None:
    """Kill this process. A fork holds its pipe, so that the test does not end the others before they write."""
    if os.fork() == 0:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    os.close(int(name))
        _wait_for_both(folder)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def bereaved(world: World, folder: str) -> str:
    """Let process 2 of a sub-group die, and return the message of the others."""
    with join(world) as group:
        c = Collectives(group)
        part = c.sub_group([1, 2])
        c.barrier()
        if group.rank == 2:
            _die(folder)
        assert part is not None or group.rank == 0
        try:
            if part is not None:
                part.receive(1)
            else:
                c.receive(2)
        except PeerLostError as error:
            with open(f"{folder}/.{group.rank}", "w") as file:
                file.write(str(error))
            os.rename(f"{folder}/.{group.rank}", f"{folder}/{group.rank}")
            _wait_for_both(folder)
        os._exit(0)


def test_a_dead_peer_ends_a_receive_with_an_error(tmp_path: Any) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_ranks(bereaved, 3, str(tmp_path))
    for rank in (0, 1):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith("receive failed: a process of the run is gone or silent."), text
        assert "Next: " in text
