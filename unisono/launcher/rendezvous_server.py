"""The rendezvous server: a small child of the launcher, so that it outlives every process of the run. No torch.

    python -u -P -m unisono.launcher.rendezvous_server LISTENER SIZE MINIMUM SILENCE_SECONDS

Each process holds two connections to a Unix socket in the launcher's private folder. No other user can reach that, and
it needs no port. LISTENER is the descriptor of the socket. One connection serves keys and values, like any store of
torch. The other one represents the life of the process:

    process 0   "ready" -----> .                   .-----> "roster [0, 1, 3], generation 2"
    process 1   "ready" -----> .    rendezvous     .-----> the same
    process 2   (connection ends: dead)  server    |
    process 3   "ready" -----> .                   '-----> the same
                                '--- to the launcher: lost processes, new groups, the step

When a connection ends, or a process has sent nothing for too long, the server notifies all others at once. Each of them
leaves its group and reports that it is ready. When all remaining processes are ready, they get the new roster. The
server decides alone and in one thread, so all processes get the same answer, whichever others die meanwhile. A process
that joins waits until all members admit it, at the end of a step.

If several processes share a model they are a unit (parallel.shard). A death removes the whole unit, whose other
processes the launcher kills. A new unit is admitted when all of its slots are taken.

Every message is a line of JSON; bytes are sent as latin-1.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

POLL_SECONDS = 0.5
"""Seconds between two checks for silent processes."""

Notify = Callable[[dict[str, Any]], None]


class Connection:
    """A connection of a process.

    Attributes:
        socket: the connection.
        number: the number of the process whose life it represents; None for a connection that serves keys only.
        joins: whether the process has not been admitted to a group yet.
        slot: its rank at its start, which determines its place in its unit.
        ready: the message with which it reported that it is ready for a new group.
        active_at: the time of its last message.
        wait: a pending wait: for these keys, in this generation, until this time.
        received: for each prefix in `addresses`, how many of its keys have been sent with the answers to waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.number: int | None = None
        self.joins = False
        self.slot = 0
        self.ready: dict[str, Any] | None = None
        self.active_at = time.monotonic()
        self.wait: tuple[list[str], int, float] | None = None
        self.received: dict[str, int] = {}
        self._rest = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, or None if the connection has ended."""
        try:
            data = self.socket.recv(1 << 16)
        except (ConnectionError, TimeoutError):
            return None
        if not data:
            return None
        self.active_at = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, **message: Any) -> None:
        """Send a message. Errors are ignored: a dead process needs none, and a short line never fills the pipe."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")


