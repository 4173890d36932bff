"""`unisono doctor --hosts` names planted troubles, and `unisono bench --hosts` a planted slow link."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.network import hosts as namespaces
from tests.network import ssh_hosts
from tests.network.hosts import INTERFACE, ROOT, Host
from tests.network.ssh_hosts import SSHD, SshHosts
from tests.network.test_hosts import processes_of
from unisono.environment import inherited, variables

reason = namespaces.missing() or ssh_hosts.missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)

SECONDS = 150.0


class Hosts:
    """A head, where commands are typed, and hosts a, b and c with ssh servers. All share a folder."""

    def __init__(self, head: Host, others: list[Host], folder: Path) -> None:
        self.head, self.folder = head, folder
        self.others = {host.name: host for host in others}
        self.ssh = SshHosts(others, folder / "ssh")
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.ssh.config} "$@"\n')
        wrapper.chmod(0o755)
        (folder / "train.py").write_text("print('a script')\n")

    def run(self, *words: str, folder: Path | None = None, pythonpath: Path = ROOT) -> tuple[int, str, str]:
        """Run the command in the head. Return its exit status, its output, and its errors."""
        path = f"{self.folder / 'bin'}:{variables(['PATH'])['PATH']}"
        done = self.head.run(
            [sys.executable, "-P", "-m", "unisono.cli.main", *words],
            cwd=folder or self.folder,
            env=inherited({"PATH": path, "PYTHONPATH": str(pythonpath)}),
            timeout=SECONDS,
        )
        return done.returncode, done.stdout, done.stderr

    def doctor(self, *words: str, hosts: str = "a,b") -> tuple[int, dict[str, Any]]:
        """Run the doctor. Return its exit status and its findings."""
        status, out, err = self.run("doctor", "--hosts", hosts, "--json", *words)
        assert out, err
        assert self.left() == []
        return status, json.loads(out)

    def left(self) -> list[str]:
        """Return the command lines of processes of Unisono that run on the hosts."""
        found = []
        for host in (self.head, *self.others.values()):
            for pid in processes_of(host):
                path = Path(f"/proc/{pid}/cmdline")
                found.append(path.read_bytes().replace(b"\0", b" ").decode() if path.exists() else "")
        return [line for line in found if "unisono." in line]

    def bind(self, name: str, source: Path, target: Path) -> None:
        """Let a host have another file in the place of one."""
        self.others[name].run(["mount", "-n", "--bind", str(source), str(target)], check=True)

    def unbind(self, name: str, target: Path) -> None:
        self.others[name].run(["umount", "-n", str(target)], check=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("shared")
    with namespaces.hosts(2, head=True, shared=[folder]) as (head, *others):
        yield Hosts(head, others, folder)


def texts(found: dict[str, Any]) -> list[str]:
    return [f"{each['level']}: {each['error']} {each['facts']} Next: {each['remedy']}" for each in found["troubles"]]


def ends(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(link["source"], link["target"], link["error"]) for link in found["links"]]


def named(found: dict[str, Any], *parts: str) -> bool:
    """Return whether one of the troubles contains all of these."""
    return any(all(part in text for part in parts) for text in texts(found))


def test_healthy_hosts_are_ready(hosts: Hosts) -> None:
    status, found = hosts.doctor("--script", "train.py")
    assert (status, [text for text in texts(found) if not text.startswith("note")]) == (0, [])
    assert [(host["name"], host["interface"]) for host in found["hosts"]] == [("a", INTERFACE), ("b", INTERFACE)]
    assert all(abs(host["clock"]["offset_seconds"]) < 1 for host in found["hosts"])
    assert [(link["source"], link["target"], link["error"]) for link in found["links"]] == [
        ("a", "b", ""),
        ("b", "a", ""),
    ]
    assert all(link["latency_seconds"] > 0 and link["bytes_per_second"] > 0 for link in found["links"])
    assert not list(hosts.folder.glob(".reachable*"))


@pytest.mark.slow
def test_the_table_has_each_host_and_link(hosts: Hosts) -> None:
    status, out, err = hosts.run("doctor", "--hosts", "a,b")
    assert status == 0, out + err
    lines = out.splitlines()
    row = next(line for line in lines if line.startswith("a  "))
    assert f"{hosts.others['a'].address} ({INTERFACE})" in row
    assert torch.__version__ in row
    assert sum("B/s" in line for line in lines) == 2
    assert lines[-1] == "Ready. Next: unisono run text --hosts a,b"


# -- hosts that cannot be examined: status 2


def test_an_unknown_host(hosts: Hosts) -> None:
    status, found = hosts.doctor(hosts="a,nowhere")
    assert status == 2
    assert named(found, "host nowhere", "The name does not resolve.", "~/.ssh/config")
    assert [host["reachable"] for host in found["hosts"]] == [True, False]


@pytest.mark.slow
def test_no_ssh_server(hosts: Hosts) -> None:
    hosts.ssh.stop("b")
    try:
        status, found = hosts.doctor()
    finally:
        hosts.ssh.start("b")
    assert status == 2
    assert named(found, "host b", "No ssh server listens there.", "start sshd")


@pytest.mark.slow
def test_no_python_there(hosts: Hosts) -> None:
    hosts.others["b"].fill(sys.prefix, 2**20)
    try:
        status, found = hosts.doctor()
    finally:
        hosts.unbind("b", Path(sys.prefix))
    assert status == 2
    assert named(found, "host b", "install the same environment there, at the same path")


@pytest.mark.slow
def test_no_working_folder_there(hosts: Hosts) -> None:
    hosts.head.run(["mkdir", "-p", "/run/mine"], check=True)
    status, out, _ = hosts.run("doctor", "--hosts", "a", "--json", folder=Path("/run/mine"))
    assert status == 2
    assert named(json.loads(out), "host a", "The working folder does not exist there.", "a folder that all hosts have")


@pytest.mark.slow
def test_keys_that_are_refused(hosts: Hosts) -> None:
    keys = hosts.folder / "ssh" / "b" / "authorized_keys"
    kept = keys.read_text()
    hosts.ssh.revoke("b")
    status, found = hosts.doctor()
    keys.write_text(kept)
    assert status == 2
    assert named(found, "host b", "It accepts no key of this user.", "ssh-copy-id b")
    key = hosts.folder / "ssh" / "b" / "host_key"
    shutil.copy(key, hosts.folder / "kept_key")
    hosts.ssh.change_host_key("b")
    status, found = hosts.doctor()
    hosts.ssh.stop("b")
    shutil.copy(hosts.folder / "kept_key", key)
    hosts.ssh.start("b")
    assert status == 2
    assert named(found, "host b", "ssh does not know or does not accept its host key.", "ssh-keyscan b")


# -- hosts that differ, or whose links fail: status 1


@pytest.mark.slow
def test_other_versions(hosts: Hosts, tmp_path: Path) -> None:
    (metadata,) = Path(torch.__file__).parents[1].glob("torch-*.dist-info/METADATA")
    other = hosts.folder / "METADATA"
    other.write_text(metadata.read_text().replace(f"Version: {torch.__version__}", "Version: 2.99.0", 1))
    hosts.bind("b", other, metadata)
    try:
        status, found = hosts.doctor()
    finally:
        hosts.unbind("b", metadata)
    assert status == 1
    assert named(found, "Host b differs from head.", f"torch is 2.99.0 there and {torch.__version__} here.")
    source = Path(unisono.__file__)
    older = hosts.folder / "older.py"
    older.write_text(source.read_text() + "# an older version\n")
    hosts.bind("b", older, source)
    try:
        status, found = hosts.doctor()
    finally:
        hosts.unbind("b", source)
    assert status == 1
    assert named(found, "Host b differs from head.", "Unisono is", "install the same version there")


@pytest.mark.slow
def test_a_script_that_is_missing_or_differs(hosts: Hosts) -> None:
    script = hosts.folder / "own" / "train.py"
    script.parent.mkdir()
    script.write_text("print('mine')\n")
    changed = hosts.folder / "changed.py"
    changed.write_text("print('changed')\n")
    hosts.bind("a", changed, script)
    hosts.others["b"].fill(script.parent, 2**20)
    try:
        status, found = hosts.doctor("--script", "own/train.py")
    finally:
        hosts.unbind("a", script)
        hosts.unbind("b", script.parent)
    assert status == 1
    assert named(found, "Host a differs", "The script is not the same file there.", "copy it there")
    assert named(found, "Host b differs", "The script does not exist there.", "copy it there")


@pytest.mark.slow
def test_a_run_directory_that_is_not_shared(hosts: Hosts) -> None:
    status, found = hosts.doctor("--run-dir", "/tmp/mine")
    assert status == 1
    assert named(found, "Host a differs", "It does not see the run directory.", "--run-dir DIR")


@pytest.mark.slow
def test_a_firewall_between_two_hosts(hosts: Hosts) -> None:
    a, b = hosts.others["a"], hosts.others["b"]
    a.drop(b)
    try:
        status, found = hosts.doctor()
    finally:
        a.heal(b)
    assert status == 1
    assert named(found, "cannot connect to host b.", f"At {b.address} (eth0 of b): no answer", "let the firewall of b")


def test_a_wrong_interface(hosts: Hosts) -> None:
    """ssh reaches b through a cable between head and b alone."""
    head, b = hosts.head, hosts.others["b"]
    own, peer = "10.201.7.1", "10.201.7.2"
    cable = ["ip", "link", "add", "mgmt0", "netns", str(head.pid), "type", "veth", "peer", "name", "mgmt0"]
    subprocess.run([*cable, "netns", str(b.pid)], check=True)
    for host, address in ((head, own), (b, peer)):
        host.run(["ip", "address", "add", f"{address}/24", "dev", "mgmt0"], check=True)
        host.run(["ip", "link", "set", "mgmt0", "up"], check=True)
    assert SSHD is not None
    configuration = hosts.folder / "mgmt_config"
    text = (hosts.folder / "ssh" / "b" / "sshd_config").read_text()
    configuration.write_text("\n".join(line for line in text.splitlines() if "ListenAddress" not in line))
    with configuration.open("a") as file:
        file.write(f"\nListenAddress {peer}\n")
    server = b.start([SSHD, "-D", "-f", str(configuration)], stderr=subprocess.DEVNULL)
    kept = hosts.ssh.config.read_text()
    hosts.ssh.config.write_text(f"Host b-mgmt\n  HostName {peer}\n  HostKeyAlias {b.address}\n{kept}")
    try:
        status, found = hosts.doctor(hosts="a,b-mgmt")
    finally:
        hosts.ssh.config.write_text(kept)
        server.terminate()
        server.wait()
        head.run(["ip", "link", "del", "mgmt0"], check=True)
    assert status == 1
    assert named(
        found,
        "Host a cannot connect to host b-mgmt.",
        f"At {peer} (mgmt0 of b-mgmt)",
        f"At {b.address} (eth0) it can be reached.",
        f"HostName {b.address} for b-mgmt in ~/.ssh/config",
    )


# -- notes


@pytest.mark.slow
def test_no_space_for_shared_memory_and_temporary_files(hosts: Hosts) -> None:
    host, kept = hosts.others["b"], dict(hosts.others["b"].environment)
    host.fill("/dev/shm", 2**20)
    host.fill("/run/small", 2**22)
    hosts.ssh.stop("b")
    host.environment = {**kept, "TMPDIR": "/run/small"}
    hosts.ssh.start("b")
    try:
        status, found = hosts.doctor()
    finally:
        hosts.ssh.stop("b")
        host.environment = kept
        hosts.ssh.start("b")
        hosts.unbind("b", Path("/dev/shm"))
    assert status == 0
    assert named(found, "note: Host b has little space in /run/small.", "4 MB are free.", "df -h /run/small")
    assert named(found, "note: Host b has little space in /dev/shm.", "1 MB are free.", "--shm-size=1g")


@pytest.mark.slow
def test_no_space_for_runs(hosts: Hosts) -> None:
    small = hosts.folder / "small"
    for host in (hosts.head, *hosts.others.values()):
        host.fill(small, 2**24)
    status, found = hosts.doctor("--run-dir", "small")
    assert status == 1
    assert named(found, "note: Host b has little space for runs.", "16 MB are free.", "--run-dir DIR")


@pytest.mark.slow
@pytest.mark.skipif(namespaces.faketime_library() is None, reason="Debian's package faketime is missing")
def test_a_wrong_clock(hosts: Hosts) -> None:
    host, kept = hosts.others["b"], dict(hosts.others["b"].environment)
    hosts.ssh.stop("b")
    host.clock(3600)
    hosts.ssh.start("b")
    try:
        status, found = hosts.doctor()
    finally:
        hosts.ssh.stop("b")
        host.environment = kept
        hosts.ssh.start("b")
    assert status == 0
    assert named(found, "note: The clock of host b is wrong.", "ahead of that of head", "timedatectl")
    (clock,) = (each["clock"] for each in found["hosts"] if each["name"] == "b")
    assert clock["offset_seconds"] == pytest.approx(3600, abs=1)
    assert clock["error_seconds"] < 1


@pytest.mark.slow
def test_wrong_requests_are_one_message(hosts: Hosts) -> None:
    for words, error in (
        (("--hosts", "a:0"), "Invalid value for --hosts: a:0"),
        (("--hosts", "a", "--script", "none.py"), "There is no script none.py on this host."),
        (("--script", "train.py"), "--script and --run-dir need several hosts."),
        (("--nodes", "2"), "--nodes needs --meet."),
    ):
        for command in ("doctor", *(["bench"] if "--script" not in words else [])):
            status, out, err = hosts.run(command, *words)
            assert (status, out, err.splitlines()[0]) == (2, "", error)
    assert hosts.left() == []
    status, _, err = hosts.run("bench", "--hosts", "a,nowhere")
    assert (status, err.splitlines()[0]) == (2, "Cannot start processes on host nowhere.")
    assert hosts.left() == []
    assert not list((hosts.folder / "runs").glob("bench-*"))


# -- within a job, and a slow link


@pytest.mark.slow
def test_the_hosts_of_a_job_examine_themselves(hosts: Hosts) -> None:
    """Each host runs the same command, under the variables of an engine."""
    a, b = hosts.others["a"], hosts.others["b"]
    started = []
    for rank, host in enumerate((a, b)):
        at = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": a.address, "MASTER_PORT": "29511"}
        words = [sys.executable, "-P", "-m", "unisono.cli.main", "doctor", "--json", "--script", "train.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        variables_ = inherited({**at, "PYTHONPATH": str(ROOT)})
        started.append(host.start(words, cwd=hosts.folder, env=variables_, **pipes))
    ended = [process.communicate(timeout=SECONDS) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert ended[1][0] == ""
    found = json.loads(ended[0][0])
    assert [(host["name"], host["interface"]) for host in found["hosts"]] == [("a", INTERFACE), ("b", INTERFACE)]
    assert {(link["source"], link["target"], link["error"]) for link in found["links"]} == {
        ("a", "b", ""),
        ("b", "a", ""),
    }


def limit(source: Host, target: Host, slow: str) -> None:
    """Give a host a cable of 400 Mbit/s, and the link to another host less."""
    tc = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "htb", "default", "10"]
    source.run(tc, check=True)
    for name, rate in (("1:10", "400mbit"), ("1:20", slow)):
        words = ["class", "add", "dev", INTERFACE, "parent", "1:", "classid", name, "htb", "rate", rate]
        source.run(["tc", *words], check=True)
    match = ["protocol", "ip", "parent", "1:", "u32", "match", "ip", "dst", f"{target.address}/32", "flowid", "1:20"]
    source.run(["tc", "filter", "add", "dev", INTERFACE, *match], check=True)


@pytest.mark.slow
def test_a_slow_link_of_four_hosts_is_named(tmp_path: Path) -> None:
    with namespaces.hosts(4, head=True, shared=[tmp_path]) as (head, *others):
        four = Hosts(head, others, tmp_path)
        a, b, c, d = others
        for source, target, rate in ((a, b, "400mbit"), (b, d, "40mbit"), (c, a, "400mbit"), (d, b, "40mbit")):
            limit(source, target, rate)
        words = ("--hosts", "a,b,c,d", "--only", "pairs", "--run-dir", "bench", "--json")
        status, out, err = four.run("bench", *words)
        assert status == 0, err
        found = json.loads(out)
        assert found["about"]["hosts"] == ["a", "b", "c", "d"]
        assert len(found["pairs"]) == 6
        (finding,) = found["findings"]
        assert finding.startswith("The link between host b and host d is slow.\n  It has ")
        assert "times the median" in finding
        assert "Each exchange waits for its slowest link" in finding
        assert four.left() == []
        status, report = four.doctor(hosts="a,b,c,d")
        assert status == 0
        assert named(report, "note: The link between host b and host d is slow.", "times the median")
