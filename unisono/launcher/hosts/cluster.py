"""The hosts of a run: connect to them, compare them, and place processes on them."""

from __future__ import annotations

import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unisono.environment import World, variables
from unisono.errors import Problem, SettingsError
from unisono.launcher.hosts.awaited_host import AwaitedHost, Order
from unisono.launcher.hosts.host_differences import CONNECT_SECONDS, differences, why_unreachable
from unisono.launcher.hosts.host_facts import facts_of
from unisono.launcher.hosts.host_list import ListedHost
from unisono.launcher.hosts.local_host import LocalHost
from unisono.launcher.hosts.network.split_network import SplitWatch
from unisono.launcher.hosts.remote_host import Link, RemoteHost
from unisono.launcher.hosts.ssh import SshLink, agent_command
from unisono.launcher.worker_process import Handle, WorkerSpec


class Connector(Protocol):
    """Connects to the agents of hosts.

    Attributes:
        can_leave_out: whether a restart may leave out lost hosts. Not where each host knows its number in the list, or
            where lost ones are replaced.
        is_private: whether the connections are encrypted, and only members of the run have one.
    """

    can_leave_out: bool

    @property
    def is_private(self) -> bool: ...

    def connect(
        self, hosts: Mapping[int, ListedHost], on_return: Callable[[int, Link], None]
    ) -> AbstractContextManager[Mapping[int, Link]]:
        """Return a block with the connections to these hosts, by their number in the list.

        Within the block, the connection of a host that was lost and comes back is passed to `on_return`, from any
        thread.
        """

    def renew(self, host: int) -> bool:
        """Begin to replace a lost host. Return whether `on_return` will get a connection, perhaps much later."""


class SshConnector:
    """Start an agent on each host with ssh.

    Args:
        ssh: the ssh command with its own options.
    """

    can_leave_out = True
    is_private = True

    def __init__(self, ssh: Sequence[str] = ("ssh",)) -> None:
        self._ssh = ssh

    @contextmanager
    def connect(
        self, hosts: Mapping[int, ListedHost], on_return: Callable[[int, Link], None]
    ) -> Iterator[Mapping[int, Link]]:
        yield {n: SshLink(agent_command(host.name, os.getcwd(), ssh=self._ssh)) for n, host in hosts.items()}

    def renew(self, host: int) -> bool:
        return False


class Slot(NamedTuple):
    """A place for a process: the number of the host in the list, and the process's local rank there."""

    host: int
    local_rank: int


