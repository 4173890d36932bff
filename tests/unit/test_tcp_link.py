"""TCP links: messages arrive unchanged, a closed link is detected, and a wrong key is refused."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from unisono.distributed.init import join_process_group as join
from unisono.distributed.rendezvous import own_port
from unisono.environment import World
from unisono.environment.routes import interface_with
from unisono.param_server.connections import Message, WorkerConnections
from unisono.param_server.tcp_link import TcpLink, build_links
from unisono.testing import run_ranks


def pair() -> tuple[TcpLink, TcpLink]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        other, _ = door.accept()
    return TcpLink(one), TcpLink(other)


def test_tensors_of_any_kind_arrive_as_they_were() -> None:
    one, other = pair()
    sent = [
        torch.randn(3, 5),
        torch.randn(4, 6).t(),
        torch.tensor(float("nan")),
        torch.zeros(0, 7),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False, True]),
        torch.tensor([1 + 2j]),
        torch.tensor([-3], dtype=torch.int16),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    one.send({"push": 3, "sums": {"loss": [float("inf"), 0.1]}}, sent)
    about, received = other.receive()
    assert about == {"push": 3, "sums": {"loss": [float("inf"), 0.1]}}
    assert [tensor.dtype for tensor in received] == [tensor.dtype for tensor in sent]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(received, sent, strict=True) if a.dim())
    assert received[2].isnan()
    one.close()
    other.close()


def test_large_tensors_arrive_while_others_are_read() -> None:
    one, other = pair()
    big = torch.arange(3_000_000, dtype=torch.float32)
    thread = threading.Thread(target=lambda: one.send({}, [big]))
    thread.start()
    ((received,),) = [other.receive()[1]]
    thread.join()
    assert torch.equal(received, big)
    one.close()
    other.close()


def test_a_closed_link_is_noticed() -> None:
    one, other = pair()
    assert not one.has_word()
    other.close()
    assert one.has_word()
    with pytest.raises(ConnectionError, match="closed by peer"):
        one.receive()
    one.close()


def test_a_notice_never_blocks() -> None:
    """A peer that hangs does not read from a full socket buffer."""
    one, other = pair()
    for _ in range(2000):
        one.tell({"over": "x" * 10_000})
    one.close()
    other.close()


def test_worker_connections_answer_in_order_and_report_lost_workers() -> None:
    here, there = pair()
    connections = WorkerConnections({1: here})
    there.send({"hello": True}, [torch.ones(2)])
    message = connections.receive(10.0)
    assert message is not None
    assert (message.worker, message.about) == (1, {"hello": True})
    connections.answer(Message(1, {"step": 3}, [torch.zeros(1)]))
    assert there.receive()[0] == {"step": 3}
    there.close()
    assert connections.receive(10.0) == Message(1, {})
    connections.notify()
    assert connections.receive(10.0) is None
    assert connections.receive(0.01) is None
    connections.close()


def test_finish_notifies_computing_and_waiting_workers() -> None:
    ends = [pair(), pair()]
    connections = WorkerConnections({rank: here for rank, (here, _) in enumerate(ends)})
    ends[0][1].send({"hello": True})
    assert connections.receive(10.0) is not None
    connections.finish()
    assert [there.receive()[0] for _, there in ends] == [{"over": True}] * 2
    for _, there in ends:
        there.close()
    connections.close()


def meet(world: World) -> list[int]:
    """Send the rank over every link, and check the ranks received."""
    with join(world) as group:
        links = build_links(group, 2)
        for link in links.values():
            link.send({"rank": group.rank})
        ranks = [link.receive()[0]["rank"] for link in links.values()]
        assert ranks == list(links)
        for link in links.values():
            link.close()
        return list(links)


@pytest.mark.ci
def test_workers_and_servers_find_each_other() -> None:
    assert run_ranks(meet, 5) == [[1, 2, 3, 4], [0, 2, 3, 4], [0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_for_other_hosts_listens_on_ipv4_and_ipv6(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_dualstack_ipv6() or interface_with("::1") is None:
        pytest.skip("this machine has no IPv6")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    addresses = own_port.own_addresses()
    assert addresses[-1] == "::1"
    assert not any("%" in address for address in addresses)
    with own_port.listen(2, here=False) as door:
        socket.create_connection((host, door.getsockname()[1]), timeout=5).close()
    with own_port.listen(2, here=True) as door:
        assert door.getsockname()[0] == "127.0.0.1"
