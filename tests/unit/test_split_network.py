"""Hosts that reach the launcher and not each other: which of them end, and from which reports this is concluded."""

from __future__ import annotations

import hmac
import random
import socket
import struct
import time

import pytest

from unisono.launcher.hosts.network.signs_of_life import SignsOfLife, signs_at
from unisono.launcher.hosts.network.split_network import HostReport, hosts_to_end, silent_pairs


@pytest.mark.parametrize(
    ("processes", "cut", "own", "ended"),
    [
        ([1, 1], [(0, 1)], None, {1: [0]}),
        ([1, 2], [(0, 1)], None, {0: [1]}),
        ([1, 1], [(0, 1)], 1, {0: [1]}),  # of equal hosts, the launcher's stays
        ([1, 2], [(1, 0)], 0, {0: [1]}),
        ([1, 1, 2], [(0, 2), (1, 2), (2, 0)], None, {2: [0, 1]}),  # two sides of equal size
        ([1, 1, 3], [(0, 2), (1, 2)], None, {0: [2], 1: [2]}),
        ([2, 2, 2, 2], [(0, 2), (0, 3), (1, 2), (1, 3)], None, {2: [0, 1], 3: [0, 1]}),
        ([1, 1, 0], [(0, 2)], None, {2: [0]}),  # a spare host
        ([1, 1, 1], [(0, 1), (0, 2)], None, {0: [1, 2]}),
        ([1, 1, 1], [], None, {}),
    ],
)
def test_the_larger_side_continues(
    processes: list[int], cut: list[tuple[int, int]], own: int | None, ended: dict[int, list[int]]
) -> None:
    assert hosts_to_end(dict(enumerate(processes)), cut, own) == ended


@pytest.mark.parametrize("seed", range(20))
def test_hosts_that_stay_reach_each_other(seed: int) -> None:
    rng = random.Random(seed)
    processes = {host: rng.randrange(4) for host in range(9)}
    cut = [(a, b) for a in processes for b in processes if a != b and rng.random() < 0.1]
    ended = hosts_to_end(processes, cut, own=rng.choice([None, 0]))
    stay = processes.keys() - ended.keys()
    assert not [pair for pair in cut if set(pair) <= stay]
    assert all(unreached and stay.issuperset(unreached) for unreached in ended.values())


def reports(*silences: dict[int, float], now: float) -> dict[int, HostReport]:
    """Return reports of hosts that the launcher has heard without a gap for a minute."""
    found = {number: HostReport(heard=now - 0.5, steady_since=now - 60.0) for number in range(len(silences))}
    for report, each in zip(found.values(), silences, strict=True):
        report.report(each, now - 0.5)
    return found


def test_silence_in_one_direction_is_a_cut() -> None:
    assert silent_pairs(reports({1: 0.4}, {0: 9.0}, now=100.0), 100.0) == {}
    assert silent_pairs(reports({1: 0.4}, {0: 9.6}, now=100.0), 100.0).keys() == {(1, 0)}
    assert silent_pairs(reports({}, {}, now=100.0), 100.0) == {}  # never heard, as behind a firewall


def test_one_cut_is_noticed_everywhere_with_the_first_host() -> None:
    found = silent_pairs(reports({2: 9.6}, {2: 7.0, 0: 0.9}, {0: 9.2, 1: 8.8}, now=100.0), 100.0)
    assert found.keys() == {(0, 2), (1, 2), (2, 0), (2, 1)}


def test_a_host_that_the_launcher_does_not_hear_is_not_judged() -> None:
    found = reports({1: 15.0}, {0: 15.0}, now=100.0)
    found[1].heard = 100.0 - 4.0
    assert silent_pairs(found, 100.0) == {}
    found[1].hear(100.0)  # it was stopped, and continues: what the other host reports is old
    assert silent_pairs(found, 100.0) == {}
    for second in range(11):
        found[1].hear(101.0 + second)
        found[0].hear(101.0 + second)
    assert silent_pairs(found, 111.0).keys() == {(0, 1), (1, 0)}


def test_hosts_hear_each_other() -> None:
    a, b = SignsOfLife("127.0.0.1"), SignsOfLife("127.0.0.1")
    try:
        a.watch(0, "secret", {"1": ["127.0.0.1", b.port]})
        b.watch(1, "other", {"0": ["127.0.0.1", a.port]})
        exchange(a, b)
        assert (a.silences(1.0), b.silences(1.0)) == ({}, {})  # a packet without the token does not count
        b.watch(1, "secret", {0: ("127.0.0.1", a.port)})
        exchange(a, b, start=2.0)
        assert a.silences(5.0).keys() == {1}
        assert b.silences(5.0) == {0: 1.0}
        b.watch(1, "secret", {0: ("127.0.0.1", a.port + 1)})
        assert b.silences(5.0) == {}  # it has started again
    finally:
        a.close()
        b.close()
    assert signs_at("203.0.113.1") is None


def test_only_new_packets_with_the_token_count() -> None:
    """A host that is a plain socket here sends the packets that an attacker would send."""
    host, stranger = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    signs = SignsOfLife("127.0.0.1")
    try:
        host.bind(("127.0.0.1", 0))
        host.settimeout(10)
        at = ("127.0.0.1", signs.port)

        def packet(sender: int, receiver: int, count: int, token: bytes = b"secret") -> bytes:
            head = struct.pack("!IIQ", sender, receiver, count)
            return head + hmac.digest(token, head, "sha256")

        def heard(now: float, *packets: bytes, by: socket.socket = host) -> dict[int, float]:
            for each in packets:
                by.sendto(each, at)
            signs.exchange(now)
            return signs.silences(now)

        signs.watch(0, "secret", {1: host.getsockname()})
        wrong = (b"", b"[]", packet(1, 0, 5, b"other"), packet(1, 2, 5), packet(7, 0, 5), packet(1, 0, 5) + b"x")
        assert heard(1.0, *wrong) == {}
        assert heard(2.0, host.recv(100)) == {}  # its own packet, sent back
        assert heard(3.0, packet(1, 0, 5)) == {1: 0.0}
        assert heard(4.0, packet(1, 0, 5)) == {1: 1.0}  # recorded
        assert heard(5.0, *[bytes(48)] * 5000, by=stranger) == {1: 2.0}
        for _ in range(5000):  # the buffer of the socket for strangers is full again
            stranger.sendto(bytes(48), at)
        assert heard(6.0, packet(1, 0, 6)) == {1: 0.0}
    finally:
        for each in (signs, host, stranger):
            each.close()


def exchange(*signs: SignsOfLife, start: float = 0.0) -> None:
    """Let hosts exchange packets for two of their seconds."""
    for second in range(1, 3):
        for each in signs:
            each.exchange(start + second)
        time.sleep(0.01)
