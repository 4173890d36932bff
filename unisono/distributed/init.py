"""Into a group of processes and out of it again. A finished job leaves together, so that none aborts at exit."""

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
from torch.distributed import distributed_c10d

from unisono.config.wording import plural
from unisono.distributed import existing_group
from unisono.distributed.membership.membership import SCHEME, Membership
from unisono.distributed.membership.regroup_timeout import FORM_SECONDS
from unisono.distributed.membership.waiting import TIMEOUT
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.rendezvous.connect import (
    connect,
    count_arrivals,
    first_timeout,
    number_groups_from,
    same_everywhere,
    wait_for_all,
)
from unisono.distributed.rendezvous.host_names import require_own_host_name, resolve_rendezvous_host
from unisono.distributed.rendezvous.hosted_store import HOSTED, host_store
from unisono.distributed.rendezvous.store import RendezvousStore
from unisono.distributed.rendezvous.store_prefix import enter_round
from unisono.distributed.shared_memory import find_neighbours
from unisono.environment import World, host_of, variables
from unisono.errors import WorldError


def choose_device(world: World, seat: int | None) -> torch.device:
    """The accelerator with this number, if there are any and it has one; else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or seat is None:
        return torch.device("cpu")
    there = torch.accelerator.device_count()
    if seat >= there:
        raise WorldError(
            f"Process {world.rank} was asked to use {accelerator.type} device {seat}.",
            f"This host has {there}.",
            f"start {plural(there, 'process', 'processes')} here, or hide the devices from some, which then compute "
            "on the CPU (unisono run: --cpu-ranks N; torchrun and srun: CUDA_VISIBLE_DEVICES=).",
        )
    torch.accelerator.set_device_index(seat)
    return torch.device(accelerator.type, seat)


def kind_of(device: torch.device) -> str:
    """cpu, cuda, rocm, xpu, ...: devices of one kind share a back end of torch's. torch calls AMD's devices `cuda` as
    well, but its NCCL is RCCL there, which does not connect to NVIDIA's."""
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


SHOWS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables by which a process is shown some of its host's accelerators."""


def visible_devices() -> str:
    """What this process sees of its host's accelerators. Slurm may show each task another one under the same number;
    but most tell their own names (CUDA's, ROCm's and XPU's: `uuid`)."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "none"
    about = getattr(torch.get_device_module(accelerator), "get_device_properties", lambda seat: None)
    names = [str(getattr(about(seat), "uuid", seat)) for seat in range(torch.accelerator.device_count())]
    return f"{variables(SHOWS)} {names}"


def find_device_index(world: World, store: dist.Store) -> int:
    """The number of this process's accelerator among those that it sees, where somebody else has started it: its local
    rank, if all processes of its host see the same ones; else those that do take them as they come. Everybody must
    ask, and who sees none gets any number."""
    those = f"seats of {world.host} with {visible_devices()}"
    store.add(those, 1)
    count_arrivals(store, world.size, "seats")
    return world.local_rank if store.add(those, 0) == world.local_size else store.add(f"{those}, taken", 1) - 1


@contextmanager
def join_process_group(world: World, *, divided: bool = False) -> Iterator[ProcessGroup]:
    """The group of all processes of `world`, joined on entry and left together on exit. `divided`: a model is to lie
    over several of them.

    Leaving waits for everybody and then destroys the group: a process that exits with gloo's threads still talking to
    peers aborts now and then (6 of 24 runs, measured). After an exception nobody is waited for, neither here nor when
    the interpreter ends.
    """
    if world.size == 1:
        yield ProcessGroup(0, 1, choose_device(world, world.seat))
        return
    atexit.register(exit_watchdog)
    gloo = world.cpu_ranks > 0 or not torch.accelerator.is_available()
    if (world.store or "").startswith(SCHEME) and (gloo or world.least):
        with join_elastic(world, divided=divided) as joined:
            yield joined
    else:
        with join_fixed(world) as joined:
            yield joined
    atexit.unregister(exit_watchdog)


LATE_SECONDS = 20.0
"""All processes of a run start together. Who has waited so long for the others says so, and waits on."""


@contextmanager
def warn_if_slow(world: World) -> Iterator[None]:
    """A block in which this process waits for the others."""
    where = host_of(world.store)
    place = f" at {where[0]}:{where[1]}" if where is not None else ""
    told = f"process {world.rank} of {world.size} waits for the others{place}: have all of them been started?"
    timer = threading.Timer(LATE_SECONDS, logging.getLogger("unisono").warning, [told])
    timer.daemon = True
    if world.local_rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def join_fixed(world: World) -> Iterator[ProcessGroup]:
    """The same, where all stay until the end."""
    with warn_if_slow(world):
        store = _store(world)
        device = choose_device(world, find_device_index(world, store) if world.foreign else world.seat)
        mixed = not same_everywhere(store, world.size, kind_of(device))
    backend = backend_of(device, mixed=mixed)
    require_own_host_name(world, backend)
    if world.store == existing_group.TAKEN:
        existing_group.use_group(torch.device("cpu") if mixed else device, backend)
    else:
        connect(store, world.rank, world.size, backend)
    joined = build_group(world, device, mixed=mixed)
    yield joined
    if dist.is_initialized():  # some part before: param_server/async_run.py
        joined.barrier()
        if world.store != existing_group.TAKEN:
            dist.destroy_process_group()


def backend_of(device: torch.device, *, mixed: bool) -> str:
    """torch's, for this device; where not all processes have the same kind of it, the one that every process has."""
    return "gloo" if mixed else dist.get_default_backend_for_device(device)


