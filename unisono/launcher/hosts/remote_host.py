"""A host that the launcher reaches through a connection: its agent, and handles for the processes there."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Protocol

from unisono.launcher.hosts.message_stream import CHUNK, Message, MessageStream
from unisono.launcher.hosts.network.signs_of_life import ALIVE_SECONDS, SILENCE_SECONDS
from unisono.launcher.hosts.network.split_network import HostReport
from unisono.launcher.worker_process import WorkerSpec

END_SECONDS = 5.0
"""Time limit for the end of a connection after the run."""


class Link(Protocol):
    """A connection to an agent: through ssh (ssh.py) or a socket (node_link.py).

    Attributes:
        reader: the descriptor to read from.
        writer: the descriptor to write to.
    """

    reader: int
    writer: int

    def failure(self) -> tuple[str, str]:
        """Return why it has ended before the agent answered, and what to do."""

    def kill(self) -> None:
        """End it at once. A second call has no effect."""

    def close(self) -> None:
        """Wait until it has ended, and release it."""


class SignalReceiver(Protocol):
    """A host to which signals for its processes are sent."""

    name: str

    def send(self, data: bytes = b"", **values: Any) -> None: ...


class RemoteProcess:
    """A process on another host, as the supervisor sees it (worker_process.Handle).

    Its output arrives in a pipe, which ends when the process has ended.

    Args:
        host: its host.
        number: its number in the run.
        record: the failure record, a file of the launcher.
    """

    def __init__(self, host: SignalReceiver, number: int, record: Path) -> None:
        self.host, self.number, self.record = host, number, record
        self.where = f" on {host.name}"
        self.returncode: int | Any = None
        self._code: int | None = None  # reported by the agent
        reader, self._writer = os.pipe()
        self.stdout = os.fdopen(reader, "rb", buffering=0)
        os.set_blocking(reader, False)

    # -- the supervisor

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        return self._code is not None

    def wait(self, seconds: float | None = None) -> int:
        """Set `returncode` and return it.

        Raises:
            TimeoutExpired: the process runs for longer than `seconds`.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while self._code is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired([], seconds or 0.0)
            time.sleep(0.01)
        self.returncode = self._code
        return self._code

    def signal(self, number: int, *, group: bool) -> None:
        """Send a signal to the process, or to all that it has started."""
        if self._code is None:
            self.host.send(signal=number, process=self.number, group=group)

    def close(self) -> None:
        """Close the pipe of its output."""
        self.stdout.close()

    # -- the thread of the host

    def receive(self, data: bytes) -> None:
        """Receive output."""
        with contextlib.suppress(OSError):  # the supervisor has closed the pipe
            view = memoryview(data)
            while view:
                view = view[os.write(self._writer, view) :]

    def receive_file(self, suffix: str, content: bytes) -> None:
        """Receive a file beside the failure record."""
        path = self.record.with_suffix(suffix)
        part = path.with_suffix(".arriving")
        part.write_bytes(content)
        part.replace(path)

    def end(self, code: int) -> None:
        """Note the end of the process."""
        if self._code is None:
            self._code = code
            os.close(self._writer)


