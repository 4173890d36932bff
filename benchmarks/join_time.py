"""Seconds that processes take to form their group, plain and with secure.transport=tls.

    python -m benchmarks.join_time [--turns 9]

The processes are on this host, and with TLS each counts as a host of its own: all connections have certificates. Plain
and TLS alternate. The time is that of the slowest process, from a forked process to its first collective, with the
import of the package cryptography.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

from benchmarks.machine import line
from unisono.config.schema import SecureSettings
from unisono.distributed.connections.door import PeerAddress
from unisono.distributed.init import join_process_group
from unisono.environment import World
from unisono.testing import run_ranks

SIZES = (2, 4, 8)


def join(world: World, transport: str) -> float:
    """Join the group, and return the seconds that it took."""
    PeerAddress.is_here = lambda self: False  # type: ignore[method-assign]
    began = time.perf_counter()
    with join_process_group(world, secure=SecureSettings(transport=transport)) as group:  # type: ignore[arg-type]
        group.sum_(torch.ones(1))
        return time.perf_counter() - began


def main() -> None:
    """Print a table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--turns", type=int, default=9)
    turns = flags.parse_args().turns
    print(line(), flush=True)
    print(f"{'processes':>9} {'plain':>8} {'TLS':>8} {'more':>8}")
    for size in SIZES:
        seconds: dict[str, list[float]] = {"plain": [], "tls": []}
        for _ in range(turns):
            for transport, found in seconds.items():
                found.append(max(run_ranks(partial(join, transport=transport), size)))
        plain, tls = (statistics.median(found) for found in seconds.values())
        print(f"{size:9} {plain:7.3f}s {tls:7.3f}s {tls - plain:7.3f}s", flush=True)


if __name__ == "__main__":
    main()
