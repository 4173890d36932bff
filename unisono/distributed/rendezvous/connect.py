"""Connect all processes or none: all of them try together, and repeat the attempt until all are connected.

torch names a group by a counter, and its processes find each other under that name. The counter increases in a failed
attempt as well, and returns to 0 when a group was created and left. So a process that had connected and one that had
not would use different names in all later attempts (torch 2.13). Therefore this module sets the counter before each
attempt.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.distributed.backends.backend_choice import OWN
from unisono.distributed.process_group import TIMEOUT
from unisono.errors import WorldError
from unisono.torch_compat.process_groups import abort_default_group, set_group_count, set_timeout

CONNECT_TIMEOUT, CONNECT_TIMEOUT_PER_PROCESS = timedelta(seconds=4), timedelta(seconds=0.1)
"""gloo's timeout for connecting once all processes have started, and the addition for each process."""

ELASTIC_TIMEOUT, ELASTIC_TIMEOUT_PER_PROCESS = timedelta(seconds=0.3), timedelta(seconds=0.02)
"""These timeouts if processes may die meanwhile: 2 s for four processes, by gloo's count. Connecting takes 30 ms when
all have started. If a process dies in that time, the others wait in vain: gloo cannot be woken while it connects."""

GLOO_RELAXATION = 5
"""gloo waits this many times its timeout for a connection (its `relaxedTimeout`; 1.6 s became 8.0, measured), though
not for an address in the store."""

TIMED = ("gloo", "nccl")
"""Back ends whose timeout torch can change after connecting. Another one keeps the timeout with which it was made."""

CONNECT_IN_TIME = (*TIMED, *OWN)
"""Back ends whose first timeout limits connecting alone. Ours uses it for nothing else."""

ATTEMPTS = 5
"""On a busy machine gloo sometimes waits for a connection that exists (1 in some thousand groups, measured). Each
attempt has twice the timeout of the one before."""

LEAVE_SECONDS = 5.0
"""Time limit for the threads of a group that this process leaves, in seconds."""


def connect(
    store: dist.Store, rank: int, size: int, backend: str, first: timedelta | None = None, limit: float = math.inf
) -> None:
    """Create torch's default group of these processes.

    Waits until all processes have started, however long a host takes. Then connecting has a short timeout, and is
    repeated if it fails.

    Args:
        store: the store through which the processes find each other.
        rank: the rank of this process.
        size: the number of processes.
        backend: the back end of the group.
        first: gloo's timeout in the first attempt.
        limit: seconds that all attempts may take together.
    """
    count_arrivals(store, size, "here")
    if backend not in CONNECT_IN_TIME and first is None:
        first = TIMEOUT

    def connect_once(attempt: int, timeout: timedelta) -> None:
        set_group_count(0)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )

    connect_all(store, rank, size, "connected", connect_once, leave_group, first, limit)
    if backend in TIMED:
        set_timeout(TIMEOUT)


def first_timeout(size: int) -> timedelta:
    """Return gloo's timeout for a first attempt if processes may die meanwhile."""
    return ELASTIC_TIMEOUT + size * ELASTIC_TIMEOUT_PER_PROCESS


def leave_group(*, abort: bool = False) -> None:
    """Leave torch's default group, if there is one.

    Destroying it waits for its threads, and one of these may wait in a collective that never ends (membership.py). Such
    a thread remains.

    Args:
        abort: end all collectives, as NCCL can. They have ended on the device when this returns.
    """
    if not dist.is_initialized():
        return
    held = [dist.group.WORLD]
    if abort:
        abort_default_group()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    else:
        dist.destroy_process_group()
    destructor = threading.Thread(target=held.clear, name="group", daemon=True)
    destructor.start()
    destructor.join(LEAVE_SECONDS)


def connect_all(
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    connect_once: Callable[[int, timedelta], None],
    disconnect: Callable[[], None],
    first: timedelta | None = None,
    limit: float = math.inf,
) -> None:
    """Connect all processes. If one of them fails, all disconnect and try again with a longer timeout. Collective.

    Args:
        store: the store that counts the attempts.
        rank: the rank of this process.
        size: the number of processes.
        name: prefix of the keys in the store.
        connect_once: connect_once(attempt, timeout) connects, or raises RuntimeError.
        disconnect: undoes a successful or a failed connect_once.
        first: timeout of the first attempt.
        limit: seconds that all attempts may take together.

    Raises:
        WorldError: all attempts failed.
    """
    timeout = first or CONNECT_TIMEOUT + size * CONNECT_TIMEOUT_PER_PROCESS
    longest = GLOO_RELAXATION * timeout.total_seconds()
    attempts = max(n for n in range(1, ATTEMPTS + 1) if n == 1 or (2**n - 1) * longest <= limit)
    for attempt in range(1, attempts + 1):
        error: RuntimeError | None = None
        try:
            connect_once(attempt, 2 ** (attempt - 1) * timeout)
        except RuntimeError as caught:
            error = caught
        # a process that has connected must try again as well if another one has not
        if count_arrivals(store, size, f"{name}-{attempt}", error is None) == size:
            return
        disconnect()
    reason = str(error).splitlines()[0] if error else "another process could not connect."
    raise WorldError(
        f"Process {rank} cannot connect to the other {size - 1}.",
        f"All are started, but {attempts} attempts failed: {reason}",
        "unisono doctor; on several networks, name one that all hosts share: GLOO_SOCKET_IFNAME=eth0 ...",
    ) from error


def same_everywhere(store: dist.Store, size: int, kind: str) -> bool:
    """Return whether all processes pass the same `kind`. Collective."""
    store.add(f"kind-{kind}", 1)
    count_arrivals(store, size, "kinds")
    return store.add(f"kind-{kind}", 0) == size


def count_arrivals(store: dist.Store, size: int, name: str, success: bool = True) -> int:
    """Wait until all processes have called this, and return how many passed True. Collective."""
    store.add(f"{name}-yes", int(success))
    if store.add(f"{name}-count", 1) == size:  # the last process writes the result
        store.set(name, str(store.add(f"{name}-yes", 0)))
    store.wait([name], TIMEOUT)
    return int(store.get(name))