class RemoteHost:
    """A host with an agent.

    Args:
        name: the name of the host, as the user gave it.
        link: the connection to its agent.
        rendezvous: the Unix socket of the rendezvous server.
        say: prints a line for the user.

    Attributes:
        lost: why the connection has ended; "" while it has not.
        facts: see host_facts.py; None until they have arrived.
        report: when it was heard, and which hosts it has not heard.
    """

    def __init__(self, name: str, link: Link, rendezvous: Path, say: Callable[[str], None]) -> None:
        self.name, self.lost, self._say = name, "", say
        self.facts: dict[str, Any] | None = None
        self.report = HostReport()
        self.link = link
        self._rendezvous = rendezvous
        self._processes: dict[int, RemoteProcess] = {}
        self._connections: dict[int, socket.socket] = {}
        self._questions: dict[int, Queue[dict[str, Any]]] = {}
        self._ending = False
        self._known = threading.Event()
        self._stream = MessageStream(link.reader, link.writer)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stream.reader, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name=f"host {name}", daemon=True)

    def open(self, **describe: str) -> None:
        """Ask for the facts of the host. They arrive later (`wait_for_facts`)."""
        self._thread.start()
        self.send(describe=describe)

    def wait_for_facts(self, seconds: float) -> dict[str, Any] | None:
        """Return the facts, or None if they do not arrive in time, or the connection has ended."""
        self._known.wait(seconds)
        return self.facts

    def ask(self, seconds: float, **question: Any) -> dict[str, Any]:
        """Ask the agent a question (link_probe.ProbeService), and return its answer, with `error` if there is none."""
        queue: Queue[dict[str, Any]] = Queue()
        number = len(self._questions)
        self._questions[number] = queue
        self.send(ask=number, **question)
        try:
            return {"error": self.lost} if self.lost else queue.get(timeout=seconds)
        except Empty:
            return {"error": self.lost or f"its agent has not answered within {seconds:g} s"}

    def start(self, number: int, world: Mapping[str, Any], spec: WorkerSpec) -> RemoteProcess:
        """Start a process there. `world`: its place in the run."""
        process = RemoteProcess(self, number, spec.record)
        self.adopt(process, self.order_of(world, spec))
        return process

    @staticmethod
    def order_of(world: Mapping[str, Any], spec: WorkerSpec) -> dict[str, Any]:
        """Return the message that starts a process."""
        order: dict[str, Any] = {"world": dict(world), "log": str(spec.log.absolute())}
        return order | {"command": list(spec.command), "environment": dict(spec.environment)}

    def adopt(self, process: RemoteProcess, order: Mapping[str, Any]) -> None:
        """Start a process there that exists here already."""
        process.host, self._processes[process.number] = self, process
        if self.lost:
            process.end(-signal.SIGKILL)
        else:
            self.send(start=process.number, **order)

    def send(self, data: bytes = b"", **values: Any) -> None:
        """Send a message to the agent. An error is ignored: the end of the connection is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self._stream.send(data, **values)

    def lose(self, why: str) -> None:
        """End the agent, and continue without this host."""
        if not self._processes:
            self._say(f"Host {self.name}, a spare one, is lost: {why}.")
        self.lost = self.lost or why  # before its end is noticed
        self.send(end=1, why=why)

    def close(self, status: int) -> None:
        """End the agent, and with it all processes there.

        Args:
            status: the exit status of the run, negative if it starts again.
        """
        self._ending = True
        self.send(end=status)
        self._thread.join(END_SECONDS)  # it reads until the agent ends; closing the link would not wake it
        self.link.close()

    # -- the thread

    def _serve(self) -> None:
        """Pass messages on until the connection ends or is silent."""
        said = time.monotonic()
        try:
            while not self.lost:
                for key, _ in self._selector.select(ALIVE_SECONDS / 2):
                    if key.data is not None:
                        self._reply(key.data)
                        continue
                    self.report.hear(time.monotonic())
                    messages = self._stream.receive()
                    for message in messages or []:
                        self._on_message(message)
                    if messages is None:
                        self.lost = self.lost or "the connection has ended"
                now = time.monotonic()
                if now - said > ALIVE_SECONDS:
                    said = now
                    self.send(alive=True)
                if self.facts is not None and now - self.report.heard > SILENCE_SECONDS:
                    self.lost = self.lost or f"nothing has arrived from it for {SILENCE_SECONDS:g} s"
        except ValueError as error:
            self.lost = f"its shell prints text that is no message: {str(error)[:80]}"
        self._known.set()
        if not self._ending:
            if self._processes:
                self._say(f"Host {self.name} is lost: {self.lost}.")
            self.link.kill()
        for queue in list(self._questions.values()):
            queue.put({"error": self.lost})
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            process.end(-signal.SIGKILL)

    def _on_message(self, message: Message) -> None:
        values, data = message
        if "output" in values:
            self._processes[values["output"]].receive(data)
        elif "file" in values:
            self._processes[values["file"]].receive_file(values["suffix"], data)
        elif "ended" in values:
            self._processes[values["ended"]].end(values["code"])
        elif "store" in values:
            self._request(values["store"], data, opened=values.get("opened", False))
        elif "answer" in values:
            self._questions[values["answer"]].put(values)
        elif "alive" in values:
            self.report.report(values.get("silences", {}), time.monotonic())
        elif "facts" in values:
            self.facts = values["facts"]
            self._known.set()

    # -- the rendezvous server

    def _request(self, number: int, data: bytes, *, opened: bool) -> None:
        """Pass on what a process there sends to the rendezvous server."""
        if opened:
            connection = self._connections[number] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(str(self._rendezvous))
            self._selector.register(connection, selectors.EVENT_READ, number)
            return
        known = self._connections.get(number)
        if known is None:
            return
        if data:
            with contextlib.suppress(OSError):
                known.sendall(data)
        else:
            self._drop(number)

    def _reply(self, number: int) -> None:
        """Pass on what the rendezvous server sends to a process there."""
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            data = connection.recv(CHUNK)
        except OSError:
            data = b""
        self.send(data, store=number)
        if not data:
            self._drop(number)

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._selector.unregister(connection)
        connection.close()
