"""Host names that do not resolve: one message within seconds, with the name and the next step."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.cli.command import Command
from unisono.distributed.rendezvous.host_names import (
    interface,
    require_own_host_name,
    resolution_error,
    resolve_rendezvous_host,
)
from unisono.environment import World
from unisono.errors import UnreachableHostError

NOWHERE = "nowhere.invalid"
"""RFC 2606: no name under .invalid ever resolves."""

AWAY = World(rank=1, size=2, local_rank=0, local_size=1, host="here", store="env://", launcher="torchrun")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "20000")


def test_a_rendezvous_host_that_does_not_resolve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", NOWHERE)
    with pytest.raises(UnreachableHostError) as caught:
        resolve_rendezvous_host(AWAY, timeout=0.0)
    (problem,) = caught.value.problems
    assert problem.error.endswith(f"cannot connect to host {NOWHERE}, port 20000 (MASTER_ADDR).")
    assert problem.facts.startswith(f"The name {NOWHERE} does not resolve on here: ")
    assert problem.remedy == "export MASTER_ADDR=ADDRESS (the IP address of rank 0's host)."
    with pytest.raises(UnreachableHostError, match="torchrun --local-addr"):
        resolve_rendezvous_host(World(size=2, local_size=2, store="env://"), timeout=0.0)


def test_a_host_that_resolves_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a Kubernetes pod resolves only after the pod has started."""
    monkeypatch.setenv("MASTER_ADDR", NOWHERE)
    answers = [OSError(-2, "not yet"), []]

    def lookup(host: str, port: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    resolve_rendezvous_host(AWAY, timeout=60.0)
    assert answers == []


def test_an_address_and_a_known_name_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", host)
        resolve_rendezvous_host(AWAY, timeout=0.0)
    assert resolution_error("a..b") != ""


def test_a_host_whose_own_name_does_not_resolve_needs_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = World(rank=1, size=2, local_size=1, host=NOWHERE, store="env://")
    with pytest.raises(UnreachableHostError, match=f"GLOO_SOCKET_IFNAME={interface()} "):
        require_own_host_name(lost, "gloo")
    require_own_host_name(lost, "nccl")
    require_own_host_name(
        World(size=2, local_size=2, host=NOWHERE), "gloo"
    )  # all on one host: they use the loopback interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    require_own_host_name(lost, "gloo")


@pytest.mark.slow
def test_a_script_reports_the_host_once_without_a_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(command.folder / "script.py").write_text("import unisono\nunisono.main(lambda run: None)\n")
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": NOWHERE}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ended = command.end(command.start_python("script.py", "--set", "steps=1"))
    assert (ended.status, ended.out) == (1, "")
    lines = ended.err.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"  The name {NOWHERE} does not resolve on ")
