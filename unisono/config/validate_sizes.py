"""Numbers that must fit each other: processes, the mesh, virtual ranks, pipeline stages, servers, sites, devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.conflicts import V_SHAPED
from unisono.config.mesh_shape import FILL, MeshShape, fill, fitting
from unisono.config.schema import LocalSGDSettings, Settings
from unisono.config.value_types import shown
from unisono.config.wording import plural
from unisono.errors import Problem


def computing_processes(values: Mapping[str, Any], axes: MeshShape) -> int:
    """Return how many processes share the virtual ranks of a step.

    Parameter servers compute none. An asynchronous worker computes all virtual ranks of its steps.
    """
    if values.get("exchange") != "server":
        return axes.data
    return max(axes.data - values.get("server.count", 1), 1) if values.get("server.staleness", 0) == 0 else 1


def number_of_sites(settings: Settings) -> int:
    """Return how many sites train independently between synchronizations; 1 without local SGD."""
    return settings.local_sgd.sites if settings.exchange == "local_sgd" else 1


def choose_mesh(values: Mapping[str, Any], size: int, line: CommandLine) -> tuple[MeshShape, list[Problem]]:
    """Return the mesh of `size` processes, and why they cannot form the mesh that the settings ask for."""
    names = {f"parallel.{name}": name for name in MeshShape._fields}
    sizes = {axis: values.get(name, FILL if axis == "replicate" else 1) for name, axis in names.items()}
    problems = [
        Problem(
            f"{name} = {sizes[axis]} is out of range.",
            "It must be at least 1, or -1 for all remaining processes.",
            str(line.setting(f"{name}=1")),
        )
        for name, axis in names.items()
        if sizes[axis] < 1 and sizes[axis] != FILL
    ]
    if problems:
        return MeshShape(), problems
    given = [name for name, axis in names.items() if sizes[axis] != FILL]
    filled = [name for name in names if name not in given]
    if len(filled) > 1:
        error = f"{' and '.join(f'{name} = -1' for name in filled)} cannot be combined."
        true = "Only one axis can take all remaining processes."
        return MeshShape(), [Problem(error, true, str(line.setting(f"{filled[0]}=1")))]
    axes = fill(sizes, size)
    if axes is not None:
        return axes, []
    fixed = {name: sizes[names[name]] for name in given}
    product = " times ".join(f"{name}={count}" for name, count in fixed.items() if count != 1) or f"{given[0]}=1"
    true = f"{product} needs {'a multiple of ' * bool(filled)}{prod(fixed.values())}."
    dos = [str(line.in_processes(n)) for n in fitting(sizes, size)]
    if not filled and "parallel.replicate" in given and size % prod(sizes[a] for a in sizes if a != "replicate") == 0:
        dos.append(str(line.setting("parallel.replicate=-1")))
    elif size == 1:
        dos.append(str(line.setting(*(f"{name}=1" for name, count in fixed.items() if count != 1))))
    return MeshShape(), [
        Problem(f"{plural(size, 'process', 'processes')} cannot form the mesh.", true, ", or: ".join(dos))
    ]


def check_batch(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """Refuse a batch with fewer samples than virtual ranks."""
    ranks, batch = values.get("virtual_ranks"), values.get("batch")
    if ranks is None or batch is None or not ranks > batch >= 1:
        return []
    true = f"Each virtual rank needs a sample, so batch = {batch} allows at most {plural(batch, 'virtual rank')}."
    do = f"{line.setting(f'virtual_ranks={batch}')}, or: {line.setting(f'batch={ranks}')}"
    return [Problem(f"virtual_ranks = {ranks} is more than the batch has samples.", true, do)]


def check_devices(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """parallel.devices names as many devices as one process uses."""
    ways = ("parallel.model_parallel_devices", "parallel.data_parallel_devices")
    named = values.get("parallel.devices")
    if not named or not all(way in values for way in ways):
        return []
    used = [way for way in ways if values[way] > 1]
    none, count = line.setting("parallel.devices=[]"), len(named)
    if not used:
        error = f"parallel.devices = {named} has no effect."
        true = f"It names devices for {' and '.join(ways)}, which are both 1."
        return [Problem(error, true, f"{line.setting(f'{ways[0]}={count}')}, or: {none}")]
    if count == values[used[0]]:
        return []
    true = f"It names {plural(count, 'device')}, and {used[0]} = {values[used[0]]}."
    do = f"{line.setting(f'{used[0]}={count}')}, or: {none}"
    return [Problem(f"parallel.devices = {named} has the wrong length.", true, do)]


def check_local_sgd(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """Fragments and delays fit between two synchronizations."""
    if values.get("exchange") != "local_sgd":
        return []
    every, fragments, delay = (
        values.get(f"local_sgd.{name}", getattr(LocalSGDSettings, name))
        for name in ("sync_every", "num_fragments", "sync_delay")
    )
    problems = []
    if fragments > every >= 1:
        true = f"At most one fragment is synchronized per step, and there are {plural(every, 'step')} between rounds."
        do = f"{line.setting(f'local_sgd.num_fragments={every}')}, or: "
        do += str(line.setting(f"local_sgd.sync_every={fragments}"))
        problems.append(Problem(f"local_sgd.num_fragments = {fragments} is more than sync_every.", true, do))
    if delay >= every >= 1:
        true = f"A synchronization must end before the next one begins, {plural(every, 'step')} later."
        do = f"{line.setting(f'local_sgd.sync_delay={every - 1}')}, or: "
        do += str(line.setting(f"local_sgd.sync_every={delay + 1}"))
        problems.append(Problem(f"local_sgd.sync_delay = {delay} is not below sync_every.", true, do))
    return problems


def check_processes(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """Each process that computes has at least one virtual rank."""
    ranks, size = values.get("virtual_ranks"), computing_processes(values, axes)
    if ranks is None or not size > ranks >= 1:
        return []
    batch, others = values.get("batch"), axes.data - size
    nouns = ("worker", "workers") if others else ("process", "processes")
    # More virtual ranks are another computation, so that comes second, and with the batch they need.
    more = [f"virtual_ranks={size}", *([f"batch={size}"] if batch is not None and size > batch else [])]
    do = f"{line.in_processes(ranks + others)}, or (other bits): {line.in_processes(size + others).setting(*more)}"
    true = f"Each of the {plural(ranks, 'virtual rank')} runs on one: 1 to {plural(ranks, *nouns)}."
    return [Problem(f"{plural(size, *nouns)} are more than virtual_ranks.", true, do)]


def check_groups(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """compress.groups is the width of a level of the tree."""
    groups, ranks = values.get("compress.groups"), values.get("virtual_ranks")
    if values.get("compress.kind", "none") == "none" or groups is None or ranks is None or min(groups, ranks) < 2:
        return []
    levels = sorted({2**i for i in range(1, ranks.bit_length()) if 2**i <= ranks} | {ranks})
    if groups in levels:
        return []
    best = min(levels, key=lambda level: abs(level - groups))
    true = f"The tree over {ranks} virtual ranks has levels of {', '.join(map(str, levels))} nodes."
    error = f"compress.groups = {groups} is no level of the tree."
    return [Problem(error, true, str(line.setting(f"compress.groups={best}")))]


def check_stages(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """parallel.split_points names the first module of each stage but the first."""
    schedule, per_rank, points = (
        values.get(f"parallel.{name}") for name in ("schedule", "stages_per_rank", "split_points")
    )
    if axes.pipeline == 1 or not points or per_rank is None or schedule is None:
        return []
    if schedule in V_SHAPED and per_rank != 2:
        return []  # that is a conflict of its own
    count = axes.pipeline * (1 if schedule in ONE_STAGE else per_rank)
    if len(points) == count - 1:
        return []
    error = f"parallel.split_points = {shown(points)} has the wrong length."
    true = f"{plural(count, 'stage')} need {plural(count - 1, 'split point')}."
    return [Problem(error, true, str(line.setting("parallel.split_points=[]")))]


ONE_STAGE = ("GPipe", "1F1B")
"""Pipeline schedules with one stage per process."""


def check_replicated_shards(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """parallel.replicate_shards needs shards."""
    if not values.get("parallel.replicate_shards") or "parallel.shard" not in values or axes.shard > 1:
        return []
    true = "It copies each shard to another process, and with parallel.shard = 1 there are no shards."
    if axes.replicate > 1:
        true += f" All {axes.replicate} replicas are copies of each other."
    error = "parallel.replicate_shards = true has no effect with parallel.shard = 1."
    off = str(line.setting("parallel.replicate_shards=false"))
    if axes.pipeline > 1:  # which has no shards
        return [Problem(error, true, off)]
    wanted = [f"parallel.shard={max(axes.replicate, 2)}"]
    wanted += ["parallel.replicate=-1"] * (values.get("parallel.replicate", -1) != -1)
    more = line if axes.replicate > 1 else line.in_processes(2 * axes.size)
    return [Problem(error, true, f"{more.setting(*wanted)}, or: {off}")]


def check_servers(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """There is at least one worker, and staleness allows for all of them."""
    if values.get("exchange") != "server":
        return []
    count, bound = values.get("server.count", 1), values.get("server.staleness", 0)
    workers = axes.data - count
    if workers < 1:
        error = f"exchange = server does not fit {plural(axes.data, 'process', 'processes')}."
        true = f"{plural(count, 'server')} and at least 1 worker make {count + 1}."
        return [Problem(error, true, str(line.in_processes(count + 1)))]
    if bound is None or not 0 < bound < workers - 1:
        return []
    true = f"Each of the {workers} workers has a gradient in flight, so some are late by {workers - 1} updates."
    do = f"{line.setting(f'server.staleness={workers - 1}')}, or: {line.in_processes(bound + 1 + count)}"
    return [Problem(f"server.staleness = {bound} is too small for {workers} workers.", true, do)]


def check_sites(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """Sites have equal numbers of virtual ranks and of processes."""
    sites = values.get("local_sgd.sites", LocalSGDSettings.sites)
    if values.get("exchange") != "local_sgd" or sites < 2:
        return []
    size, ranks, batch, problems = axes.size, values.get("virtual_ranks"), values.get("batch"), []
    if ranks is not None and ranks % sites and ranks >= 1:
        near = (ranks // sites * sites, -(-ranks // sites) * sites)
        fits = [n for n in near if n >= size and n > 0 and (batch is None or n <= batch)]
        dos = [str(line.setting(f"virtual_ranks={n}")) for n in fits] + _other_sites(ranks, sites, line)
        true = f"All sites have the same number of virtual ranks, so it must be a multiple of {sites}."
        problems.append(
            Problem(f"virtual_ranks = {ranks} cannot be divided among {sites} sites.", true, ", or: ".join(dos))
        )
    if size % sites:
        fits = [n for n in (-(-size // sites) * sites, size // sites * sites) if n > 0]
        dos = [str(line.in_processes(n)) for n in fits] + _other_sites(size, sites, line)
        true = f"All sites have the same number of processes, so there must be a multiple of {sites}."
        error = f"{plural(size, 'process', 'processes')} cannot be divided among {sites} sites."
        problems.append(Problem(error, true, ", or: ".join(dos)))
    return problems


def _other_sites(count: int, sites: int, line: CommandLine) -> list[str]:
    """Return the line with the nearest number of sites that divides `count`, if there is one."""
    fits = [n for n in range(2, count + 1) if count % n == 0]
    return [str(line.setting(f"local_sgd.sites={min(fits, key=lambda n: abs(n - sites))}"))] if fits else []


WITHOUT_MESH: tuple[Callable[[Mapping[str, Any], CommandLine], list[Problem]], ...] = (
    check_batch,
    check_devices,
    check_local_sgd,
)
"""Rules for settings alone."""

WITH_MESH: tuple[Callable[[Mapping[str, Any], MeshShape, CommandLine], list[Problem]], ...] = (
    check_stages,
    check_groups,
    check_servers,
    check_sites,
    check_replicated_shards,
    check_processes,
)
"""Rules for settings and the mesh that the processes form."""
