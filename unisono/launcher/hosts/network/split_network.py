"""Decide which hosts continue when hosts reach the launcher and not each other.

    launcher ─┬─ a ─┐           a and b reach each other, c reaches neither:
              ├─ b ─┘           the processes of c are ended, those of a and b continue without them
              └─ c   (cut)

Only the launcher decides, so no two sides continue. A host that does not reach the launcher ends its processes itself
(host_agent.py).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unisono.launcher.hosts.network.signs_of_life import ALIVE_SECONDS, SILENCE_SECONDS, SignsOfLife, signs_at

LATE_SECONDS = 3.5 * ALIVE_SECONDS
"""Seconds without a sign of life after which a host is late: its own reports do not count. All pairs that have been
silent for SILENCE_SECONDS less this time count with the first that has been silent for SILENCE_SECONDS, because hosts
notice one cut at different times."""


@dataclass
class HostReport:
    """What the launcher knows about a host: when it was heard, and which hosts have been silent there.

    Attributes:
        heard: when the launcher has last heard it.
        steady_since: since when it has been heard without a gap.
        silences: the seconds for which other hosts have been silent there, by their number.
        reported: when it has reported that.
    """

    heard: float = field(default_factory=time.monotonic)
    steady_since: float = field(default_factory=time.monotonic)
    silences: Mapping[int, float] = field(default_factory=dict)
    reported: float = 0.0

    def hear(self, now: float) -> None:
        """Note that the launcher has heard the host."""
        if now - self.heard > LATE_SECONDS:
            self.steady_since = now
        self.heard = now

    def report(self, silences: Mapping[Any, float], now: float) -> None:
        """Note the silences that the host has reported."""
        self.silences = {int(number): seconds for number, seconds in silences.items()}
        self.reported = now

    def is_steady(self, now: float) -> bool:
        """Return whether it has been heard without a gap for SILENCE_SECONDS, so that its silences mean something."""
        return now - self.heard <= LATE_SECONDS and now - self.steady_since >= SILENCE_SECONDS

    def silence_of(self, number: int, now: float) -> float:
        """Return for how long another host has been silent there; 0 if that host was never heard."""
        return self.silences[number] + now - self.reported if number in self.silences else 0.0


def silent_pairs(reports: Mapping[int, HostReport], now: float) -> dict[tuple[int, int], float]:
    """Return the pairs of hosts (one, which has not heard the other), with the seconds, if any pair is cut; else {}."""
    steady = {number: report for number, report in reports.items() if report.is_steady(now)}
    late = {
        (here, there): seconds
        for here, report in steady.items()
        for there in steady
        if there != here and (seconds := report.silence_of(there, now)) > SILENCE_SECONDS - LATE_SECONDS
    }
    return late if any(seconds > SILENCE_SECONDS for seconds in late.values()) else {}


def hosts_to_end(
    processes: Mapping[int, int], cut: Collection[tuple[int, int]], own: int | None = None
) -> dict[int, list[int]]:
    """Return the hosts that end, so that all others reach each other, with those that each does not reach.

    The hosts with most processes stay. Of equal sides, the launcher's stays, and then the one with the lower number.

    Args:
        processes: the number of processes of each host.
        cut: pairs of hosts that do not reach each other.
        own: the launcher's host, if it has processes.
    """
    unreached: dict[int, set[int]] = {host: set() for host in processes}
    for here, there in cut:
        unreached[here].add(there)
        unreached[there].add(here)
    order = sorted(processes, key=lambda host: (-processes[host], host != own, host))
    sides = [_side_of(host, order, unreached) for host in order if unreached[host]]
    if not sides:
        return {}
    stay = max(sides, key=lambda side: (sum(processes[host] for host in side), own in side, [-host for host in side]))
    return {host: sorted(unreached[host] & set(stay)) for host in sorted(processes) if host not in stay}


def _side_of(first: int, order: Sequence[int], unreached: Mapping[int, Collection[int]]) -> list[int]:
    """Return hosts that reach each other: the first one, and those of the others, in order, that reach all before."""
    side = [first]
    for host in order:
        if host != first and not any(other in unreached[host] for other in side):
            side.append(host)
    return sorted(side)


class Watched(Protocol):
    """A host whose agent reports silences (remote_host.py)."""

    report: HostReport

    def send(self, data: bytes = b"", **values: Any) -> None:
        """Send a message to the agent."""


class SplitWatch:
    """Watch whether the hosts of a run reach each other.

    Args:
        names: the names of the hosts.
        own: the number of the launcher's host, if it has processes.
        processes: returns the number of processes of each host that is not lost.
        end: end(number, why) ends a host.
    """

    def __init__(
        self,
        names: Sequence[str],
        own: int | None,
        processes: Callable[[], Mapping[int, int]],
        end: Callable[[int, str], None],
    ) -> None:
        self._names, self._own, self._processes, self._end = names, own, processes, end
        self._hosts: Mapping[int, Watched] = {}
        self._signs: SignsOfLife | None = None  # of the launcher's host
        self._own_report = HostReport()
        self._token = secrets.token_hex(16)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="split watch", daemon=True)

    def watch(self, hosts: Mapping[int, Watched], places: Mapping[int, tuple[str, int]], address: str) -> None:
        """Let these hosts exchange signs of life, from now on.

        Args:
            hosts: the hosts with agents that are not lost.
            places: address and port of their signs of life, as far as they are known.
            address: the address of the launcher's host; "" if it is not known.
        """
        if self._own is not None and address and self._signs is None:
            self._signs = signs_at(address)
        everywhere = dict(places)
        if self._own is not None and self._signs is not None:
            everywhere[self._own] = address, self._signs.port
        for number, host in hosts.items():
            others = {other: place for other, place in everywhere.items() if other != number}
            host.send(watch=others, own=number, token=self._token)
        if self._own is not None and self._signs is not None:
            self._signs.watch(self._own, self._token, places)
        self._hosts = dict(hosts)
        if not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._signs is not None:
            self._signs.close()

    # -- the thread

    def _serve(self) -> None:
        while not self._closed.wait(ALIVE_SECONDS / 2):
            now = time.monotonic()
            if self._signs is not None:
                with contextlib.suppress(OSError):
                    self._signs.exchange(now)
                self._own_report.hear(now)
                self._own_report.report(self._signs.silences(now), now)
            processes = self._processes()
            reports = {number: host.report for number, host in self._hosts.items() if number in processes}
            if self._own is not None and self._own in processes:
                reports[self._own] = self._own_report
            silent = silent_pairs(reports, now)
            for last, unreached in hosts_to_end(processes, silent, self._own).items():
                self._end(last, self._why(last, unreached, silent))

    def _why(self, last: int, unreached: Sequence[int], silent: Mapping[tuple[int, int], float]) -> str:
        """Return the sentence about a host that ends."""
        here, there = max((pair for pair in silent if last in pair and {*pair} & {*unreached}), key=silent.__getitem__)
        names = {number: f"host {self._names[number]}" for number in (*unreached, last)}
        others = " and ".join(names[number] for number in unreached)
        way = "" if (there, here) in silent else "; packets in the other direction arrive"
        return (
            f"it and {others} cannot reach each other (nothing from {names[there]} has arrived at {names[here]} for "
            f"{silent[here, there]:.0f} s{way})"
        )
