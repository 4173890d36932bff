"""The command that starts an agent on another host, with the system's own ssh: its aliases, keys and known hosts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from unisono.environment import variables

ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""ssh ends 15 s after the other end has stopped to answer."""

AGENT = "unisono.launcher.hosts.host_agent"


def agent_command(host: str, folder: str, *, ssh: Sequence[str] = ("ssh",), python: str = sys.executable) -> list[str]:
    """Return the command that starts the agent on a host.

    Args:
        host: the name for ssh.
        folder: the working folder there, the same as here.
        ssh: the ssh command with its own options.
        python: the path of Python there.
    """
    path = "".join(f"{name}={shlex.quote(value)} " for name, value in variables(["PYTHONPATH"]).items())
    there = f"cd {shlex.quote(folder)} && exec env {path}{shlex.quote(python)} -u -P -m {AGENT}"
    return [*ssh, "-T", *ALIVE, host, there]


def reason_of(words: Sequence[str], status: int | None) -> tuple[str, str]:
    """Return why a connection failed, and what to do.

    Args:
        words: the lines of ssh on standard error.
        status: its exit status.
    """
    text = "\n".join(words)
    for mark, fact, do in KNOWN:
        if mark in text:
            return fact, do
    if status == 127 or "not found" in text or "No such file" in text:
        fact = words[-1] if words else "The shell there finds no Python."
        return f"{fact.rstrip('.')}.", "install the same environment there, at the same path"
    fact = words[-1].rstrip(".") if words else f"ssh ended with status {status} and no message"
    return f"{fact}.", "look at the log of sshd there"


KNOWN = (
    (
        "Could not resolve hostname",
        "The name does not resolve.",
        "check the spelling, or add the host to ~/.ssh/config",
    ),
    (
        "Host key verification failed",
        "ssh does not know or does not accept its host key.",
        "ssh-keyscan HOST >> ~/.ssh/known_hosts, after a check",
    ),
    ("Permission denied", "It accepts no key of this user.", "ssh-copy-id HOST, or start ssh-agent"),
    ("Connection refused", "No ssh server listens there.", "start sshd there, or name its port in ~/.ssh/config"),
    ("Connection timed out", "It does not answer.", "check that it is on, and that no firewall is in between"),
    ("No route to host", "There is no route to it.", "check its address and the network"),
    ("No module named", "Its Python has no Unisono.", "install the same environment there, at the same path"),
)
