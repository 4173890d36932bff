"""Where the processes of a run meet: a small child of the launcher, so that it outlives every one of them. No torch.

    python -u -P -m unisono.launcher.rendezvous_server DOOR SIZE MINIMUM SILENCE_SECONDS

Each process holds two connections to a Unix socket in the launcher's private folder (nobody else can reach it, and no
port is taken); DOOR is that socket's descriptor. Over one it asks for keys and values, as of any store of torch's. The
other is its life:

    process 0   "ready" -----> .                   .-----> "roster [0, 1, 3], generation 2"
    process 1   "ready" -----> .    the meeting    .-----> the same
    process 2   (connection ends: dead)  place     |
    process 3   "ready" -----> .                   '-----> the same
                                '--- to the launcher: who is lost, who goes on, since which step

When a connection ends, or a process has not said a word for too long, all others hear of it at once. Each then leaves
the group of old and says that it is ready; and when all who are left have said so, they are told who they are. This
place decides alone and in one thread, so everybody hears the same, whoever else dies meanwhile. A process that comes in
addition waits until all the others say that they are open for it, at a step's end.

Where several processes hold a model together they are a unit (parallel.shard): whoever dies takes the others of his
unit out as well, whom the launcher ends, and units come in when all of their seats are taken.

Everything that is said is a line of JSON; bytes travel as latin-1.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.5
"""Between two looks for silent processes."""

Tell = Callable[[dict[str, Any]], None]


class Connection:
    """One connection. `number`: the process whose life it is; None: it is there for keys only."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.number: int | None = None
        self.joins = False
        self.seat = 0  # where it sits among those of its unit
        self.ready: dict[str, Any] | None = None
        self.heard_at = time.monotonic()
        self.waits: tuple[list[str], int, float] | None = None  # for these keys, in this generation, until then
        self._rest = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """What was said since; None: the connection has ended."""
        try:
            data = self.line.recv(1 << 16)
        except (ConnectionError, TimeoutError):
            return None
        if not data:
            return None
        self.heard_at = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, **words: Any) -> None:
        """To a process that is gone nothing needs to be said; and none is so busy that a short line fills its pipe."""
        with contextlib.suppress(OSError):
            self.line.sendall(json.dumps(words).encode() + b"\n")