class KeyStore:
    """The keys and values of the processes.

    Args:
        is_in_vain: returns whether a wait of a process of this generation is in vain.
    """

    def __init__(self, is_in_vain: Callable[[int], bool]) -> None:
        self.values: dict[str, str] = {}
        self._is_in_vain = is_in_vain
        self._addresses: dict[str, list[str]] = {}
        """gloo's keys GROUP//DEVICE//NUMBER/RANK, by what stands before the rank, in the order in which they were set.
        Each has the address of a process, and does not change."""
        self._waiting: set[Connection] = set()

    def forget(self, connection: Connection) -> None:
        """Forget the wait of a connection that has ended."""
        self._waiting.discard(connection)

    def serve(self, connection: Connection, request: dict[str, Any]) -> None:
        """Answer a request, now or when its wait has ended."""
        op, values = request["op"], self.values
        if op == "set":
            prefix, _, number = request["key"].rpartition("/")
            if number.isdecimal() and prefix.count("//") > 1 and request["key"] not in values:
                self._addresses.setdefault(prefix, []).append(request["key"])
            values[request["key"]] = request["value"]
            connection.send(value=None)
            self.poll_waits()
        elif op == "add":
            values[request["key"]] = str(int(values.get(request["key"], "0")) + request["amount"])
            connection.send(value=int(values[request["key"]]))
            self.poll_waits()
        elif op == "compare_set":
            expected = request["expected"]
            if values.get(request["key"], expected if expected == "" else None) == expected:
                values[request["key"]] = request["value"]
            connection.send(value=values.get(request["key"], expected))
            self.poll_waits()
        elif op == "delete":
            connection.send(value=values.pop(request["key"], None) is not None)
        elif op == "count":
            connection.send(value=len(values))
        elif op == "check":
            connection.send(value=all(key in values for key in request["keys"]))
        elif op == "wait":
            connection.wait = request["keys"], request["generation"], time.monotonic() + request["seconds"]
            self._poll_wait(connection)

    def poll_waits(self) -> None:
        """Answer all waits that have ended."""
        for connection in list(self._waiting):
            self._poll_wait(connection)

    def _poll_wait(self, connection: Connection) -> None:
        """Answer a wait if it has ended: with values, with False if it is in vain, with None after its time limit."""
        assert connection.wait is not None
        keys, generation, deadline = connection.wait
        if all(key in self.values for key in keys):
            connection.send(value={key: self.values[key] for key in [*self._beside(connection, keys), *keys]})
        elif self._is_in_vain(generation):
            connection.send(value=False)  # the process that would set it has left the generation, or is lost
        elif time.monotonic() > deadline:
            connection.send(value=None)
        else:
            self._waiting.add(connection)
            return
        connection.wait = None
        self._waiting.discard(connection)

    def _beside(self, connection: Connection, keys: Sequence[str]) -> list[str]:
        """Return gloo's keys beside `keys` that were set since the last answer to this connection.

        gloo asks for the addresses of all peers, one at a time.
        """
        found: list[str] = []
        for prefix in {key.rpartition("/")[0] for key in keys} & self._addresses.keys():
            beside = self._addresses[prefix]
            found += [key for key in beside[connection.received.get(prefix, 0) :] if key in self.values]
            connection.received[prefix] = len(beside)
        return found


