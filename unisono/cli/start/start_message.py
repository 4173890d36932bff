"""The first lines of a run: processes, devices, virtual ranks, and the run directory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from unisono import __version__
from unisono.cli.request.run_dir import ARGUMENTS
from unisono.cli.request.run_options import RunRequest
from unisono.config import Settings, plural
from unisono.config.wording import wrapped
from unisono.distributed.init import device_kind
from unisono.distributed.rendezvous.interfaces import describe_network
from unisono.machine.control_group import ControlGroup
from unisono.machine.host_load import usable_cores
from unisono.machine.kernel_files import KernelFiles
from unisono.monitor import console
from unisono.security.masking import mask_words
from unisono.train.recovery.survival import about_shards, may_survive

if TYPE_CHECKING:
    from unisono.checkpoint.load import Checkpoint
    from unisono.distributed.process_group import ProcessGroup
    from unisono.train.context import RunContext


def print_start(
    context: RunContext,
    request: RunRequest,
    resumed: Checkpoint | None,
    places: Sequence[ProcessPlace],
    *,
    fewer: bool,
) -> None:
    """Print the lines on rank 0.

    Args:
        context: the context of the run.
        request: its flags.
        resumed: the checkpoint that it continues from.
        places: where each process computes.
        fewer: whether the number of virtual ranks is the default, or less for a small batch.
    """
    s = context.settings

    def say(text: str) -> None:
        console.print_line(wrapped(text, context.world.width))

    share = -(-s.batch // s.virtual_ranks)
    micro = min(share, s.micro_batch or share)
    kinds = [place.kind for place in places]
    first, *others = [(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)]
    processes = ", ".join(
        [f"{plural(first[1], 'process', 'processes')} on {first[0]}", *(f"{n} on {on}" for on, n in others)]
    )
    each = context.world.devices.ranks_per_device
    processes += f", {each} to a device" if each > 1 and context.group.staged else ""
    threads = f"{s.threads} thread{'s' * (s.threads > 1)} each"
    more = "" if s.threads > 1 or context.device.type != "cpu" else " (--set threads=N: other bits, more cores)"
    span = f"1 to {s.virtual_ranks} processes" if s.virtual_ranks > 1 else "1 process"
    say(f"unisono {__version__}: {processes}, {threads}{more}")
    if set(kinds) == {"cpu"} and (crowding := about_cores(places, s.threads)):
        say(crowding)
    if network := describe_network(context.world):
        say(network)
    if s.secure.transport == "tls" and context.group.size > 1:
        own = f"certificates of {s.secure.ca}" if s.secure.ca else "certificates of the run's own authority"
        say(f"between hosts: TLS 1.3, {own}; within a host: shared memory and Unix sockets")
    why = f" (no more than the batch of {s.batch})" if fewer and s.virtual_ranks < Settings.virtual_ranks else ""
    say(f"{s.virtual_ranks} virtual rank{'s' * (s.virtual_ranks > 1)}{why}: {span}, micro-batches of {micro}")
    if fewer and resumed is None and (advice := about_small_shares(s.batch, s.virtual_ranks, context.group.size)):
        say(advice)
    if shards := about_shards(s.parallel, context.mesh.axes):
        say(shards)
    if context.group.size > max(1, context.world.least) and may_survive(context):
        say("if a process dies, the others finish the step, and a new process replaces it")
        if context.mesh.unit > 1:
            say(f"the {context.mesh.unit} processes that share a model replica leave and rejoin together")
    console.print_line(  # not wrapped, because a path is copied
        f"run directory: {request.run_dir}" + (f", continuing after step {resumed.steps}" if resumed else "")
    )
    if request.resume and request.own:
        console.print_line(f"arguments of the script: {shlex.join(mask_words(request.own))}")
    for change in context.progress.changes:
        if resumed is not None and change["field"] == ARGUMENTS and change["step"] == resumed.steps:
            what = f"{ARGUMENTS} change from {change['from']} to {change['to']}"
            console.print_line(f"{what}: results may differ from step {resumed.steps} on")


class ProcessPlace(NamedTuple):
    """Where a process computes.

    Attributes:
        kind: Its device type.
        host: Its host.
        cores: The numbers of the cores that it may use.
        quota: The number of cores that the quota of its container amounts to; None: no quota.
    """

    kind: str
    host: str
    cores: Sequence[int]
    quota: float | None

    @classmethod
    def of_all(cls, group: ProcessGroup, host: str) -> list[ProcessPlace]:
        """Gather the places of all processes. A collective; `host` is the name of this process's host."""
        quota = ControlGroup(KernelFiles()).cpus
        mine = cls(device_kind(group.device), host, sorted(usable_cores()), quota)
        return [cls(*place) for place in group.all_gather_object(mine)]


def about_cores(places: Sequence[ProcessPlace], threads: int) -> str:
    """Return a note on the first host whose processes have more threads than cores; "" if there is none."""
    for host in dict.fromkeys(place.host for place in places):
        here = [place for place in places if place.host == host]
        cores = min(len({core for place in here for core in place.cores}), here[0].quota or inf)
        if len(here) * threads > cores:
            shared = f"{plural(len(here), 'process', 'processes')} with {plural(threads, 'thread')} each"
            return f"{shared} on {cores:g} core{'s' * (cores != 1)} of {host}: more threads than cores add no speed"
    return ""


SMALL_SHARE = 2
"""Samples per virtual rank, up to which the overhead of micro-batches is most of a step."""


def about_small_shares(batch: int, virtual_ranks: int, processes: int) -> str:
    """Return advice if the default number of virtual ranks is slow for this batch; "" if it is not."""
    share, enough = -(-batch // virtual_ranks), max(processes, 2)
    if share > SMALL_SHARE or enough >= virtual_ranks:
        return ""
    each = f"each virtual rank has {plural(share, 'sample')} of the batch of {batch}, which is slow for a small model"
    return f"{each}: --set virtual_ranks={enough} is faster, on 1 to {enough} processes, with other bits"