class Cluster:
    """The hosts of a run.

    Args:
        listed: the hosts, with their slots.
        ranks: the number of processes at the start.
        connector: connects to their agents.
        say: prints a line for the user.

    Attributes:
        status: the exit status of the run, negative if it starts again.
        lost: after the run, the names of the hosts that were lost.
    """

    def __init__(
        self, listed: Sequence[ListedHost], ranks: int, connector: Connector, say: Callable[[str], None]
    ) -> None:
        self.listed, self._connector, self._say = listed, connector, say
        self.status = 1
        self.lost: set[str] = set()
        self._remote: dict[int, RemoteHost] = {}  # by the number of the host
        self._awaited: dict[int, AwaitedHost] = {}
        self._lost: list[RemoteHost] = []  # the earlier connections of hosts that came back
        self._changing, self._is_closed = threading.Lock(), False
        self._facts: dict[int, Mapping[str, Any]] = {}
        slots = [Slot(host, n) for host, each in enumerate(listed) for n in range(each.slots)]
        self._taken = dict(enumerate(slots[:ranks]))  # by the number of the process
        self._starting = [sum(slot.host == host for slot in self._taken.values()) for host in range(len(listed))]
        self._here = LocalHost()
        own = next((number for number, host in enumerate(listed) if host.is_here), None)
        self._split = SplitWatch([host.name for host in listed], own, self._alive, self._end)

    @contextmanager
    def open(self, rendezvous: Path, script: Path, run_dir: Path) -> Iterator[None]:
        """Connect to all hosts, and compare them with this one. Within the block processes can be started.

        Raises:
            SettingsError: a host cannot be reached, or differs.
        """
        mark = f".reachable-{uuid.uuid4().hex[:8]}"
        (run_dir / mark).touch()
        about = {"script": str(script.resolve()), "run_dir": str(run_dir.resolve()), "mark": mark}
        with ExitStack() as stack:
            stack.callback((run_dir / mark).unlink, missing_ok=True)
            here = [number for number, host in enumerate(self.listed) if host.is_here]
            self._facts = {number: {**facts_of(**about), "reached_at": None} for number in here}
            others = {number: host for number, host in enumerate(self.listed) if not host.is_here}
            on_return = partial(self._take_back, rendezvous, about)
            links = stack.enter_context(self._connector.connect(others, on_return))
            stack.callback(self._close)
            for number, link in links.items():
                remote = self._remote[number] = RemoteHost(self.listed[number].name, link, rendezvous, self._say)
                remote.open(**about)
            problems = self._compare(facts_of(**about))
            if problems:
                raise SettingsError.of(problems)
            self._say(f"hosts: {self}")
            self._watch_splits()
            yield

    def _close(self) -> None:
        self._split.close()
        with self._changing:
            self._is_closed = True
            self.lost = {host.name for number, host in enumerate(self.listed) if self._is_lost(number)}
            for host in (*self._remote.values(), *self._lost):
                host.close(self.status)

    def _take_back(self, rendezvous: Path, about: Mapping[str, str], number: int, link: Link) -> None:
        """Use a host again that was lost, for processes that replace others. It may differ now: then it ends."""
        name = self.listed[number].name
        host = RemoteHost(name, link, rendezvous, self._say)
        host.open(**about)
        facts = host.wait_for_facts(CONNECT_SECONDS)
        problems = differences(name, facts, facts_of(**about)) if facts is not None else []
        with self._changing:
            if facts is None or problems or self._is_closed:
                lost = f"Host {name} came back, and is lost again." if not self._is_closed else ""
                if text := "\n".join(str(problem) for problem in problems) or lost:
                    self._say(text)
                host.close(self.status)
                if number in self._awaited:
                    self._awaited.pop(number).give_up()
                return
            before = self._remote[number]
            before.link.kill()  # it may not have been silent for long enough to count as lost
            self._lost.append(before)
            self._facts[number], self._remote[number] = facts, host
            awaited = self._awaited.pop(number, None)
        if awaited is not None:
            awaited.arrive(host)
        self._watch_splits()
        self._say(f"Host {name} is back.")

    def _compare(self, here: Mapping[str, Any]) -> list[Problem]:
        with ThreadPoolExecutor(max(1, len(self._remote))) as pool:
            found = list(pool.map(lambda host: host.wait_for_facts(CONNECT_SECONDS), self._remote.values()))
        problems = []
        for (number, host), facts in zip(self._remote.items(), found, strict=True):
            if facts is None:
                problems.append(why_unreachable(host))
                continue
            self._facts[number] = facts
            problems += differences(host.name, facts, here)
        return problems

    # -- a split network

    def _watch_splits(self) -> None:
        remote = {number: host for number, host in self._remote.items() if not host.lost}
        signs = {number: self._facts[number].get("signs_at") for number in remote}
        routes = [self._facts[number]["reached_at"] for number in remote]
        own = next((route[0] for route in routes if route), "")
        self._split.watch(remote, {number: (each[0], each[1]) for number, each in signs.items() if each}, own)

    def _alive(self) -> dict[int, int]:
        """Return the number of processes of each host that is not lost."""
        counts = Counter(slot.host for slot in list(self._taken.values()))
        return {host: counts[host] for host in range(len(self.listed)) if not self._is_lost(host)}

    def _end(self, number: int, why: str) -> None:
        """End the processes of a host that does not reach others, on which the run continues."""
        remote = self._remote.get(number)
        if remote is not None:
            remote.lose(why)
            return
        self._say(f"Host {self.listed[number].name} is lost: {why}.")
        self._here.lose()

    # -- processes

    def world(self, number: int, world: World) -> World:
        """Return the place of a process in the run, on its host."""
        host, local_rank = self._taken[number]
        name = str(self._facts[host]["host"])
        same = [each for each, facts in self._facts.items() if facts["host"] == name]  # names of one machine
        local_rank += sum(self.listed[each].slots for each in same if each < host)
        size = max(1, sum(self._starting[each] for each in same), local_rank + 1)
        plain = not self._connector.is_private
        return replace(world, host=name, local_rank=local_rank, local_size=size, open_link=plain)

    def environment(self, number: int) -> dict[str, str]:
        """Return variables for the libraries of a process: the network interface through which hosts reach it."""
        host = self._taken[number].host
        name = self.interface(host)
        kept = variables(["PYTHONPATH"]) if host in self._remote else {}
        return {**kept, **({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {})}

    def interface(self, host: int) -> str:
        """Return the network interface of a host by which launcher and agent are connected; "" if it is not known."""
        routes = [facts["reached_at"] for number, facts in self._facts.items() if number in self._remote]
        if host in self._remote:
            address = (self._facts[host]["reached_at"] or ("", ""))[1]
        else:
            address = next((route[0] for route in routes if route), "")
        found = self._facts[host]["interfaces"].items()
        return next((name for name, addresses in found if address in addresses), "")

    def reached_at(self, number: int) -> str:
        """Return the address at which the host of a process reaches this one, or "" if it is this one or not known."""
        return str((self._facts[self._taken[number].host]["reached_at"] or ("", ""))[1])

    def is_here(self, number: int) -> bool:
        """Return whether a process runs on this host."""
        return self._taken[number].host not in self._remote

    def start(self, number: int, world: World) -> Callable[[WorkerSpec], Handle]:
        """Return what starts a process on its host."""
        host = self._taken[number].host
        remote = self._awaited.get(host) or self._remote.get(host)
        return self._here.start if remote is None else partial(remote.start, number, asdict(world))

    def _complete(self, number: int, order: Order) -> Order:
        """Return the order that starts a process, for the host that is there now."""
        world = asdict(self.world(number, World(**order["world"])))
        return {**order, "world": world, "environment": {**order["environment"], **self.environment(number)}}

    def replace(self, number: int, replaced: int) -> None:
        """Find a place for process `number`, which replaces another one: the same, or on another host if it is lost."""
        before = self._taken.pop(replaced)
        if not self._is_lost(before.host):
            self._taken[number] = before
            return
        with self._changing:
            if self._connector.renew(before.host):
                self._awaited[before.host] = AwaitedHost(self.listed[before.host].name, self._complete)
                self._taken[number] = before
                return
        taken = set(self._taken.values())
        alive = [host for host in range(len(self.listed)) if not self._is_lost(host)]
        free = [Slot(host, n) for host in alive for n in range(self.listed[host].slots) if Slot(host, n) not in taken]
        if not free:  # more processes than slots
            host = min(alive, key=lambda each: sum(slot.host == each for slot in taken))
            free = [Slot(host, 1 + max((slot.local_rank for slot in taken if slot.host == host), default=-1))]
        self._taken[number] = free[0]

    def _is_lost(self, host: int) -> bool:
        if host in self._remote:
            return host not in self._awaited and bool(self._remote[host].lost)
        return self._here.lost

    def __str__(self) -> str:
        """Return hosts, processes and interfaces in a line."""
        parts = []
        for host, listed in enumerate(self.listed):
            count, name = self._starting[host], self.interface(host)
            parts.append(f"{listed.name} {count}{f' ({name})' if name else ''}" if count else f"{listed.name} spare")
        return ", ".join(parts)
