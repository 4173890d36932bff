"""A thin line between two sites on one machine: two network namespaces, and a switch in user space between them.

    site 0 (a namespace)              the switch (a process of this file)            site 1 (a namespace)
    10.88.0.1 on wan0  --- TAP ---  queue: so many bits a second, then a delay  --- TAP ---  10.88.0.2 on wan0

Each direction has its own rate, delay and queue, which drops what comes when it is full, as a router does. (`tc netem`,
which could do it, is not in every kernel.) Needs Linux, root and `ip`; `missing()` says what is not there.

    with ThinLine(delay_seconds=0.02, bits_per_second=100e6) as line:
        subprocess.Popen([*line.inside(0), "python", "train.py"])
        line.counts()              # bytes that each site has sent, headers and all
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
"""How long the last frame of a full queue waits: 3 MB at 100 Mbit/s, six times what is on a line of 20 ms each way."""


def address(site: int) -> str:
    """Of a site, in its namespace and as the other one sees it."""
    return f"10.88.0.{site + 1}"


def missing() -> str:
    """Why there can be no such line here; "": there can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need Linux and root"
    lacks = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if lacks:
        return f"there is no {' and no '.join(lacks)} here"
    name = f"unisono-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun here"


class ThinLine:
    """Two namespaces and the switch between them, as long as the block lasts."""

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
            self.switch.stdout.readline()  # it holds both taps now, and goes on holding them where they are moved
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
        """What to write before a command that is to run in a site. Its processes see no others, so that sites do not
        share memory; they are killed with the command."""
        hidden = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return ["ip", "netns", "exec", self.names[site], *hidden]

    def counts(self) -> list[int]:
        """Bytes that each site has sent through the line so far."""
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
    """Carry frames from each tap to the other, until standard input ends."""
    ends = [_open(tap) for tap in taps]
    print("ready", flush=True)
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]  # when the line is done with what is in its queue
    counts = [0, 0]
    while True:
        now = time.monotonic()
        due = [queue[0][0] for queue in queues if queue]
        patience = max(0.0, min(due) - now) if due else None
        for ready in select.select([0, *ends], [], [], patience)[0]:
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
                    pass  # that end is not up yet
                queue.popleft()


if __name__ == "__main__":
    switch(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
