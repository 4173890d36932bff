"""The first lines of a run: processes, devices, virtual ranks, and the run directory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono import __version__
from unisono.cli.request.run_options import RunRequest
from unisono.config import Settings, plural
from unisono.config.wording import wrapped
from unisono.distributed.rendezvous.interfaces import describe_network
from unisono.machine.host_load import usable_cores
from unisono.monitor import console
from unisono.security.masking import mask_words
from unisono.train.recovery.survival import about_shards, may_survive

if TYPE_CHECKING:
    from unisono.checkpoint.load import Checkpoint
    from unisono.train.context import RunContext


def print_start(
    context: RunContext, request: RunRequest, resumed: Checkpoint | None, kinds: Sequence[str], *, fewer: bool
) -> None:
    """Print the lines on rank 0.

    Args:
        context: the context of the run.
        request: its flags.
        resumed: the checkpoint that it continues from.
        kinds: the device type of each process.
        fewer: whether the number of virtual ranks is the default, or less for a small batch.
    """
    s = context.settings

    def say(text: str) -> None:
        console.print_line(wrapped(text, context.world.width))

    share = -(-s.batch // s.virtual_ranks)
    micro = min(share, s.micro_batch or share)
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
    if set(kinds) == {"cpu"} and (crowding := about_cores(context.world.local_size, s.threads, len(usable_cores()))):
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
    if resumed is not None and request.own:
        console.print_line(f"arguments of the script: {shlex.join(mask_words(request.own))}")


def about_cores(processes: int, threads: int, cores: int) -> str:
    """Return a note if the processes of a host have more threads than cores; "" if they do not."""
    if processes * threads <= cores:
        return ""
    shared = f"{plural(processes, 'process', 'processes')} with {plural(threads, 'thread')} each"
    return f"{shared} on {plural(cores, 'core')} of this host: more threads than cores add no speed"


SMALL_SHARE = 2
"""Samples per virtual rank, up to which the overhead of micro-batches is most of a step."""


def about_small_shares(batch: int, virtual_ranks: int, processes: int) -> str:
    """Return advice if the default number of virtual ranks is slow for this batch; "" if it is not."""
    share, enough = -(-batch // virtual_ranks), max(processes, 2)
    if share > SMALL_SHARE or enough >= virtual_ranks:
        return ""
    each = f"each virtual rank has {plural(share, 'sample')} of the batch of {batch}, which is slow for a small model"
    return f"{each}: --set virtual_ranks={enough} is faster, on 1 to {enough} processes, with other bits"
