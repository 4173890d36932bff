"""Processes wait for a host that is replaced: they start when it is there, and a signal ends them before."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from unisono.environment import World
from unisono.launcher.hosts.awaited_host import AwaitedHost, Order
from unisono.launcher.hosts.remote_host import RemoteHost
from unisono.launcher.worker_process import WorkerSpec


class Arrived(RemoteHost):
    """A host that has connected, and keeps what it is sent."""

    def __init__(self) -> None:
        self.name, self.lost, self._processes = "b", "", {}
        self.sent: list[dict[str, Any]] = []

    def send(self, data: bytes = b"", **values: Any) -> None:
        self.sent.append(values)


def spec(folder: Path) -> WorkerSpec:
    return WorkerSpec(command=["train.py"], environment={}, log=folder / "log", record=folder / "rank-3.json")


def complete(number: int, order: Order) -> Order:
    return {**order, "world": {**order["world"], "host": "b"}}


def test_a_process_starts_when_the_host_is_there(tmp_path: Path) -> None:
    awaited, arrived = AwaitedHost("a", complete), Arrived()
    process = awaited.start(3, {"host": "a", "rank": 3}, spec(tmp_path))
    assert not process.has_ended()
    awaited.arrive(arrived)
    (order,) = arrived.sent
    assert (order["start"], order["world"]) == (3, {"host": "b", "rank": 3})
    process.signal(signal.SIGTERM, group=False)
    assert arrived.sent[1:] == [{"signal": signal.SIGTERM, "process": 3, "group": False}]
    process.end(0)
    process.close()


def test_a_signal_ends_a_process_that_waits(tmp_path: Path) -> None:
    awaited, arrived = AwaitedHost("a", complete), Arrived()
    process = awaited.start(3, {"host": "a"}, spec(tmp_path))
    process.signal(signal.SIGKILL, group=True)
    assert process.wait(1.0) == -signal.SIGKILL
    awaited.arrive(arrived)
    assert arrived.sent == []
    process.close()


def test_processes_end_if_the_host_cannot_be_used(tmp_path: Path) -> None:
    awaited = AwaitedHost("a", complete)
    process = awaited.start(3, {"host": "a"}, spec(tmp_path))
    awaited.give_up()
    assert process.wait(1.0) == -signal.SIGKILL
    process.close()


def test_an_actor_has_the_first_device_that_it_sees() -> None:
    assert World(rank=3, size=4, local_rank=3, devices=(0, 0, 1, True)).device_index == 0  # type: ignore[arg-type]
    assert World(rank=3, size=4, local_rank=3).device_index == 3
