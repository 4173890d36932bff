"""Start an actor for each process, and connect to the agents in them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unisono.clusters.ray.actor_agent import CANNOT_REACH
from unisono.clusters.ray.rank_actor import PURPOSE, AgentOrder, RankActor
from unisono.errors import SettingsError
from unisono.handshake.member_listener import MemberListener
from unisono.handshake.mutual_proof import RunSecret
from unisono.launcher.hosts.host_list import ListedHost
from unisono.launcher.hosts.node_link import SocketLink, accept_member
from unisono.launcher.hosts.remote_host import Link

if TYPE_CHECKING:
    from unisono.clusters.ray.ray_room import RayRoom

START_SECONDS = 120.0
"""Time limit for all actors to start and to connect."""

POLL_SECONDS = 0.2

AGAIN_SECONDS = 2.0
"""Seconds between two attempts to start an actor."""

WARN_SECONDS = 20.0
"""Seconds after which a fresh actor that has not started is reported."""


class StartedActor:
    """An actor and the call that ends with it.

    Args:
        handle: the actor.
        call: the result of RankActor.serve.
        is_fresh: whether it replaces another one.
    """

    def __init__(self, handle: Any, call: Any, *, is_fresh: bool) -> None:
        self.handle, self.call, self.is_fresh = handle, call, is_fresh
        self.started_at = time.monotonic()
        self.link: SocketLink | None = None  # once its agent has connected


class RayConnector:
    """Start actors in a placement group. One that is lost is replaced by a fresh one, where Ray has room.

    Args:
        room: the placement group.
        say: prints a line for the user.
    """

    can_leave_out = False
    is_private = True

    def __init__(self, room: RayRoom, say: Callable[[str], None]) -> None:
        self._room, self._say = room, say
        self._secret = RunSecret.random()
        self._actors: dict[int, StartedActor] = {}
        self._retries: dict[int, float] = {}  # when to start an actor, whose predecessor has not connected
        self._warned: set[int] = set()
        self._lock = threading.RLock()
        self._listener: MemberListener | None = None
        self._ended = threading.Event()

    @contextmanager
    def connect(
        self, hosts: Mapping[int, ListedHost], on_return: Callable[[int, Link], None]
    ) -> Iterator[Mapping[int, Link]]:
        """Yield the connections to the agents of the actors, by their number. Fresh ones are passed to `on_return`.

        Raises:
            SettingsError: an actor does not start, or its agent does not connect in time.
        """
        self._ended.clear()
        with self._listen() as self._listener:
            watcher = threading.Thread(target=self._watch, args=(on_return,), name="actors", daemon=True)
            try:
                for number in hosts:
                    self._start(number, is_fresh=False)
                links = self._first_links(len(hosts))
                watcher.start()
                yield links
            finally:
                self._ended.set()
                if watcher.ident is not None:
                    watcher.join()
                self._end_actors()

    def renew(self, host: int) -> bool:
        self._start(host, is_fresh=True)
        return True

    # -- actors

    def _start(self, number: int, *, is_fresh: bool) -> None:
        """Start an actor; it waits until Ray has room for it. Its predecessor is ended."""
        assert self._listener is not None
        order = AgentOrder(number, *self._listener.address, self._secret.hex(), os.getcwd())
        with self._lock:
            self._kill(self._actors.pop(number, None))
            self._retries.pop(number, None)
            handle = self._room.actor_class(RankActor, number).remote()
            self._actors[number] = StartedActor(handle, handle.serve.remote(tuple(order)), is_fresh=is_fresh)

    def _kill(self, actor: StartedActor | None) -> None:
        import ray

        if actor is not None:
            with contextlib.suppress(Exception):  # it has ended, or its node cannot be reached
                ray.kill(actor.handle)

    def _end_actors(self) -> None:
        """End all actors. Their agents have the end of the run already."""
        with self._lock:
            for actor in self._actors.values():
                self._kill(actor)
            self._actors.clear()
            self._retries.clear()

    def _failure_of(self, actor: StartedActor) -> str | None:
        """Return why an actor has ended; None if it has not."""
        import ray

        if not ray.wait([actor.call], timeout=0)[0]:
            return None
        try:
            status = ray.get(actor.call)
        except Exception as error:  # whatever the actor could not do
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
        address, port = self._listener.address if self._listener is not None else ("", 0)
        cannot = f"it cannot reach the launcher at {address}, port {port}"
        return cannot if status == CANNOT_REACH else f"its agent has ended with status {status}"

    # -- connections

    def _listen(self) -> MemberListener:
        """Open the port for the agents, at the address that Ray uses for this node."""
        address = self._room.own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1024)
        return MemberListener(listener, self._secret, PURPOSE, self._say)

    def _first_links(self, count: int) -> dict[int, Link]:
        links: dict[int, Link] = {}
        began = time.monotonic()
        while len(links) < count:
            found = self._accept()
            if found is not None:
                links[found[0]] = found[1]
                continue
            missing = {number: actor for number, actor in self._actors.items() if number not in links}
            failed = {number: self._failure_of(actor) for number, actor in missing.items()}
            number, why = next(((number, why) for number, why in failed.items() if why), (min(missing), ""))
            if why or time.monotonic() - began > START_SECONDS:
                fact = why or f"it has not started and connected within {START_SECONDS:g} s"
                do = "ray status; ray list actors; ray logs actor --id ID; Unisono is needed on all nodes"
                raise SettingsError(f"Cannot start actor {number}.", f"{fact[:1].upper()}{fact[1:]}.", do)
            for link in links.values():
                assert isinstance(link, SocketLink)
                link.say_alive()
        return links

    def _accept(self) -> tuple[int, SocketLink] | None:
        """Return the number and the connection of the next agent; None if there is none."""
        assert self._listener is not None
        found = accept_member(self._listener, self._secret, POLL_SECONDS)
        if found is None:
            return None
        with self._lock:
            actor = self._actors.get(found.number)
            if actor is None or actor.link:
                found.connection.close()
                return None
            actor.link = SocketLink(found.connection)
            return found.number, actor.link

    # -- the thread

    def _watch(self, on_return: Callable[[int, Link], None]) -> None:
        """Pass the agents of fresh actors on, and end the connection to an actor that Ray counts as dead."""
        checked = time.monotonic()
        while not self._ended.is_set():
            found = self._accept()
            if found is not None:
                self._warned.discard(found[0])
                on_return(*found)
            if time.monotonic() - checked > 1.0:
                checked = time.monotonic()
                self._check()

    def _check(self) -> None:
        now = time.monotonic()
        with self._lock:
            actors = dict(self._actors)
        for number, actor in actors.items():
            why = self._failure_of(actor)
            if actor.link is not None:
                if why is not None:
                    actor.link.kill()
                continue
            if why is not None:  # on a node that is dead, which Ray notices later
                self._retries.setdefault(number, now + AGAIN_SECONDS)
            if now - actor.started_at > WARN_SECONDS and number not in self._warned:
                self._warned.add(number)
                self._say(f"Actor {number} waits for room: {self._room.free()}. The run continues without it.")
        for number, at in list(self._retries.items()):
            if now >= at and not self._ended.is_set():
                self._start(number, is_fresh=True)
