"""Join and leave the group of a run's processes. All leave together, so that none aborts at exit."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.config.schema import SecureSettings
from unisono.config.wording import plural
from unisono.distributed import existing_group
from unisono.distributed.backends.backend_choice import AUTO, RELIED_ON, Transport, choose_transport
from unisono.distributed.backends.operations_test import require_operations
from unisono.distributed.connections.collective_group import TCP, register
from unisono.distributed.connections.private_store import private_store
from unisono.distributed.link_rates import find_links
from unisono.distributed.membership.membership import SCHEME, Membership
from unisono.distributed.membership.regroup_timeout import FORM_SECONDS
from unisono.distributed.process_group import TIMEOUT, ProcessGroup
from unisono.distributed.rendezvous.connect import (
    CONNECT_IN_TIME,
    TIMED,
    connect,
    connect_all,
    count_arrivals,
    first_timeout,
    same_everywhere,
)
from unisono.distributed.rendezvous.host_names import require_own_host_name, resolve_rendezvous_host
from unisono.distributed.rendezvous.hosted_store import host_store
from unisono.distributed.rendezvous.interfaces import choose_interface
from unisono.distributed.rendezvous.peer_check import require_peers
from unisono.distributed.rendezvous.reachable import Patience, reach, require_own_address
from unisono.distributed.rendezvous.silent_hosts import SILENCE_LIMIT
from unisono.distributed.rendezvous.store import RendezvousStore
from unisono.distributed.rendezvous.store_prefix import enter_round
from unisono.distributed.shared_memory import find_neighbors
from unisono.environment import World, agent_hosts_store, host_of, join_port, variables
from unisono.environment.addresses import HOSTED
from unisono.errors import WorldError
from unisono.torch_compat.process_groups import default_store, group_count, set_group_count, set_timeout

PLAIN = SecureSettings()
"""The settings by default: nothing is encrypted."""


def choose_device(world: World, index: int | None) -> torch.device:
    """Return the accelerator with this index; the CPU if there is no accelerator or `index` is None.

    Raises:
        WorldError: this host has accelerators, but none with this index.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or index is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if index >= count:
        raise WorldError(
            f"Process {world.rank} has no {accelerator.type} device.",
            f"It would use device {index}, and this host has {count}.",
            f"start {plural(count, 'process', 'processes')} here; or let several share a device (unisono run: "
            "--ranks-per-device N); or hide the devices from some, which then compute on the CPU (unisono run: "
            "--cpu-ranks N; torchrun and srun: CUDA_VISIBLE_DEVICES=).",
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def device_kind(device: torch.device) -> str:
    """Return cpu, cuda, rocm, xpu, ...: devices of one kind share a back end.

    torch calls AMD's devices `cuda` too, but uses RCCL for them, which does not connect to NVIDIA's NCCL.
    """
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that select which of a host's accelerators a process sees."""


def visible_devices() -> str:
    """Return a text that identifies the accelerators which this process sees.

    Slurm may show each task another device under the same index, but most devices (CUDA, ROCm, XPU) have a `uuid`.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "none"
    properties = getattr(torch.get_device_module(accelerator), "get_device_properties", lambda index: None)
    names = [str(getattr(properties(index), "uuid", index)) for index in range(torch.accelerator.device_count())]
    return f"{variables(VISIBLE_DEVICES)} {names}"


def find_device_index(world: World, store: dist.Store) -> int:
    """Return the index of this process's accelerator among those that it sees, under another launcher. Collective.

    The index is the local rank if all processes of a host see the same devices. Otherwise those that see the same ones
    take them in any order. The index is meaningless in a process that sees none.
    """
    key = f"devices of {world.host} with {visible_devices()}"
    store.add(key, 1)
    count_arrivals(store, world.size, "devices")
    return world.local_rank if store.add(key, 0) == world.local_size else store.add(f"{key}, taken", 1) - 1


@contextmanager
def join_process_group(
    world: World, *, divided: bool = False, backend: str = AUTO, secure: SecureSettings = PLAIN
) -> Iterator[ProcessGroup]:
    """Join the group of all processes of the run, and leave it together with them.

    Leaving waits for all processes and then destroys the group: a process that exits while gloo's threads communicate
    sometimes aborts (6 of 24 runs, measured). After an exception this process waits for no other, neither here nor at
    the end of the interpreter.

    Args:
        world: this process's place in the run.
        divided: whether several processes share a model.
        backend: the setting `backend`.
        secure: whether messages between hosts are encrypted, and with which certificates.

    Raises:
        WorldError: the back end cannot connect these processes, or its operations are wrong.
    """
    if world.size == 1:
        yield ProcessGroup(0, 1, choose_device(world, world.device_index))
        return
    atexit.register(exit_watchdog)
    gloo = world.cpu_ranks > 0 or shares_devices(world) or not torch.accelerator.is_available() or backend == "gloo"
    survives = backend in (AUTO, *RELIED_ON) and (gloo or world.least)
    if (world.store or "").startswith(SCHEME) and survives:
        with join_elastic(world, divided=divided, backend=backend, secure=secure) as joined:
            yield joined
    else:
        with join_fixed(world, backend, secure) as joined:
            yield joined
    atexit.unregister(exit_watchdog)


def shares_devices(world: World) -> bool:
    """Return whether several processes of the run use one accelerator."""
    return world.devices.ranks_per_device > 1 and torch.accelerator.is_available()


SLOW_START_SECONDS = 20.0
"""Seconds after which a process that waits for the others prints a warning. All processes of a run start together."""


@contextmanager
def warn_if_slow(world: World) -> Iterator[None]:
    """Log a warning if this block, which waits for the other processes, takes long."""
    host_and_port = host_of(world.store)
    at = f" at {join_port(*host_and_port)}" if host_and_port is not None else ""
    message = f"Process {world.rank} of {world.size} waits for the others{at}: have all of them been started?"
    timer = threading.Timer(SLOW_START_SECONDS, logging.getLogger("unisono").warning, [message])
    timer.daemon = True
    if world.local_rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def join_fixed(world: World, backend: str, secure: SecureSettings) -> Iterator[ProcessGroup]:
    """Join a group whose processes all stay until the end of the run. `backend` and `secure`: the settings."""
    encrypted = secure.transport == "tls"
    with warn_if_slow(world):
        store = _store(world)
        require_peers(world, store, choose_interface(world, store))
        if encrypted:
            store = private_store(world, secure, store)
        device = choose_device(world, find_device_index(world, store) if world.foreign else world.device_index)
        mixed = not same_everywhere(store, world.size, device_kind(device))
    transport = _choose_transport(world, backend, device, mixed=mixed, encrypted=encrypted)
    require_own_host_name(world, transport.backend)
    if world.store == existing_group.EXISTING:
        existing_group.use_group(torch.device("cpu") if transport.staged else device, transport.backend)
    else:
        connect(store, world.rank, world.size, transport.backend)
    if transport.backend not in RELIED_ON:
        require_operations(world, store, device, transport)
    joined = build_group(world, device, mixed=mixed, staged=transport.staged, backend=transport.backend)
    SILENCE_LIMIT.add()
    yield joined
    if dist.is_initialized():  # asynchronous workers have left before: param_server/async_run.py
        joined.barrier()
        if world.store != existing_group.EXISTING:
            dist.destroy_process_group()


def _choose_transport(world: World, backend: str, device: torch.device, *, mixed: bool, encrypted: bool) -> Transport:
    """Return the way of messages. torch can make groups for it from then on, except with TLS (private_store.py)."""
    size = 1 if world.store == existing_group.EXISTING else world.size  # the script's group is what it is
    staged = mixed or shares_devices(world)
    transport = choose_transport(backend, device, size, staged=staged, encrypted=encrypted)
    if transport.backend == TCP:
        register(world.host)
    return transport


EXIT_SECONDS = 30.0
"""A failed process ends this long after its script, at the latest. Its atexit handlers may take as long."""
RELEASE_SECONDS = 0.1
"""Enough for a thread of gloo's that waits for the interpreter lock to release a tensor."""


def exit_watchdog() -> None:
    """End a failed process, whose torch group still exists, in time. Runs when its interpreter is about to end.

    The group's threads release tensors, and need the interpreter lock for that; one that is too late aborts the
    process. And the group's destructor waits until every collective is over, and so for peers that may wait for this
    process. Only a thread without Python can end that.
    """
    time.sleep(RELEASE_SECONDS)
    null = open(os.devnull, "w")  # noqa: SIM115  (open until the end of the process)
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=null)