LEAVE_SECONDS = 30.0
"""Who has failed is gone so long after its script's end. What a script has asked Python to do then may take as long."""
LET_GO_SECONDS = 0.1
"""A thread of gloo's that was waiting for the interpreter, to let go of a tensor, has it by then, many times over."""


def exit_watchdog() -> None:
    """The interpreter of a process that has failed is about to end, with torch's group still there.

    Its threads let go of the tensors of what is done, and need the interpreter for that; one that comes too late aborts
    the process. And the group waits, in its destructor, until every collective under way is over, and so for others,
    who may be waiting for this process: only a thread without Python can end that.
    """
    time.sleep(LET_GO_SECONDS)
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (until the end)
    faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=nowhere)


@contextmanager
def join_elastic(world: World, *, divided: bool) -> Iterator[ProcessGroup]:
    """The same, where those who are left go on without one that dies. Who joins later is alone at first; if it is to
    hold a part of a model, it pretends that the others who hold it are there."""
    device = choose_device(world, world.seat)
    mixed = 0 < world.cpu_ranks < world.size and torch.accelerator.is_available()
    watched = Membership(world, backend_of(device, mixed=mixed))
    joined, kept = ProcessGroup(0, 1, device, mixed, company=watched), None
    if not world.joins:
        watched.regroup(joined)
    elif divided:
        from unisono.distributed.fake_group import fake_group  # half a second

        joined, kept = fake_group(world.rank, world.size, watched)
    yield joined
    watched.leave()
    del kept


def build_group(world: World, device: torch.device, *, mixed: bool = False) -> ProcessGroup:
    """The processes of `world`, whose process group is there. Every one of them must call this."""
    group = ProcessGroup(world.rank, world.size, device, mixed)
    return replace(group, neighbours=find_neighbours(group))


def new_line_group(
    lines: Sequence[tuple[int, ...]], rank: int, size: int, *, watched: bool = False
) -> dist.ProcessGroup:
    """torch's own group of that line of ranks which `rank` is in. All `size` processes must call this together.
    `watched`: some may die in it, and the others try again without them."""
    made: list[dist.ProcessGroup] = []
    known = distributed_c10d._world.group_count

    def connect_here(attempt: int, patience: timedelta) -> None:
        number_groups_from(known + (attempt - 1) * len(lines))  # what a failed attempt has left lies under other names
        made.extend(dist.new_group(list(line), timeout=patience) for line in lines)

    def part() -> None:
        for group in made:
            if isinstance(group, dist.ProcessGroup):  # torch returns a number for a line that we are not in
                dist.destroy_process_group(group)
        made.clear()

    store = dist.PrefixStore(f"lines-{lines}", distributed_c10d._get_default_store())
    first, limit = (first_timeout(size), FORM_SECONDS) if watched else (None, math.inf)
    wait_for_all(store, rank, size, "connected", connect_here, part, first, limit)
    mine = next(group for line, group in zip(lines, made, strict=True) if rank in line)
    distributed_c10d._set_pg_timeout(TIMEOUT, mine)
    return mine


def _store(world: World) -> dist.Store:
    """Where the processes meet."""
    assert world.store is not None
    if world.store.startswith(SCHEME):
        return RendezvousStore(world.store.removeprefix(SCHEME), TIMEOUT)
    if world.store.startswith("file://"):
        return dist.FileStore(world.store.removeprefix("file://"), world.size)
    if world.store == existing_group.TAKEN:
        return existing_group.store()
    if world.store.startswith(HOSTED):
        return host_store(world.store, world.rank)
    resolve_rendezvous_host(world)
    store: dist.Store
    store, _, _ = next(dist.rendezvous(world.store, world.rank, world.size, timeout=TIMEOUT))
    return enter_round(store, world.rank, world.size, TIMEOUT)
