"""The command that starts an agent on another host, with the system's own ssh: its aliases, keys and known hosts."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence

from unisono.environment import variables

ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""ssh ends 15 s after the other end has stopped answering."""

END_SECONDS = 5.0
"""Time limit for the end of a connection after the run."""

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


class SshLink:
    """The connection to an agent through an ssh client.

    Args:
        command: the command of the client (agent_command).
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._client = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self.reader, self.writer = self._client.stdout.fileno(), self._client.stdin.fileno()
        self._words: list[str] = []  # on standard error
        self._thread = threading.Thread(target=self._read_errors, name="ssh errors", daemon=True)
        self._thread.start()

    def _read_errors(self) -> None:
        assert self._client.stderr is not None
        for line in self._client.stderr:
            self._words.append(line.decode(errors="replace").rstrip())

    def failure(self) -> tuple[str, str]:
        self._thread.join(END_SECONDS)
        return reason_of(self._words, self._client.poll())

    def kill(self) -> None:
        self._client.kill()

    def close(self) -> None:
        assert self._client.stdin is not None
        with contextlib.suppress(OSError):
            self._client.stdin.close()
        try:
            self._client.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._client.kill()
            self._client.wait()
        self._thread.join(END_SECONDS)
        for stream in (self._client.stdout, self._client.stderr):
            if stream is not None:
                stream.close()


def reason_of(words: Sequence[str], status: int | None) -> tuple[str, str]:
    """Return why a connection failed, and what to do.

    Args:
        words: the lines of ssh on standard error.
        status: its exit status.
    """
    text = "\n".join(words)
    if re.search(r"\bcd: ", text):
        fact = "The working folder does not exist there."
        return fact, "type the command in a folder that all hosts have, such as one on a shared file system"
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
