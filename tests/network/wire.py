"""The cable of a host with a delay, a rate and a loss, in user space: for kernels without `tc netem`.

    python wire.py INNER OUTER DELAY_SECONDS BITS_PER_SECOND LOSS      a rate of 0 has no limit

It copies frames between two interfaces of its network namespace until its standard input ends. INNER leads to the host.
What the host sends has the delay, the rate and the loss (a fraction of frames); what it receives has the rate.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import sys
import time
from collections import deque

ALL_PROTOCOLS = 3  # ETH_P_ALL of linux/if_ether.h
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/socket.h, linux/if_packet.h
HEADER = 10  # bytes of struct virtio_net_hdr, which carries checksums and segments that are still to be made
FRAME = HEADER + 14 + 65536
QUEUE_SECONDS = 0.25
"""Longest wait for the rate; a frame that would wait longer is dropped, as in a router."""
BATCH = 64
"""Frames read before the queues are looked at again."""


class Direction:
    """Frames from one interface to another."""

    def __init__(self, source: socket.socket, sink: socket.socket, delay: float, rate: float, loss: float) -> None:
        self.source, self.sink = source, sink
        self.delay, self.rate, self.loss = delay, rate, loss
        self.queue: deque[tuple[float, bytes]] = deque()  # (when it arrives, frame)
        self.free_at = 0.0  # when the last frame of the queue has been sent
        self.random = random.Random(0)

    def receive(self) -> None:
        """Put the frames that have come into the queue."""
        for _ in range(BATCH):
            try:
                frame = self.source.recv(FRAME)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENETDOWN:  # the cable has been pulled
                    raise
                return
            if self.random.random() < self.loss:
                continue
            now = time.monotonic()
            start = max(self.free_at, now)
            if start - now <= QUEUE_SECONDS:
                self.free_at = start + (8 * (len(frame) - HEADER) / self.rate if self.rate else 0.0)
                self.queue.append((self.free_at + self.delay, frame))

    def send_due(self) -> None:
        """Send the frames whose time has come; a frame that the interface refuses is lost."""
        while self.queue and self.queue[0][0] <= time.monotonic():
            _, frame = self.queue.popleft()
            try:
                self.sink.send(frame)
            except OSError as error:
                if error.errno not in (errno.ENETDOWN, errno.EAGAIN, errno.ENOBUFS):
                    raise


def open_interface(name: str) -> socket.socket:
    """Return a socket for all frames of an interface, without those that it sends."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # bound below: no frame of another interface gets in
    found.setblocking(False)
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    found.bind((name, ALL_PROTOCOLS))
    return found


def main(inner: str, outer: str, delay: float, rate: float, loss: float) -> None:
    """Copy frames until standard input ends."""
    host, network = open_interface(inner), open_interface(outer)
    outgoing, incoming = Direction(host, network, delay, rate, loss), Direction(network, host, 0.0, rate, 0.0)
    directions = {host.fileno(): outgoing, network.fileno(): incoming}
    print("ready", flush=True)
    while True:
        due = [each.queue[0][0] for each in directions.values() if each.queue]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for ready in select.select([0, *directions], [], [], timeout)[0]:
            if ready == 0:
                if not os.read(0, 1):
                    return
            else:
                directions[ready].receive()
        for direction in directions.values():
            direction.send_due()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:]))
