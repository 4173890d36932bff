"""Runs on several hosts through ssh: the bits of one process, faults of hosts and cables, wrong requests."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.network import hosts as namespaces
from tests.network import ssh_hosts
from tests.network.ssh_cluster import SECONDS, Cluster, left, wait_until_nothing_is_left

reason = namespaces.missing() or ssh_hosts.missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)


@pytest.mark.ci
def test_three_hosts_have_the_bits_of_one_process(cluster: Cluster, fingerprint: str) -> None:
    status, err = cluster.run("--hosts", "a:1,b:2,c:1", "--run-dir", "three")
    assert status == 0, err
    assert "hosts: a 1 (eth0), b 2 (eth0), c 1 (eth0)" in err
    found = cluster.result("three")
    assert (found["ranks"], found["weights_sha256"]) == (4, fingerprint)
    assert len(list((cluster.folder / "three" / "log").glob("*.log"))) == 4
    assert left(cluster) == []


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "transport"), [("power", "plain"), ("cable", "plain"), ("power", "tls")])
def test_the_others_finish_without_a_host(cluster: Cluster, fingerprint: str, fault: str, transport: str) -> None:
    host, run_dir = cluster.others["c"], f"{fault}-{transport}"
    more = ("--set", "pause=0.05", "--set", f"secure.transport={transport}")
    process = cluster.start("--hosts", "a:1,b:1,c:2", "--run-dir", run_dir, *more)
    cluster.wait_for_step(run_dir, 6)
    (host.kill if fault == "power" else host.pull)()
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        found = cluster.result(run_dir)
        assert found["weights_sha256"] == fingerprint
        assert {death["process"] for death in found["deaths"]} >= {2, 3}
        assert "Host c is lost: nothing has arrived from it for 10 s." in err
        wait_until_nothing_is_left(cluster, 20.0)
    finally:
        if fault == "power":
            host.boot()
            cluster.ssh.start("c")
        else:
            host.plug()


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["step", "layer"])
def test_a_replica_in_shards_continues_without_the_host_of_another(
    cluster: Cluster, fingerprint: str, reshard: str
) -> None:
    """Ranks 0 and 1 share a replica on a, ranks 2 and 3 on b."""
    name, host = f"shards-{reshard}", cluster.others["b"]
    shards = ("--set", "parallel.shard=2", "--set", f"parallel.reshard={reshard}", "--set", "pause=0.3")
    process = cluster.start("--hosts", "a:2,b:2", "--run-dir", name, *shards)
    cluster.wait_for_step(name, 3)
    host.kill()
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        found = cluster.result(name)
        assert (found["weights_sha256"], found["survival"]) == (fingerprint, "survivors")
        assert {death["process"] for death in found["deaths"]} >= {2, 3}
        assert "Restarting" not in err
    finally:
        host.boot()
        cluster.ssh.start("b")


@pytest.mark.slow
def test_shards_continue_from_their_copies_on_other_hosts(cluster: Cluster, fingerprint: str) -> None:
    """Ranks 0 and 1 of one axis of four are on a, ranks 2 and 3 on b; c is a spare host. There is no checkpoint."""
    host = cluster.others["b"]
    shards = ("--set", "parallel.shard=4", "--set", "parallel.replicate_shards=true", "--set", "checkpoint.every=0")
    words = ("--hosts", "a:2,b:2,c:2", "--ranks", "4", "--run-dir", "copies", *shards, "--set", "pause=0.3")
    process = cluster.start(*words)
    cluster.wait_for_step("copies", 5)
    host.kill()
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert re.search(r"Restarting from the emergency dump after step \d+, or the beginning", err), err
        assert "hosts: a 2 (eth0), c 2 (eth0)" in err
        found = cluster.result("copies")
        assert found["weights_sha256"] == fingerprint
        assert found["resumed_at"] >= 5
    finally:
        host.boot()
        cluster.ssh.start("b")


@pytest.mark.slow
def test_a_spare_host_takes_the_part_of_a_lost_one(cluster: Cluster, fingerprint: str) -> None:
    host = cluster.others["b"]
    words = ("--hosts", "a:1,b:1,c:1", "--ranks", "2", "--run-dir", "spare", "--set", "pause=0.4")
    process = cluster.start(*words)
    cluster.wait_for_step("spare", 3)
    host.kill()
    try:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert cluster.result("spare")["weights_sha256"] == fingerprint
        assert "hosts: a 1 (eth0), b 1 (eth0), c spare" in err
        assert re.search(r"Process 2 joined after \d+ steps", err), err
    finally:
        host.boot()
        cluster.ssh.start("b")


@pytest.mark.slow
def test_nothing_is_left_when_the_head_is_killed(cluster: Cluster) -> None:
    process = cluster.start("--hosts", "a:1,b:1", "--run-dir", "killed", "--set", "pause=0.2")
    cluster.wait_for_step("killed", 2)
    process.kill()
    process.communicate()
    wait_until_nothing_is_left(cluster, 15.0)


@pytest.mark.slow
def test_a_stopped_run_is_resumed_on_other_hosts(cluster: Cluster, fingerprint: str) -> None:
    process = cluster.start("--hosts", "a:2,b:1", "--run-dir", "stopped", "--set", "pause=1")
    cluster.wait_for_step("stopped", 5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert cluster.result("stopped")["stopped"] is True
    wait_until_nothing_is_left(cluster, 5.0)
    status, err = cluster.run("--hosts", "c:2", "--run-dir", "stopped", "--resume")
    assert status == 0, err
    assert cluster.result("stopped")["weights_sha256"] == fingerprint


def wrong(cluster: Cluster, *words: str) -> str:
    status, err = cluster.run(*words, "--run-dir", f"wrong-{time.monotonic_ns()}")
    assert status == 2, err
    assert left(cluster) == []
    return err


def test_a_host_that_cannot_be_reached_is_one_message(cluster: Cluster) -> None:
    assert wrong(cluster, "--hosts", "a,nowhere") == (
        "Cannot start processes on host nowhere.\n  The name does not resolve.\n"
        "  Next: check the spelling, or add the host to ~/.ssh/config\n"
    )
    cluster.ssh.stop("b")
    err = wrong(cluster, "--hosts", "a,b")
    assert "Cannot start processes on host b.\n  No ssh server listens there.\n" in err
    cluster.ssh.start("b")


def test_a_run_directory_that_is_not_shared_is_one_message(cluster: Cluster, tmp_path: Path) -> None:
    status, err = cluster.run("--hosts", "a,b", "--run-dir", "/tmp/private-run")
    assert status == 2
    assert err.count("It does not see the run directory.") == 2
    assert "Host a differs from head." in err or "Host a differs from" in err


@pytest.mark.slow
def test_keys_that_are_refused_are_one_message(cluster: Cluster) -> None:
    cluster.ssh.revoke("c")
    assert "It accepts no key of this user." in wrong(cluster, "--hosts", "a,c")
    cluster.ssh.change_host_key("b")
    assert "ssh does not know or does not accept its host key." in wrong(cluster, "--hosts", "a,b")
