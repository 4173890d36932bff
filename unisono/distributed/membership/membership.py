"""Elastic membership: detect a lost process, agree on the remaining ones, and form a new group without a restart.

    process 0   all-reduce ......x failed  leaves    "ready"  -->  roster [0, 2]   rank 0 of 2   continues
    process 1   all-reduce, killed
    process 2   computes ................x failed    "ready"  -->  roster [0, 2]   rank 1 of 2   continues

The rendezvous server (launcher/rendezvous_server.py) detects the end of a process's connection and notifies all others
within milliseconds. They need the notice. With gloo only the processes that wait for the dead one get an error, and
those that wait for these processes continue to wait. gloo's own abort does not wake a waiting collective (measured,
torch 2.13). So a thread in every process listens. On a loss it shuts down the sockets of its group (shutdown(2)), and
every operation that waits on them fails at once.

The sockets are shut down for reading only. gloo then closes them a moment later, when its own thread reads their end.
A message sent in that moment counts as sent. If the sockets were shut down for writing as well, such a message would
fail, be queued, and be dropped when the connection closes: gloo reports nothing about a half-written message (pair.cc,
signalException), and its sender would wait for the half hour of a collective's timeout. That happened to 25 of 40
messages sent just after the shutdown, and to none of 40 with only reading shut down.

A message to the dead process itself can still hang in this way, in the moment before gloo detects its end. So can a
large message that is half written. No thread that is needed waits for these (waiting.py). Compiled code may have other
ways to hang. So leaving and connecting have a time limit (regroup_timeout.py): a process that hangs counts as dead, and
the others continue without it.

Our own back ends (distributed/connections) end their operations themselves, and drop none.

The back end of an accelerator has no sockets to shut down, and needs none: its waiters poll for losses (waiting.py),
and the remaining work on the device is aborted when the process leaves the group.

Ranks are in the order of age: the oldest process is rank 0. So a death moves the ranks after it up, rank 0 is always
one of the oldest processes, and a new one comes last. The number of a process never changes: the replacement of process
2 of four is process 4.

If several processes share a model (parallel.shard), they are a unit: a death removes the whole unit, and the same
number of processes replaces it. The groups of the mesh's lines are built again with the group.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from unisono.distributed.backends.backend_choice import OWN, TAGGED
from unisono.distributed.connections.peer_connections import fail_all
from unisono.distributed.link_rates import find_links
from unisono.distributed.membership.heartbeats import Heartbeats
from unisono.distributed.membership.regroup_timeout import FORM_SECONDS, RegroupTimeout
from unisono.distributed.membership.waiting import GlooWork, NcclWork, SendThread
from unisono.distributed.process_group import TIMEOUT, ProcessGroup, SendWork, Work
from unisono.distributed.rendezvous.connect import connect, first_timeout, leave_group
from unisono.distributed.rendezvous.silent_hosts import SILENCE_LIMIT, open_sockets
from unisono.distributed.rendezvous.store import LOST_PEER, RendezvousStore
from unisono.distributed.shared_memory import find_neighbors
from unisono.environment import World
from unisono.errors import CertificateError, PeerLostError, RunStopped, WorldError, is_connection_error
from unisono.security.refusals import REFUSALS

SCHEME = "unix://"
"""Prefix of the address of a rendezvous server."""

CONFIRM_SECONDS = 5.0
"""A broken connection is a lost peer if the rendezvous server confirms it within this time; else it is an error."""

LEAVE_SECONDS = 300.0
"""Seconds for which a finished process waits for the others to finish."""


class RegroupResult(NamedTuple):
    """A new group.

    Attributes:
        roster: the numbers of its processes, in the order of their ranks.
        joined: those that were not in the previous group.
        lost: those that were lost since the previous group.
    """

    roster: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]


class Membership:
    """This process as a member of an elastic run.

    Attributes:
        number: the number of this process, which never changes.
        backend: torch's back end for the groups.
        async_errors: whether the back end does not report lost peers, so that waiting needs polling (NCCL).
        joins: whether this process joins a run in progress; False once it has joined.
        join_requested: whether a process waits to join.
        tolerant: whether training continues without a lost peer.
        failed: whether an operation failed that has to be repeated in the next group.
        on_regroup: called after a new group was formed, to build the groups of the mesh's lines again.
    """

    def __init__(self, world: World, backend: str = "gloo") -> None:
        assert world.store is not None
        path = world.store.removeprefix(SCHEME)
        self.number = world.rank if world.number is None else world.number
        self.backend, self.async_errors = backend, backend not in TAGGED
        self.joins = world.joins
        self.join_requested = self.tolerant = self.failed = False
        self.on_regroup: Callable[[], None] = lambda: None
        self.generation = 0
        self.store = RendezvousStore.at(path, TIMEOUT)
        self.send_thread: SendThread | None = None
        self._lost = threading.Event()
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sockets: set[str] = set()  # of the current groups
        self._sockets_before: Collection[str] | None = None  # the sockets that existed before the current groups
        self._sockets_lock = threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(path)
        self._send_lock = threading.Lock()
        self._released = threading.Event()
        self._timeout = RegroupTimeout(
            lambda: self.store.requests,
            lambda: self.store.waits_for_peer,
            lambda: self.tolerant and self._lost.is_set(),
            anywhere=self.async_errors,
        )
        self._send(register=self.number, joins=self.joins, slot=world.rank)
        threading.Thread(target=self._listen, name="membership", daemon=True).start()
        self._heartbeats = Heartbeats(self._send, self._timeout)
        REFUSALS.record = lambda text: self.report(refusal=text)
        os.register_at_fork(after_in_child=self._disconnect_fork)

    @property
    def is_joining(self) -> bool:
        """Whether this process will join others, and is in no group with them yet (fake_group.py)."""
        return self.joins and not self.generation

    # -- the rendezvous server

    def _listen(self) -> None:
        rest = b""
        while True:
            try:
                data = self._connection.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._released.set()
                self._replies.put({"refused": "the rendezvous server of the run is gone"})
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._on_message(json.loads(line))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "lost" in message and "roster" not in message:
            self._lost.set()
            if self.tolerant:
                self._abort_sockets()
            if self.send_thread is not None:
                self.send_thread.on_peer_loss()
        elif "join_request" in message:
            self.join_requested = True
        elif "roster" in message:
            self.join_requested = False
            self._lost.clear()
            self._replies.put(message)
        elif "refused" in message:
            self._replies.put(message)
        elif "released" in message:
            self._released.set()

    def _abort_sockets(self) -> None:
        """Let every operation of the current groups fail: gloo's when their sockets are shut down for reading."""
        if self.async_errors:
            return
        if self.backend in OWN:
            fail_all(LOST_PEER)
            return
        with self._sockets_lock:
            for name, descriptor in open_sockets().items():
                if name not in self._sockets:
                    continue
                try:
                    duplicate = socket.socket(fileno=os.dup(descriptor))
                except OSError:
                    continue
                with duplicate, contextlib.suppress(OSError):  # the other end may have closed it
                    duplicate.getpeername()  # fails for a listening socket, whose shutdown would make gloo abort
                    duplicate.shutdown(socket.SHUT_RD)
            self._sockets = set()

    def _send(self, **message: Any) -> None:
        try:
            with self._send_lock:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # _listen detects that the server is gone

    def _disconnect_fork(self) -> None:
        """Close the connections in a forked child (a loader worker), whose end is irrelevant to the server."""
        self._heartbeats.stop()
        self._connection.close()
        self.store.close()

    # -- lost peers

    def is_peer_loss(self, error: BaseException) -> bool:
        """Return whether a lost peer caused this error. May wait CONFIRM_SECONDS for the server's notice."""
        if not isinstance(error, (RuntimeError, ConnectionError, WorldError)):
            return False
        if self._lost.is_set():
            return True
        return is_connection_error(str(error)) and self._lost.wait(CONFIRM_SECONDS)

    def tolerate_losses(self, unit: int) -> None:
        """Continue without lost peers from now on. `unit`: number of consecutive ranks that share a model."""
        self.tolerant, self.send_thread = True, SendThread(self)
        self._send(unit=unit)

    def has_lost_peer(self, seconds: float = 0.0) -> bool:
        """Return whether a peer was lost since the group was formed. If so, sleep for `seconds` first."""
        if not self._lost.is_set():
            return False
        time.sleep(seconds)
        return True

    def tolerate_peer_loss(self, error: Exception) -> None:
        """Raise this error, unless a lost peer caused it. The next regrouping handles a lost peer."""
        if not self.is_peer_loss(error):
            raise error
        self.failed = True

    def wrap(self, work: Any) -> Work:
        """Return a collective whose `wait` raises if a peer is lost."""
        if self.is_joining:
            return work
        if self.async_errors:
            return NcclWork(work, self)
        return GlooWork(work, self) if self.tolerant else work

    def wrap_send(self, work: Any) -> Work:
        """Return a sent gloo message whose `wait` raises if a peer is lost."""
        return SendWork(work) if self.send_thread is None else self.send_thread.add(work)

    # -- groups

    def report(self, **facts: Any) -> None:
        """Send facts to the launcher."""
        self._send(report={"number": self.number, **facts})

    def regroup(self, group: ProcessGroup, *, admit: bool = False, **facts: Any) -> RegroupResult:
        """Leave the current group, if any, and form a new one of the remaining processes. Collective.

        Args:
            group: becomes the new group.
            admit: whether processes may join. They do if all processes agree.
            facts: facts to send to the launcher.
        """
        while True:
            if not self.async_errors:
                self._leave_group()
            self._send(ready=facts, admit=admit)
            with self._timeout.doing("waits for the others", math.inf):
                reply = self._replies.get()
            if "refused" in reply and self.joins:
                raise RunStopped
            if "refused" in reply:
                raise self._regroup_error(f"{reply['refused']}.")
            roster = tuple(reply["roster"])
            self.generation = self.store.generation = reply["generation"]
            try:
                if self.async_errors:  # an abort waits for all remaining processes, and now none is in a collective
                    self._leave_group()
                with self._timeout.doing("hangs while connecting"):
                    self._connect(group, roster)
            except CertificateError:
                raise
            except (RuntimeError, ConnectionError, WorldError) as error:
                if not self.is_peer_loss(error):
                    reason = f"Connecting failed, although no other process was lost: {str(error).splitlines()[0]}"
                    raise self._regroup_error(reason) from error
                continue
            self.joins = False
            return RegroupResult(roster, tuple(reply["joined"]), tuple(reply["lost"]))

    def _regroup_error(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"Process {self.number} cannot form a new group with the remaining processes.",
            reason[:1].upper() + reason[1:],
            "continue from the newest checkpoint: the same command with --resume.",
        )

    def _connect(self, group: ProcessGroup, roster: Sequence[int]) -> None:
        rank, size = roster.index(self.number), len(roster)
        known = group.links[group.rank] if group.links else 0.0
        group.regroup(rank, size, {})
        if size == 1:
            self.on_regroup()
            return
        store = dist.PrefixStore(f"generation-{self.generation}", self.store)
        self._sockets_before = open_sockets().keys()
        connect(store, rank, size, self.backend, first_timeout(size), FORM_SECONDS)
        self.claim_sockets()
        group.regroup(rank, size, *find_neighbors(group))
        group.links = find_links(group, known)
        self.on_regroup()
        self.claim_sockets()

    def claim_sockets(self) -> None:
        """Record the sockets that were opened since the group was formed: they are shut down with it."""
        if self._sockets_before is None:
            return
        SILENCE_LIMIT.add()  # the rendezvous server is quicker, but it does not wake processes that cannot continue
        with self._sockets_lock:
            self._sockets = open_sockets().keys() - self._sockets_before
        if self._lost.is_set():  # the loss was reported before the sockets were known
            self._abort_sockets()

    def _leave_group(self) -> None:
        with self._timeout.doing("hangs while leaving its group"):
            self._abort_sockets()
            if self.send_thread is not None:
                self.send_thread.close()
                self.send_thread = SendThread(self)
            leave_group(abort=self.async_errors)
        self.failed = False

    def leave(self) -> None:
        """Leave the run at its regular end, so that this does not count as a loss.

        Leave the group when all others are at their end or lost: until then they may need it.
        """
        self._send(leave=1)
        if dist.is_initialized():  # parameter servers and workers have left earlier, and one of them may hang
            self._released.wait(LEAVE_SECONDS)
        self._heartbeats.stop()
        leave_group(abort=self.async_errors)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.store.close()


def membership_of(group: ProcessGroup) -> Membership | None:
    """Return the membership of an elastic group; None if a lost peer ends the run."""
    return group.monitor if isinstance(group.monitor, Membership) else None
