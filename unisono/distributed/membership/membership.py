"""Who is alive: processes notice a death, agree on who is left, and form a new group, without being started again.

    process 0   all-reduce ......x torn   leaves    "ready"  -->  roster [0, 2]   rank 0 of 2   goes on
    process 1   all-reduce, killed
    process 2   computes ................x torn     "ready"  -->  roster [0, 2]   rank 1 of 2   goes on

The meeting place (launcher/rendezvous_server.py) sees a process's connection end and tells all others, within
milliseconds. It needs telling: with gloo only who waits for the dead process itself sees an error, and who waits for
somebody who waits for that one waits on; and gloo's own abort does not wake a collective that waits (measured; torch
2.13). So a thread listens in every process, and at bad news shuts down the sockets of its own group (shutdown(2)):
whatever waits there fails at once. They are shut for reading only. gloo then closes them by itself, a moment later,
when its own thread sees their end; and who sends something in that moment has sent it, to nobody. Were they shut for
writing as well, that message would fail, be kept for later, and be forgotten when the connection is closed: of what is
half on its way gloo tells nobody (pair.cc, signalException), and who waits for it waits for the half hour that a
collective has. So hung 25 of 40 messages sent just after the shutdown, and none of 40 with reading shut only.

What can still hang so is a message to the dead process itself, in the moment before gloo sees its end, and a large one
that is half on its way: nobody waits for these in a thread that is needed (waiting.py). And nobody knows all that can
go wrong in compiled code. So leaving and connecting have a limit (regroup_timeout.py): a process that stands still is
taken for dead, and the others go on without it.

An accelerator's back end has no sockets that could be shut, and needs none: who waits for it looks at the news by
himself (waiting.py), and what is left on the device is aborted when the group is left.

Ranks are given in the order of age: who began first is first. So a death moves the ranks behind it forward, the main
process is always one of those that have been there longest, and a process that joins comes last. A process's number is
its own for good: who replaces process 2 of four is process 4.

Where several processes share a model (parallel.shard), these are a unit: a death takes the whole of it out, and as many
processes come in its place. The lines of the mesh are made anew with the group.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from unisono.distributed.membership.regroup_timeout import FORM_SECONDS, RegroupTimeout
from unisono.distributed.membership.waiting import TIMEOUT, SendThread
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.rendezvous.connect import connect, first_timeout, leave_group
from unisono.distributed.rendezvous.store import RendezvousStore
from unisono.distributed.shared_memory import find_neighbours
from unisono.environment import World
from unisono.errors import PeerLostError, RunStopped, WorldError, is_connection_error

SCHEME = "unix://"
"""What the address of a meeting place begins with."""

BEAT_SECONDS = 1.0
"""Between two signs of life."""

CONFIRM_SECONDS = 5.0
"""A connection that breaks is a death if the meeting place says so within this time; else it is an error."""

LEAVE_SECONDS = 300.0
"""Once a process is done, the others are not far."""


class RegroupResult(NamedTuple):
    """A new group is there: the numbers of its processes in the order of their ranks; of those that are new in it, and
    of those that are no more."""

    roster: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]


class Membership:
    """This process among the others.

    backend  torch's, of our groups
    late     does its waiting end before the result is there, and whoever has died? (NCCL)
    knocks   does somebody want to join?
    """

    def __init__(self, world: World, backend: str = "gloo") -> None:
        assert world.store is not None
        path = world.store.removeprefix(SCHEME)
        self.number = world.rank if world.number is None else world.number
        self.joins = world.joins
        self.knocks = False
        self.watchful = False  # is there somebody here who goes on when another one dies?
        self.backend, self.late = backend, backend != "gloo"
        self.torn = False  # has something failed that the group's next meeting is to make again?
        self.lines: Callable[[], None] = lambda: None  # makes the other groups anew, those of the mesh's lines
        self.generation = 0
        self.keys = RendezvousStore(path, TIMEOUT)
        self._lost = threading.Event()
        self._formed: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sockets: set[str] = set()  # of the groups that we are in
        self.messenger: SendThread | None = None  # who waits for what we send
        self._before: Collection[str] | None = None  # what was there before
        self._mutex = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(path)
        self._left, self._over = threading.Event(), threading.Event()
        self._standing = RegroupTimeout(
            lambda: self.keys.asked,
            lambda: self.keys.waits,
            lambda: self.watchful and self._lost.is_set(),
            anywhere=self.late,
        )
        self._speaking = threading.Lock()
        self._send(hello=self.number, joins=self.joins, seat=world.rank)
        for target in (self._listen, self._beat):
            threading.Thread(target=target, name="company", daemon=True).start()
        os.register_at_fork(after_in_child=self._part_from_parent)

    @property
    def is_joining(self) -> bool:
        """Is this process to join others, and in no group with them yet (fake_group.py)?"""
        return self.joins and not self.generation

    # -- what others do

    def _listen(self) -> None:
        rest = b""
        while True:
            try:
                data = self._line.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._over.set()
                self._formed.put({"refused": "the meeting place of the run is gone"})
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._on_message(json.loads(line))

    def _on_message(self, words: dict[str, Any]) -> None:
        if "lost" in words and "roster" not in words:
            self._lost.set()
            if self.watchful:
                self._abort_sockets()
            if self.messenger is not None:
                self.messenger.heard()
        elif "knock" in words:
            self.knocks = True
        elif "roster" in words:
            self.knocks = False
            self._lost.clear()
            self._formed.put(words)
        elif "refused" in words:
            self._formed.put(words)
        elif "over" in words:
            self._over.set()

    def _abort_sockets(self) -> None:
        """Nothing comes through our group's sockets any more: who waits for it fails."""
        if self.late:
            return
        with self._mutex:
            for name, descriptor in _sockets().items():
                if name not in self._sockets:
                    continue
                try:
                    end = socket.socket(fileno=os.dup(descriptor))
                except OSError:
                    continue
                with end, contextlib.suppress(OSError):  # it may be closed at the other end
                    end.getpeername()  # one that listens has none, and gloo aborts the process if that one is shut
                    end.shutdown(socket.SHUT_RD)
            self._sockets = set()

    def _beat(self) -> None:
        while not self._left.wait(BEAT_SECONDS):
            self._send(beat=1)
            if what := self._standing.stuck():
                self._send(stuck=what)

    def _send(self, **words: Any) -> None:
        try:
            with self._speaking:
                self._line.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            return  # the listener tells who needs to know

    def _part_from_parent(self) -> None:
        """In a fork (a loader worker): our life does not hang on it."""
        self._left.set()
        self._line.close()
        self.keys.close()

    # -- what we do

    def is_peer_loss(self, error: BaseException) -> bool:
        """Is it a process's death that this error tells of? Waits a moment for the news."""
        if not isinstance(error, (RuntimeError, ConnectionError, WorldError)):
            return False
        if self._lost.is_set():
            return True
        return is_connection_error(str(error)) and self._lost.wait(CONFIRM_SECONDS)

    def watch(self, unit: int) -> None:
        """From now on somebody here goes on when another one dies. `unit`: so many neighbours share a model."""
        self.watchful, self.messenger = True, SendThread(self)
        self._send(unit=unit)

    def has_lost_peer(self, seconds: float = 0.0) -> bool:
        """Has somebody died since the group was formed? That was told so many seconds ago, at least."""
        if not self._lost.is_set():
            return False
        time.sleep(seconds)
        return True

    def tolerate_peer_loss(self, error: Exception) -> None:
        """Raise this error, unless it tells of a death, which the next meeting will see to."""
        if not self.is_peer_loss(error):
            raise error
        self.torn = True

    def report(self, **what: Any) -> None:
        """The launcher hears of it."""
        self._send(told={"number": self.number, **what})

    def regroup(self, group: ProcessGroup, *, open_: bool = False, **about: Any) -> RegroupResult:
        """Leave the group that there is, if any, and form a new one with all who are left, and with those who want to
        join, if all are `open_` for them. `group` is the new one then. All processes must call this; `about` is for the
        launcher.

        Raises PeerLostError if nobody is left, they cannot connect in time, or the meeting place is gone; in a process
        that was to join, Stopped.
        """
        while True:
            if not self.late:
                self._part()
            self._send(ready=about, open=open_)
            with self._standing.doing("waits for the others"):
                words = self._formed.get()
            if "refused" in words and self.joins:
                raise RunStopped
            if "refused" in words:
                raise PeerLostError(
                    f"Process {self.number} was to form a group with those who are left.",
                    f"There is none: {words['refused']}.",
                    "go on from the newest checkpoint: the same command with --resume.",
                )
            roster = tuple(words["roster"])
            self.generation = self.keys.generation = words["generation"]
            try:
                if self.late:  # who aborts waits until all who are left do, and now nobody is in a collective
                    self._part()
                with self._standing.doing("connects"):
                    self._connect(group, roster)
            except (RuntimeError, ConnectionError, WorldError) as error:
                if not self.is_peer_loss(error):
                    raise PeerLostError(
                        f"Process {self.number} was to form a group with those who are left.",
                        f"They cannot connect, though nobody else has died: {str(error).splitlines()[0]}",
                        "go on from the newest checkpoint: the same command with --resume.",
                    ) from error
                continue
            self.joins = False
            return RegroupResult(roster, tuple(words["joined"]), tuple(words["lost"]))

    def _connect(self, group: ProcessGroup, roster: Sequence[int]) -> None:
        rank, size = roster.index(self.number), len(roster)
        group.regroup(rank, size, {})
        if size == 1:
            self.lines()
            return
        store = dist.PrefixStore(f"generation-{self.generation}", self.keys)
        self._before = _sockets().keys()
        connect(store, rank, size, self.backend, first_timeout(size), FORM_SECONDS)
        self.own()
        group.regroup(rank, size, find_neighbours(group))
        self.lines()
        self.own()

    def own(self) -> None:
        """The sockets that were made since the group was are its own, and go with it."""
        if self._before is None:
            return
        with self._mutex:
            self._sockets = _sockets().keys() - self._before
        if self._lost.is_set():  # before we had them
            self._abort_sockets()

    def _part(self) -> None:
        """Out of the group that there is."""
        with self._standing.doing("leaves its group"):
            self._abort_sockets()
            if self.messenger is not None:
                self.messenger.close()
                self.messenger = SendThread(self)
            leave_group(abort=self.late)
        self.torn = False

    def leave(self) -> None:
        """In peace: nobody is to take it for a death. The group, if we are in one, is left when all others have said so
        too, or are dead: who has not may still need it."""
        self._send(bye=1)
        if dist.is_initialized():  # servers and workers have parted before, and one of these may stand still
            self._over.wait(LEAVE_SECONDS)
        self._left.set()
        leave_group(abort=self.late)
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self.keys.close()


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by the kernel's names, "socket:[4711]": a descriptor's number may be
    another socket's as soon as it is closed."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found
