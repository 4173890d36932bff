"""The agent on another host: it starts the processes of a run there, for the launcher at the other end of a connection.

    launcher ══ ssh, one connection ══▶ agent ──▶ process 2 ──stdout+stderr──▶ agent ══▶ launcher ──▶ log/rank-2.log
                                          ├────▶ process 3
                                          └─ a Unix socket: the processes' connections to the rendezvous server of the
                                             launcher, which travel over the same connection

Everything between launcher and processes passes through the agent: output, signals, exit statuses, the files beside a
failure record, and the connections to the rendezvous server. So a host needs no open port for them.

When the connection ends, or the launcher is silent for SILENCE_SECONDS, the agent kills its processes and ends. So no
process outlives the launcher, and none computes behind a network that is cut. The agents also report which hosts do not
reach each other (signs_of_life.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from unisono.environment import inherited
from unisono.launcher.elastic_policy import socket_folder
from unisono.launcher.hosts.host_facts import facts_of, reached_at
from unisono.launcher.hosts.message_stream import CHUNK, Message, MessageStream
from unisono.launcher.hosts.network.link_probe import ProbeService
from unisono.launcher.hosts.network.signs_of_life import ALIVE_SECONDS, SILENCE_SECONDS, signs_at

POLL_SECONDS = 0.05
"""Seconds between two checks for files and ended processes."""

SUFFIXES = (".json", ".ended", ".replaceable", ".hands-off", ".spare")
"""Files of a process that the launcher reads (failure_record.py)."""


class AgentProcess:
    """A process that the agent has started.

    Args:
        number: its number in the run.
        order: the message of the launcher that starts it.
        folder: the agent's private folder.
    """

    def __init__(self, number: int, order: dict[str, Any], folder: Path) -> None:
        self.number = number
        self.record = folder / f"rank-{number}.json"
        self._sent: set[str] = set()
        text = json.dumps(
            {
                "world": {**order["world"], "store": f"unix://{folder}/store"},
                "record": str(self.record),
                "log": order["log"],
                "seconds": 0,
                "launcher": os.getpid(),
            }
        )
        self.popen = subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "unisono.launcher.worker_main", text, *order["command"]],
            env=inherited(order["environment"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        self.output = self.popen.stdout.fileno()
        os.set_blocking(self.output, False)

    def signal(self, number: int, *, group: bool) -> None:
        """Send a signal to the process, or to all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self.popen.pid, number)

    def read(self) -> bytes | None:
        """Return output that has arrived; b"" if there is none, None at its end."""
        try:
            return os.read(self.output, CHUNK) or None
        except BlockingIOError:
            return b""

    def new_files(self) -> dict[str, bytes]:
        """Return the files beside the failure record that are new, by their suffix."""
        found = {}
        for suffix in SUFFIXES:
            if suffix not in self._sent and (path := self.record.with_suffix(suffix)).exists():
                self._sent.add(suffix)
                found[suffix] = path.read_bytes()
        return found

    def has_ended(self) -> bool:
        """Return whether it has ended, without reaping it."""
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class AgentEnd(NamedTuple):
    """How the work of an agent has ended.

    Attributes:
        status: the exit status of the run, negative if it starts again; None: the launcher is gone.
        why: why the launcher has ended this host alone; "" if it has not.
    """

    status: int | None = None
    why: str = ""


