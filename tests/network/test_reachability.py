"""Several hosts, as network namespaces: names that resolve to loopback, and addresses that cannot be reached."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.thin_line import INTERFACE, ThinLine, address, missing
from tests.cli.command import ROOT, Command
from tests.cli.test_mpirun import REQUEST, SCRIPT, result
from unisono.environment import inherited

reason = missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)

PORT = 29_500
PROBE = """
import sys
from unisono.distributed.rendezvous.reachable import Patience, reach
from unisono.environment import World
from unisono.errors import UnreachableHostError
try:
    reach(World(rank=1, size=2, local_size=1, store=f"hosted://{sys.argv[1]}:29500/job"), Patience(answer=0.1))
except UnreachableHostError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def line() -> Iterator[ThinLine]:
    with ThinLine(delay_seconds=0.001, bits_per_second=1e9) as line:
        yield line


def start_on_host(
    line: ThinLine, site: int, hosts: str, folder: Path, variables: dict[str, str]
) -> subprocess.Popen[str]:
    """Start the script in a namespace with a host name and a file /etc/hosts of its own."""
    (folder / f"hosts-{site}").write_text(hosts)
    named = f'mount --bind hosts-{site} /etc/hosts && hostname node{site} && exec "$@"'
    words = ["unshare", "--uts", "sh", "-c", named, "sh", sys.executable, "script.py", "--run-dir", "out", *REQUEST]
    return subprocess.Popen(
        [*line.inside(site), *words],
        cwd=folder,
        env=inherited({"PYTHONPATH": str(ROOT), **variables}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_hosts_whose_own_names_resolve_to_loopback(line: ThinLine, command: Command) -> None:
    """Debian gives each host's name 127.0.1.1 there, so gloo would announce an address that no other host reaches."""
    (command.folder / "script.py").write_text(SCRIPT)
    command.train("alone", *REQUEST)
    running = []
    for site in range(2):
        hosts = f"127.0.0.1 localhost\n127.0.1.1 node{site}\n{address(1 - site)} node{1 - site}\n"
        variables = {"RANK": str(site), "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": str(PORT)}
        running.append(start_on_host(line, site, hosts, command.folder, variables))
    output = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], output
    assert result(command.folder, "out")["weights_sha256"] == result(command.folder, "alone")["weights_sha256"]
    assert f"network: {INTERFACE}; the hosts meet at node0:{PORT}" in output[0]


def test_packets_that_are_dropped_an_absent_host_and_a_missing_route(line: ThinLine) -> None:
    silent, absent, nowhere = "10.88.0.8", "10.88.0.9", "10.99.0.1"
    frames_for_no_host = ["neigh", "replace", silent, "lladdr", "02:00:00:00:00:08", "dev", INTERFACE]
    subprocess.run(["ip", "-n", line.names[1], *frames_for_no_host], check=True)
    env = inherited({"PYTHONPATH": str(ROOT)})
    reasons = {silent: "no answer", absent: "host unreachable", nowhere: "no route"}
    running = {
        target: subprocess.Popen(
            [*line.inside(1), sys.executable, "-c", PROBE, target], stdout=subprocess.PIPE, text=True, env=env
        )
        for target in reasons
    }
    text = {target: process.communicate(timeout=60)[0] for target, process in running.items()}
    for target, why in reasons.items():
        first = f"Process 1 cannot reach {target}, port {PORT}, within 0.1 s.\n  {target}: {why} ("
        assert text[target].startswith(first), text
        assert "\n  Next: " in text[target]
    assert f"by {INTERFACE} ({address(1)})" in text[silent]


@pytest.mark.slow
def test_a_command_ends_within_a_minute_with_one_message(line: ThinLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    start = time.monotonic()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.88.0.9", "MASTER_PORT": str(PORT)}
    lost = start_on_host(line, 1, "127.0.0.1 localhost\n127.0.1.1 node1\n", tmp_path, variables)
    output, _ = lost.communicate(timeout=110)
    assert lost.returncode == 1
    assert 58 < time.monotonic() - start < 100
    waits, *message = output.splitlines()
    assert "waits for the others at 10.88.0.9:29500" in waits
    assert message[0] == "Process 1 cannot reach 10.88.0.9, port 29500, within 60 s."
    assert len(message) == 3


@pytest.fixture
def firewall(line: ThinLine) -> Iterator[None]:
    """Send packets from host 1 to all ports but that of the rendezvous to a gateway that no host has."""
    ip = ["ip", "-n", line.names[1]]
    rule = ["priority", "7", "to", address(0), "ipproto", "tcp", "dport", "30000-65534", "lookup", "77"]
    for words in (
        ["neigh", "replace", "10.88.0.8", "lladdr", "02:00:00:00:00:08", "dev", INTERFACE],
        ["route", "replace", "default", "via", "10.88.0.8", "dev", INTERFACE, "table", "77"],
        ["rule", "add", *rule],
    ):
        subprocess.run([*ip, *words], check=True)
    yield
    subprocess.run([*ip, "rule", "del", *rule], check=True)


@pytest.mark.slow
def test_a_firewall_that_opens_only_the_port_of_the_rendezvous(line: ThinLine, firewall: None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    running = []
    for site in range(2):
        variables = {"RANK": str(site), "WORLD_SIZE": "2", "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
        hosts = f"127.0.0.1 localhost\n127.0.1.1 node{site}\n"
        running.append(start_on_host(line, site, hosts, tmp_path, variables))
    output = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [1, 1], output
    for text in output:
        first, facts, _ = text.splitlines()[-3:]
        assert first.startswith(f"Process 1 cannot reach process 0 at {address(0)}, port ")
        assert "no answer (a firewall drops the packets, or no host has this address). Packets leave node1 by" in facts
