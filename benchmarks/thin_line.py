"""A slow network link between two sites on one machine: two network namespaces, and a switch in user space.

    site 0 (namespace)                the switch (a process of this file)              site 1 (namespace)
    10.88.0.1 on wan0  --- TAP ---  queue with a rate in bits/s, then a delay  --- TAP ---  10.88.0.2 on wan0

Each direction has its own rate, delay and queue. A full queue drops frames, as in a router. (`tc netem` could do this,
but not all kernels have it.) Needs Linux, root and `ip`; `missing()` returns what is missing.

    with ThinLine(delay_seconds=0.02, bits_per_second=100e6) as line:
        subprocess.Popen([*line.inside(0), "python", "train.py"])
        line.counts()              # bytes that each site has sent, including headers
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
INTERFACE = "wan0"
FRAME = 65536
QUEUE_SECONDS = 0.25
"""Longest wait in a queue: 3 MB at 100 Mbit/s, six times the bandwidth-delay product of 20 ms each way."""


def address(site: int) -> str:
    """Return the IP address of a site."""
    return f"10.88.0.{site + 1}"


def missing() -> str:
    """Return the reason why this machine cannot have a link, or "" if it can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need Linux and root"
    missing_tools = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing_tools:
        return f"{' and '.join(missing_tools)} cannot be found"
    name = f"unisono-probe-{os.getpid()}"
    process = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if process.returncode:
        return f"network namespaces cannot be created: {process.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun here"


class ThinLine:
    """A context with two namespaces and the switch between them."""

    def __init__(self, *, delay_seconds: float, bits_per_second: float) -> None:
        self.delay_seconds, self.bits_per_second = delay_seconds, bits_per_second
        self.names = [f"unisono-{os.getpid()}-{site}" for site in range(2)]

    def __enter__(self) -> ThinLine:
        taps = [f"utap{os.getpid() % 10**8}{'ab'[site]}" for site in range(2)]  # 15 letters at most
        try:
            for name, tap in zip(self.names, taps, strict=True):
                _ip("netns", "add", name)
                _ip("tuntap", "add", "dev", tap, "mode", "tap")
            arguments = [str(self.delay_seconds), str(self.bits_per_second), *taps]
            self.switch = subprocess.Popen(
                [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self.switch.stdout is not None
            self.switch.stdout.readline()  # it has opened both taps, and keeps them open when they move
            for site, (name, tap) in enumerate(zip(self.names, taps, strict=True)):
                _ip("link", "set", tap, "netns", name)
                _ip("-n", name, "link", "set", tap, "name", INTERFACE)
                _ip("-n", name, "address", "add", f"{address(site)}/24", "dev", INTERFACE)
                _ip("-n", name, "link", "set", INTERFACE, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        switch = getattr(self, "switch", None)
        if switch is not None:
            switch.stdin.close()
            switch.stdout.close()
            switch.wait(10)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def inside(self, site: int) -> list[str]:
        """Return the prefix of commands that run in a site.

        A process namespace keeps sites from sharing memory, and ends their processes with the command.
        """
        namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return ["ip", "netns", "exec", self.names[site], *namespace]

    def counts(self) -> list[int]:
        """Return the bytes that each site has sent so far."""
        assert self.switch.stdin is not None
        assert self.switch.stdout is not None
        print("count", file=self.switch.stdin, flush=True)
        counts: list[int] = json.loads(self.switch.stdout.readline())
        return counts


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


# -- the switch


def _open(tap: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def switch(delay: float, rate: float, taps: list[str]) -> None:
    """Forward frames between the taps until standard input ends."""
    ends = [_open(tap) for tap in taps]
    print("ready", flush=True)
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]  # when the last frame of each queue has been sent
    counts = [0, 0]
    while True:
        now = time.monotonic()
        due = [queue[0][0] for queue in queues if queue]
        timeout = max(0.0, min(due) - now) if due else None
        for ready in select.select([0, *ends], [], [], timeout)[0]:
            if ready == 0:
                if not sys.stdin.readline():
                    return
                print(json.dumps(counts), flush=True)
                continue
            site = ends.index(ready)
            for _ in range(64):
                try:
                    frame = os.read(ready, FRAME)
                except (BlockingIOError, OSError):
                    break
                now = time.monotonic()
                start = max(free[site], now)
                if start - now > QUEUE_SECONDS:
                    continue  # dropped
                free[site] = start + 8 * len(frame) / rate
                counts[site] += len(frame)
                queues[site].append((free[site] + delay, frame))
        now = time.monotonic()
        for site, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                try:
                    os.write(ends[1 - site], queue[0][1])
                except BlockingIOError:
                    break
                except OSError:
                    pass  # that interface is not up yet
                queue.popleft()


if __name__ == "__main__":
    switch(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