@contextmanager
def join_elastic(world: World, *, divided: bool, backend: str, secure: SecureSettings) -> Iterator[ProcessGroup]:
    """Join a group whose processes continue without one that dies.

    A process that joins later is alone at first. If it will hold a part of a model, it is in a fake group meanwhile.
    """
    device = choose_device(world, world.device_index)
    mixed = 0 < world.cpu_ranks < world.size and torch.accelerator.is_available()
    encrypted = secure.transport == "tls"
    transport = _choose_transport(world, backend, device, mixed=mixed, encrypted=encrypted)
    membership = Membership(world, transport.backend)
    if encrypted:
        private_store(world, secure, membership.store)
    joined, reference = ProcessGroup(0, 1, device, mixed, transport.staged, monitor=membership), None
    if not world.joins:
        membership.regroup(joined)
    elif divided:
        from unisono.distributed.fake_group import fake_group  # the import takes half a second

        joined, reference = fake_group(world.rank, world.size, membership)
    yield joined
    membership.leave()
    del reference


def build_group(
    world: World, device: torch.device, *, mixed: bool = False, staged: bool = False, backend: str = "gloo"
) -> ProcessGroup:
    """Return the group of the run's processes, whose torch group exists. Collective."""
    group = ProcessGroup(world.rank, world.size, device, mixed, staged, backend=backend)
    pids, hosts = find_neighbors(group)
    group = replace(group, neighbors=pids, hosts=hosts)
    return replace(group, links=find_links(group))