class HostAgent:
    """The agent of a run on this host.

    Args:
        stream: the connection to the launcher.
        folder: a private folder.
        reached_at: the addresses of the launcher and of this host that the connection uses; None: not known.

    Attributes:
        was_asked: whether the launcher has asked for the facts of this host, its first request.
    """

    def __init__(self, stream: MessageStream, folder: Path, *, reached_at: tuple[str, str] | None) -> None:
        self.stream, self.folder, self._reached_at = stream, folder, reached_at
        self.was_asked = False
        self._end: AgentEnd | None = None  # None: it serves
        self._signs = signs_at(reached_at[1]) if reached_at is not None else None
        self.processes: dict[int, AgentProcess] = {}
        self._connections: dict[int, socket.socket] = {}  # to the rendezvous server
        self._count = 0
        self._probes = ProbeService(_say)
        self._heard = self._said = time.monotonic()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / "store"))
        self._listener.listen(1024)
        self._selector = selectors.DefaultSelector()
        self._selector.register(stream.reader, selectors.EVENT_READ, self._receive)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> AgentEnd:
        """Serve until the launcher ends the run or is gone."""
        try:
            while self._end is None:
                for key, _ in self._selector.select(POLL_SECONDS):
                    key.data()
                self._check()
        except OSError:
            pass  # the connection has ended
        finally:
            for process in self.processes.values():
                process.signal(signal.SIGKILL, group=True)
            for process in self.processes.values():
                process.popen.wait()
            self._close()
        return self._end or AgentEnd()

    def _close(self) -> None:
        self._probes.close()
        self._selector.close()
        for each in (self._listener, *self._connections.values()):
            each.close()
        if self._signs is not None:
            self._signs.close()

    def _check(self) -> None:
        """Report files and ended processes, and end when the launcher is silent."""
        now = time.monotonic()
        if self._signs is not None:
            self._signs.exchange(now)
        for process in list(self.processes.values()):
            ended = process.has_ended()
            for suffix, content in process.new_files().items():
                self.stream.send(content, file=process.number, suffix=suffix)
            if ended:
                self._report_end(process)
        if now - self._said > ALIVE_SECONDS:
            self._said = now
            self.stream.send(alive=True, silences=self._signs.silences(now) if self._signs else {})
        if now - self._heard > SILENCE_SECONDS:
            self._end = self._end or AgentEnd()

    # -- the launcher

    def _receive(self) -> None:
        messages = self.stream.receive()
        self._heard = time.monotonic()
        for message in messages or []:
            self._on_message(message)
        if messages is None:
            self._end = self._end or AgentEnd()

    def _on_message(self, message: Message) -> None:
        values, data = message
        if "describe" in values:
            self.was_asked = True
            signs = (self._reached_at[1], self._signs.port) if self._reached_at and self._signs else None
            about = {"reached_at": self._reached_at, "signs_at": signs}
            self.stream.send(facts={**facts_of(**values["describe"]), **about})
        elif "start" in values:
            self._start(values["start"], values)
        elif "signal" in values:
            process = self.processes.get(values["process"])
            if process is not None:
                process.signal(values["signal"], group=values["group"])
        elif "store" in values:
            self._reply(values["store"], data)
        elif "clock" in values:  # at once, because the delay counts as an error
            self.stream.send(answer=values["ask"], **self._probes.answer(values))
        elif "ask" in values:
            threading.Thread(target=self._answer, args=(values,), name="probe", daemon=True).start()
        elif "watch" in values and self._signs is not None:
            self._signs.watch(values["own"], values["token"], values["watch"])
        elif "end" in values:
            self._end = AgentEnd(values["end"], values.get("why", ""))

    def _answer(self, question: dict[str, Any]) -> None:
        """Answer a question that may take seconds."""
        answer = self._probes.answer(question)
        with contextlib.suppress(OSError):  # the connection has ended
            self.stream.send(answer=question["ask"], **answer)

    # -- processes

    def _start(self, number: int, order: dict[str, Any]) -> None:
        try:
            process = AgentProcess(number, order, self.folder)
        except OSError as error:
            self.stream.send(f"The system refused: {error.strerror}.\n".encode(), output=number)
            self.stream.send(ended=number, code=1)
            return
        self.processes[number] = process
        self._selector.register(process.output, selectors.EVENT_READ, lambda: self._forward(process))

    def _forward(self, process: AgentProcess) -> bool:
        """Send output of a process to the launcher. Return whether there was any."""
        data = process.read()
        if data is None:
            self._selector.unregister(process.output)
        elif data:
            self.stream.send(data, output=process.number)
        return bool(data)

    def _report_end(self, process: AgentProcess) -> None:
        """Report the end of a process, after the rest of its output. What it has started ends, too."""
        process.signal(signal.SIGKILL, group=True)
        code = process.popen.wait()
        del self.processes[process.number]
        if process.output in self._selector.get_map():
            while self._forward(process):
                pass
            if process.output in self._selector.get_map():
                self._selector.unregister(process.output)
        assert process.popen.stdin is not None
        assert process.popen.stdout is not None
        process.popen.stdin.close()
        process.popen.stdout.close()
        self.stream.send(ended=process.number, code=code)

    # -- the rendezvous server

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._count += 1
        number = self._count
        self._connections[number] = connection
        self.stream.send(store=number, opened=True)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._request(number))

    def _request(self, number: int) -> None:
        """Send what a process has sent to the rendezvous server, or that its connection has ended."""
        connection = self._connections.get(number)
        if connection is None:  # the launcher has ended it in the same turn
            return
        try:
            data = connection.recv(CHUNK)
        except OSError:
            data = b""
        self.stream.send(data, store=number)
        if not data:
            self._drop(number)

    def _reply(self, number: int, data: bytes) -> None:
        """Pass on what the rendezvous server has sent; no data: it has ended the connection."""
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            if data:
                connection.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(number)

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._selector.unregister(connection)
        connection.close()


def _say(text: str) -> None:
    """Print a line on standard error, which may be closed."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Serve the launcher at the other end of standard input and output."""
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # a stray print is no message
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the connection is noticed, and ends the processes first
    with socket_folder() as folder:
        HostAgent(MessageStream(reader, writer), Path(folder), reached_at=reached_at()).serve()


if __name__ == "__main__":
    main()
