"""Commands run in hosts through a real sshd, and the errors of SSH are those of a wrong host, key or server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.network import ssh_hosts
from tests.network.hosts import faketime_library, hosts, missing
from tests.network.ssh_hosts import SshHosts

reason = missing() or ssh_hosts.missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)


def test_ssh_runs_commands_in_hosts(tmp_path: Path) -> None:
    with hosts(2, head=True, shared=[tmp_path]) as (head, a, b):
        ssh = SshHosts([a, b], tmp_path / "ssh")
        head.network.join()
        for name in ("a", "b"):
            for words in (head.command(ssh.command(name, "uname", "-n")), ssh.command(name, "uname", "-n")):
                assert subprocess.run(words, capture_output=True, text=True).stdout == f"{name}\n"
        assert head.run(ssh.command("a", "exit 7")).returncode == 7
        ssh.change_host_key("a")
        assert_refused(head.run(ssh.command("a", "true")), "Host key verification failed")
        ssh.revoke("b")
        assert_refused(head.run(ssh.command("b", "true")), "Permission denied (publickey)")
        ssh.stop("b")
        assert_refused(head.run(ssh.command("b", "true")), "Connection refused")


def assert_refused(done: subprocess.CompletedProcess[str], error: str) -> None:
    assert done.returncode == 255
    assert error in done.stderr


@pytest.mark.skipif(faketime_library() is None, reason="Debian's package faketime is missing")
def test_commands_of_ssh_have_the_clock_of_the_host(tmp_path: Path) -> None:
    with hosts(1, head=True, shared=[tmp_path]) as (head, a):
        a.clock(1_000_000)
        ssh = SshHosts([a], tmp_path / "ssh")
        here, there = (int(head.run([*words, "date", "+%s"], check=True).stdout) for words in ([], ssh.command("a")))
        assert 999_900 < there - here < 1_000_100