class RendezvousServer:
    """door      the socket at which processes arrive
    size      processes that begin together, with the numbers 0 to size - 1
    minimum   of them that must be left for the others to go on, when one dies
    silence   seconds after which a process that says nothing counts as dead
    tell      who wants to know what happens here
    """

    def __init__(self, door: socket.socket, size: int, *, silence: float, tell: Tell, minimum: int = 1) -> None:
        self.silence, self.tell, self.minimum = silence, tell, minimum
        self.roster = list(range(size))
        self.unit = 1
        """So many neighbours in the roster hold a model together: the first of its ranks, then the others."""
        self.generation = 0
        self.lost: list[int] = []  # since the last generation began
        self.values: dict[str, str] = {}
        self.callers: dict[socket.socket, Connection] = {}
        self.members: dict[int, Connection] = {}
        self.leaving: list[Connection] = []  # who are done, and wait for the others
        self.closed = False
        self._door = door
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)

    def serve(self, until: int | None = None) -> None:
        """Until the file descriptor `until` ends, or somebody calls `close`."""
        if until is not None:
            self._selector.register(until, selectors.EVENT_READ)
        while not self.closed:
            for key, _ in self._selector.select(LOOK_SECONDS):
                if key.fileobj is self._door:
                    self._greet()
                elif key.fileobj == until:
                    if not os.read(key.fd, 4096):
                        self.closed = True
                elif key.fileobj in self.callers:  # it may have been let go in this very round
                    self._serve_connection(self.callers[key.fileobj])
            self._check_heartbeats()
            self._poll_waits()
        for caller in list(self.callers.values()):
            caller.line.close()
        self._door.close()
        self._selector.close()

    def close(self) -> None:
        """From another thread: end within a moment."""
        self.closed = True

    def _greet(self) -> None:
        line, _ = self._door.accept()
        line.settimeout(5.0)
        self.callers[line] = Connection(line)
        self._selector.register(line, selectors.EVENT_READ)

    def _serve_connection(self, caller: Connection) -> None:
        said = caller.receive()
        for words in said or []:
            self._answer(caller, words)
        if said is None:
            self._drop(caller)

    def _drop(self, caller: Connection) -> None:
        """A connection has ended. If it was somebody's life, all others hear of it."""
        if self.callers.pop(caller.line, None) is None:
            return
        self._selector.unregister(caller.line)
        caller.line.close()
        number = caller.number
        if number is None or self.members.get(number) is not caller:
            return
        del self.members[number]
        if number in self.roster:
            first = self.roster.index(number) // self.unit * self.unit
            orphans = [other for other in self.roster[first : first + self.unit] if other != number]
            self.lost += [number, *orphans]
            self.roster = [other for other in self.roster if other not in self.lost]
            for other in self.members.values():
                other.send(lost=number)
            self._poll_waits()
            for orphan in orphans if self.roster else ():
                self.tell({"orphan": orphan, "lost": number})
        self._regroup()

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        for number, caller in list(self.members.items()):
            if now - caller.heard_at > self.silence:
                self.tell({"silent": number})
                self._drop(caller)

    def _answer(self, caller: Connection, words: dict[str, Any]) -> None:
        """One line that was said."""
        if "hello" in words:
            caller.number, caller.joins, caller.seat = words["hello"], words["joins"], words["seat"]
            self.members[words["hello"]] = caller
        elif "ready" in words:
            caller.ready = words
            if caller.joins:
                self._request_join()
            self._regroup()
        elif "unit" in words:
            self.unit = words["unit"]
        elif (
            "stuck" in words
        ):  # by its own word (distributed/membership/regroup_timeout.py): nobody waits for it any more
            self.tell({"silent": caller.number, "why": words["stuck"]})
            self._drop(caller)
        elif "told" in words:
            self.tell(words["told"])
        elif "bye" in words:
            self._release(caller)
        elif "do" in words:
            self._serve_keys(caller, words)

    def _release(self, caller: Connection) -> None:
        """It has come to its end in peace, and all the others with it."""
        assert caller.number is not None
        if self.members.get(caller.number) is caller:
            del self.members[caller.number]
        if caller.number in self.roster:
            self.roster.remove(caller.number)
        caller.number = None
        self.leaving.append(caller)
        self._regroup()

    # -- who is there

    def _regroup(self) -> None:
        """A new generation, if all who are left are ready for one."""
        if self.generation == 0 and self.lost:
            self._refuse(f"process {self.lost[0]} was gone before all had met")
            return
        if self.lost and len(self.roster) + len(self.leaving) < self.minimum:
            self._refuse(f"the run needs {self.minimum} processes, and has {len(self.roster)}")
            return
        if not self.roster:
            self._refuse("all who knew the run's state are gone")
            for caller in self.leaving:
                caller.send(over=True)
            return
        ready = [self.members[number] for number in self.roster if number in self.members]
        if len(ready) < len(self.roster) or not all(caller.ready for caller in ready):
            return
        new = []
        if all(caller.ready and caller.ready["open"] for caller in ready):
            new = self._newcomers()
        self.generation += 1
        self.roster += new
        lost, self.lost = self.lost, []
        formed = {"roster": self.roster, "generation": self.generation, "joined": new, "lost": lost}
        about = [caller.ready["ready"] for caller in ready if caller.ready]
        for number in self.roster:
            caller = self.members[number]
            caller.ready, caller.joins = None, False
            caller.send(**formed)
        self._request_join()
        self.tell({"formed": formed, "about": about})

    def _newcomers(self) -> list[int]:
        """Who wants to join, and may: whole units of them, each in the order of its seats."""
        waiting = [n for n, caller in sorted(self.members.items()) if caller.joins and caller.ready]
        seats = ([n for n in waiting if self.members[n].seat % self.unit == seat] for seat in range(self.unit))
        return [number for unit in zip(*seats, strict=False) for number in unit]

    def _request_join(self) -> None:
        """Those who are there hear that somebody wants to join them."""
        for number in self.roster if self._newcomers() else ():
            if number in self.members:
                self.members[number].send(knock=1)

    def _refuse(self, why: str) -> None:
        for caller in self.members.values():
            if caller.ready:
                caller.ready = None
                caller.send(refused=why)

    # -- keys and values

    def _serve_keys(self, caller: Connection, words: dict[str, Any]) -> None:
        do, values = words["do"], self.values
        if do == "set":
            values[words["key"]] = words["value"]
            caller.send(value=None)
            self._poll_waits()
        elif do == "get":
            caller.send(value=values.get(words["key"]))
        elif do == "add":
            values[words["key"]] = str(int(values.get(words["key"], "0")) + words["by"])
            caller.send(value=int(values[words["key"]]))
            self._poll_waits()
        elif do == "compare":
            if values.get(words["key"], words["old"] if words["old"] == "" else None) == words["old"]:
                values[words["key"]] = words["value"]
            caller.send(value=values.get(words["key"], words["old"]))
            self._poll_waits()
        elif do == "delete":
            caller.send(value=values.pop(words["key"], None) is not None)
        elif do == "count":
            caller.send(value=len(values))
        elif do == "check":
            caller.send(value=all(key in values for key in words["keys"]))
        elif do == "wait":
            caller.waits = words["keys"], words["generation"], time.monotonic() + words["seconds"]
            self._poll_waits()

    def _poll_waits(self) -> None:
        for caller in list(self.callers.values()):
            if caller.waits is None:
                continue
            keys, generation, deadline = caller.waits
            if all(key in self.values for key in keys):
                caller.waits = None
                caller.send(value=True)
            elif generation < self.generation or (self.lost and generation == self.generation):
                caller.waits = None
                caller.send(value=False)  # whoever was to set it has left that generation, or the world
            elif time.monotonic() > deadline:
                caller.waits = None
                caller.send(value=None)


def main() -> None:
    """As a child of the launcher, which hears what happens on standard output. When standard input ends, so do we."""
    door, size, minimum, silence = sys.argv[1:]

    def tell(what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(what).encode() + b"\n")

    there = socket.socket(fileno=int(door))
    RendezvousServer(there, int(size), minimum=int(minimum), silence=float(silence), tell=tell).serve(until=0)


if __name__ == "__main__":
    main()