def new_line_group(
    lines: Sequence[tuple[int, ...]], rank: int, size: int, *, elastic: bool = False
) -> dist.ProcessGroup | None:
    """Make torch's groups of these lines of a mesh, and return the one with `rank`; None if none has it. Collective.

    Args:
        lines: the ranks of each line.
        rank: the rank of this process.
        size: the number of processes.
        elastic: whether processes may die meanwhile, after which the others try again without them.
    """
    groups: list[dist.ProcessGroup] = []
    count, backend = group_count(), dist.get_backend()

    def connect_once(attempt: int, timeout: timedelta) -> None:
        set_group_count(count + (attempt - 1) * len(lines))  # names that no failed attempt has used
        seconds = timeout if backend in CONNECT_IN_TIME else TIMEOUT
        groups.extend(dist.new_group(list(line), timeout=seconds) for line in lines)

    def disconnect() -> None:
        for group in groups:
            if isinstance(group, dist.ProcessGroup):  # torch returns an int for a line without this process
                dist.destroy_process_group(group)
        groups.clear()

    store = dist.PrefixStore(f"lines-{count}-{lines}", default_store())
    first, limit = (first_timeout(size), FORM_SECONDS) if elastic else (None, math.inf)
    connect_all(store, rank, size, "connected", connect_once, disconnect, first, limit)
    mine = next((group for line, group in zip(lines, groups, strict=True) if rank in line), None)
    if mine is not None and backend in TIMED:
        set_timeout(TIMEOUT, mine)
    if not elastic:
        SILENCE_LIMIT.add_more()
    return mine


def _store(world: World) -> dist.Store:
    """Return the store through which the processes find each other."""
    assert world.store is not None
    if world.store.startswith(SCHEME):
        return RendezvousStore.at(world.store.removeprefix(SCHEME), TIMEOUT)
    if world.store.startswith("file://"):
        return dist.FileStore(world.store.removeprefix("file://"), world.size)
    if world.store == existing_group.EXISTING:
        return existing_group.store()
    if world.store.startswith(HOSTED):
        return host_store(world, Patience.here())
    store: dist.Store
    store, _, _ = next(dist.rendezvous(_checked_rendezvous(world), world.rank, world.size, timeout=TIMEOUT))
    return enter_round(store, world.rank, world.size, TIMEOUT)


def _checked_rendezvous(world: World) -> str:
    """Return torch's address of the store of torchrun's variables, once it can be reached.

    Raises:
        UnreachableHostError: it cannot.
    """
    assert world.store is not None
    host_and_port = host_of(world.store)
    if host_and_port is None:
        return world.store
    patience = Patience.here()
    resolve_rendezvous_host(world, patience.lookup)
    if world.rank > 0 or agent_hosts_store():
        reach(world, patience)
    else:
        require_own_address(world, patience)
    # torch takes no brackets in MASTER_ADDR
    return f"tcp://{join_port(*host_and_port)}" if ":" in host_and_port[0] else world.store
