"""Hosts that reach the launcher and not each other, and networks in two parts: one side continues, exactly."""

from __future__ import annotations

import time

import pytest

from tests.network import hosts as namespaces
from tests.network import ssh_hosts
from tests.network.ssh_cluster import SECONDS, Cluster, left, wait_until_nothing_is_left

reason = namespaces.missing() or ssh_hosts.missing()
pytestmark = [pytest.mark.skipif(bool(reason), reason=reason), pytest.mark.slow]


@pytest.mark.parametrize("one_way", [True, False])
def test_the_smaller_of_two_hosts_that_do_not_reach_each_other_ends(
    cluster: Cluster, fingerprint: str, one_way: bool
) -> None:
    a, c, name = cluster.others["a"], cluster.others["c"], f"half-{one_way}"
    process = cluster.start("--hosts", "a:1,b:1,c:2", "--run-dir", name, "--set", "pause=0.5")
    cluster.wait_for_step(name, 3)
    c.drop(a, one_way=one_way)
    cut = time.monotonic()
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert "Host a is lost: it and host c cannot reach each other (nothing from host" in err, err
        assert ("packets in the other direction arrive" in err) == one_way
        assert err.count("is lost") == 1
        found = cluster.result(name)
        assert found["weights_sha256"] == fingerprint
        assert [death["process"] for death in found["deaths"]] == [0]
        assert time.monotonic() - cut < 60.0
        wait_until_nothing_is_left(cluster, 5.0)
    finally:
        c.heal(a, one_way=one_way)


def test_of_a_network_in_two_parts_the_larger_one_continues(cluster: Cluster, fingerprint: str) -> None:
    """The launcher reaches all hosts, and a and b do not reach c."""
    hosts = cluster.others
    process = cluster.start("--hosts", "a:1,b:1,c:1", "--run-dir", "parts", "--set", "pause=0.5")
    cluster.wait_for_step("parts", 3)
    for name in "ab":
        hosts["c"].drop(hosts[name], one_way=False)
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert "Host c is lost: it and host a and host b cannot reach each other" in err, err
        assert err.count("is lost") == 1
        assert cluster.result("parts")["weights_sha256"] == fingerprint
    finally:
        for name in "ab":
            hosts["c"].heal(hosts[name], one_way=False)


def test_the_part_without_the_launcher_ends(cluster: Cluster, fingerprint: str) -> None:
    """The launcher reaches a only. No process of the others is left after the limit, and a continues alone."""
    hosts = cluster.others
    process = cluster.start("--hosts", "a:1,b:1,c:1", "--run-dir", "minority", "--set", "pause=0.5")
    cluster.wait_for_step("minority", 3)
    for name in "bc":
        for near in (cluster.head, hosts["a"]):
            hosts[name].drop(near, one_way=False)
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        for name in "bc":
            assert f"Host {name} is lost: nothing has arrived from it for 10 s." in err, err
        assert cluster.result("minority")["weights_sha256"] == fingerprint
        assert left(cluster) == []
    finally:
        for name in "bc":
            for near in (cluster.head, hosts["a"]):
                hosts[name].heal(near, one_way=False)


def test_a_minority_does_not_continue(cluster: Cluster) -> None:
    """The launcher reaches a only, and at least two processes must remain. So all hosts are tried again, in vain."""
    hosts = cluster.others
    process = cluster.start("--hosts", "a:1,b:1,c:1", "--ranks", "2:3", "--run-dir", "too-few", "--set", "pause=0.5")
    cluster.wait_for_step("too-few", 3)
    for name in "bc":
        for near in (cluster.head, hosts["a"]):
            hosts[name].drop(near, one_way=False)
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 2, err
        assert "Restarting from" in err, err
        for name in "bc":
            assert f"Cannot start processes on host {name}." in err, err
        assert not (cluster.folder / "too-few" / "result.json").exists()
        assert left(cluster) == []
    finally:
        for name in "bc":
            for near in (cluster.head, hosts["a"]):
                hosts[name].heal(near, one_way=False)


def test_a_restart_needs_only_the_least_number_of_processes(cluster: Cluster, fingerprint: str) -> None:
    """Audited runs restart after a death (train/recovery/survival.py)."""
    host = cluster.others["b"]
    words = ("--hosts", "a:1,b:1,c:1", "--ranks", "2:3", "--run-dir", "fewer")
    process = cluster.start(*words, "--set", "audit_every=100", "--set", "pause=0.3")
    cluster.wait_for_step("fewer", 5)
    host.kill()
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert "Without the lost hosts there is room for 2 processes." in err, err
        assert "hosts: a 1 (eth0), c 1 (eth0)" in err, err
        assert cluster.result("fewer")["weights_sha256"] == fingerprint
    finally:
        host.boot()
        cluster.ssh.start("b")


def test_the_host_of_the_launcher_may_be_the_one_that_ends(cluster: Cluster, fingerprint: str) -> None:
    a, b = cluster.others["a"], cluster.others["b"]
    words = ("--hosts", "head:1,a:1,b:2", "--run-dir", "own", "--set", "pause=0.5")
    process = cluster.start(*words)
    cluster.wait_for_step("own", 3)
    b.drop(a, one_way=False)  # a ends: it has fewer processes
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert "Host a is lost: it and host b cannot reach each other" in err, err
        assert cluster.result("own")["weights_sha256"] == fingerprint
    finally:
        b.heal(a, one_way=False)