class RendezvousServer:
    """The server of one run.

    Args:
        listener: the socket at which processes connect.
        size: number of processes that start together, with the numbers 0 to size - 1.
        silence: seconds after which a process that sends nothing counts as dead.
        notify: called with every event for the launcher.
        minimum: number of processes that must remain for training to continue.
    """

    def __init__(self, listener: socket.socket, size: int, *, silence: float, notify: Notify, minimum: int = 1) -> None:
        self.silence, self.notify, self.minimum = silence, notify, minimum
        self.roster = list(range(size))
        self.unit = 1
        """Number of consecutive processes in the roster that share a model."""
        self.generation = 0
        self.lost: list[int] = []  # since the current generation began
        self.keys = KeyStore(lambda of: of < self.generation or (bool(self.lost) and of == self.generation))
        self.connections: dict[socket.socket, Connection] = {}
        self.members: dict[int, Connection] = {}
        self.leaving: list[Connection] = []  # processes that are done and wait for the others
        self.closed = False
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self, until: int | None = None) -> None:
        """Serve until the file descriptor `until` ends or `close` is called."""
        if until is not None:
            self._selector.register(until, selectors.EVENT_READ)
        while not self.closed:
            for key, _ in self._selector.select(POLL_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == until:
                    if not os.read(key.fd, 4096):
                        self.closed = True
                elif key.fileobj in self.connections:  # it may have been dropped in this iteration
                    self._serve_connection(self.connections[key.fileobj])
            self._check_heartbeats()
            self.keys.poll_waits()
        for connection in list(self.connections.values()):
            connection.socket.close()
        self._listener.close()
        self._selector.close()

    def close(self) -> None:
        """Stop serving within POLL_SECONDS. Called from another thread."""
        self.closed = True

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        accepted.settimeout(5.0)
        self.connections[accepted] = Connection(accepted)
        self._selector.register(accepted, selectors.EVENT_READ)

    def _serve_connection(self, connection: Connection) -> None:
        messages = connection.receive()
        for message in messages or []:
            self._on_message(connection, message)
        if messages is None:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection. If it represented the life of a member, notify all others of the loss."""
        if self.connections.pop(connection.socket, None) is None:
            return
        self.keys.forget(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        number = connection.number
        if number is None or self.members.get(number) is not connection:
            return
        del self.members[number]
        if number in self.roster:
            first = self.roster.index(number) // self.unit * self.unit
            orphans = [other for other in self.roster[first : first + self.unit] if other != number]
            self.lost += [number, *orphans]
            self.roster = [other for other in self.roster if other not in self.lost]
            for other in self.members.values():
                other.send(lost=number)
            self.keys.poll_waits()
            for orphan in orphans if self.roster else ():
                self.notify({"orphan": orphan, "lost": number})
        self._regroup()

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        for number, connection in list(self.members.items()):
            if now - connection.active_at > self.silence:
                self.notify({"silent": number})
                self._drop(connection)

    def _on_message(self, connection: Connection, message: dict[str, Any]) -> None:
        if "register" in message:
            connection.number, connection.joins = message["register"], message["joins"]
            connection.slot = message["slot"]
            self.members[message["register"]] = connection
        elif "ready" in message:
            connection.ready = message
            if connection.joins:
                self._request_join()
            self._regroup()
        elif "unit" in message:
            self.unit = message["unit"]
        elif "stuck" in message:  # reported by the process itself (distributed/membership/regroup_timeout.py)
            self.notify({"silent": connection.number, "why": message["stuck"]})
            self._drop(connection)
        elif "report" in message:
            self.notify(message["report"])
        elif "leave" in message:
            self._release(connection)
        elif "op" in message:
            self.keys.serve(connection, message)

    def _release(self, connection: Connection) -> None:
        """Remove a member that has reached its regular end."""
        assert connection.number is not None
        if self.members.get(connection.number) is connection:
            del self.members[connection.number]
        if connection.number in self.roster:
            self.roster.remove(connection.number)
        connection.number = None
        self.leaving.append(connection)
        self._regroup()

    # -- groups

    def _regroup(self) -> None:
        """Begin a new generation if all remaining members are ready for one."""
        if self.generation == 0 and self.lost:
            self._refuse(f"process {self.lost[0]} died before all processes had started")
            return
        if self.lost and len(self.roster) + len(self.leaving) < self.minimum:
            self._refuse(f"the run needs {self.minimum} processes and has {len(self.roster)}")
            return
        if not self.roster:
            self._refuse("all processes that had the run's state are gone")
            for connection in self.leaving:
                connection.send(released=True)
            return
        ready = [self.members[number] for number in self.roster if number in self.members]
        if len(ready) < len(self.roster) or not all(connection.ready for connection in ready):
            return
        joined = []
        if all(connection.ready and connection.ready["admit"] for connection in ready):
            joined = self._joining_units()
        self.generation += 1
        self.roster += joined
        lost, self.lost = self.lost, []
        formed = {"roster": self.roster, "generation": self.generation, "joined": joined, "lost": lost}
        facts = [connection.ready["ready"] for connection in ready if connection.ready]
        for number in self.roster:
            connection = self.members[number]
            connection.ready, connection.joins = None, False
            connection.send(**formed)
        self._request_join()
        self.notify({"formed": formed, "facts": facts})

    def _joining_units(self) -> list[int]:
        """Return the processes that can join: complete units, each in the order of its slots."""
        waiting = [n for n, connection in sorted(self.members.items()) if connection.joins and connection.ready]
        slots = ([n for n in waiting if self.members[n].slot % self.unit == slot] for slot in range(self.unit))
        return [number for unit in zip(*slots, strict=False) for number in unit]

    def _request_join(self) -> None:
        """Notify the members if a unit waits to join."""
        for number in self.roster if self._joining_units() else ():
            if number in self.members:
                self.members[number].send(join_request=1)

    def _refuse(self, reason: str) -> None:
        for connection in self.members.values():
            if connection.ready:
                connection.ready = None
                connection.send(refused=reason)
                self.notify({"refused": reason, "process": connection.number})


def main() -> None:
    """Serve as a child of the launcher: print events on standard output, and end when standard input ends."""
    listener, size, minimum, silence = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two connections a process; many shells allow 1024 files

    def notify(event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(event).encode() + b"\n")

    opened = socket.socket(fileno=int(listener))
    RendezvousServer(opened, int(size), minimum=int(minimum), silence=float(silence), notify=notify).serve(until=0)


if __name__ == "__main__":
    main()
