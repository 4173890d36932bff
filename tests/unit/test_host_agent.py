"""The agent on another host: what it does when both ends of a connection act in the same moment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.environment import inherited
from unisono.launcher.hosts.message_stream import MessageStream


class Launcher:
    """The launcher's end of the connection to an agent that it has started."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-P", "-m", "unisono.launcher.hosts.host_agent"]
        environment = inherited({"TMPDIR": str(folder)})
        self.agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.agent.stdin is not None
        assert self.agent.stdout is not None
        self.stream = MessageStream(self.agent.stdout.fileno(), self.agent.stdin.fileno())

    def wait_for(self, key: str) -> dict[str, Any]:
        """Return the next message with this key."""
        while (messages := self.stream.receive()) is not None:
            for message in messages:
                if key in message.values:
                    return message.values
        raise AssertionError(f"The agent has ended with status {self.agent.wait()} before it sent {key!r}")

    def close(self) -> int:
        """End the agent and return its exit status."""
        self.stream.send(end=0)
        status = self.agent.wait(30.0)
        for pipe in (self.agent.stdin, self.agent.stdout):
            assert pipe is not None
            pipe.close()
        return status


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a folder whose path leaves room for that of a socket in it."""
    with tempfile.TemporaryDirectory(prefix="u-") as folder:
        yield Path(folder)


def test_a_process_sends_while_the_launcher_closes_its_connection(short_folder: Path) -> None:
    """The agent stops, and finds both in one turn of its loop."""
    launcher = Launcher(short_folder)
    launcher.stream.send(ask=0, clock=True)
    launcher.wait_for("answer")
    (path,) = short_folder.rglob("store")
    for _ in range(20):  # either may be the first
        process = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        process.connect(str(path))
        number = launcher.wait_for("opened")["store"]
        os.kill(launcher.agent.pid, signal.SIGSTOP)
        os.waitpid(launcher.agent.pid, os.WUNTRACED)
        launcher.stream.send(store=number)
        process.sendall(b"a request")
        time.sleep(0.01)
        os.kill(launcher.agent.pid, signal.SIGCONT)
        launcher.stream.send(ask=0, clock=True)
        launcher.wait_for("answer")
        process.close()
    assert launcher.close() == 0
