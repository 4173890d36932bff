"""Servers and workers: how many compute, and what does not go together with parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.mesh_shape import FILL, MeshShape
from unisono.config.value_types import shown
from unisono.config.wording import plural
from unisono.errors import Problem


def computing_processes(values: Mapping[str, Any], axes: MeshShape) -> int:
    """How many processes share the virtual ranks of a step: not those who serve, and where each worker has steps of its
    own, it has all of them."""
    if values.get("exchange") != "server":
        return axes.data
    return max(axes.data - values.get("server.count", 1), 1) if values.get("server.staleness", 0) == 0 else 1


def problems_of_roles(values: Mapping[str, Any], axes: MeshShape | None, line: CommandLine) -> list[Problem]:
    """What does not go together with parameter servers. `axes`: None, where the processes form no mesh."""
    problems, count, bound = [], values.get("server.count", 1), values.get("server.staleness", 0)
    workers = axes.data - count if axes is not None else 1
    if axes is not None and workers < 1:
        asked = f"exchange = server on {plural(axes.data, 'process', 'processes')}"
        true = f"{plural(count, 'server')} and at least 1 worker make {count + 1}."
        problems.append(Problem(asked, true, str(line.in_processes(count + 1))))
    if (replicas := values.get("parallel.replicate", FILL)) != FILL:
        true = "Its processes are servers and workers; there is one of each model."
        do = f"{line.setting('parallel.replicate=-1')}, or: {line.setting('exchange=tree')}"
        problems.append(Problem(f"exchange = server and parallel.replicate = {replicas}", true, do))
    if values.get("virtual_ranks") == 1:
        true = "One virtual rank draws its random numbers from one stream, which the server would have to save."
        problems.append(Problem("exchange = server and virtual_ranks = 1", true, str(line.setting("virtual_ranks=2"))))
    if bound is not None and 0 < bound < workers - 1:
        true = f"{workers} workers have {workers} gradients under way, so some are late by {workers - 1} updates."
        more = f"{line.setting(f'server.staleness={workers - 1}')}, or: {line.in_processes(bound + 1 + count)}"
        problems.append(Problem(f"server.staleness = {bound} with {workers} workers", true, more))
    if bound != 0 and (loaders := values.get("loader.workers", 0)) > 0:
        true = "A worker learns which step is its next one when it has done the last, so nothing can be fetched ahead."
        do = f"{line.setting('loader.workers=0')}, or: {line.setting('server.staleness=0')}"
        asked = f"server.staleness = {shown(bound)} and loader.workers = {loaders}"
        problems.append(Problem(asked, true, do))
    return problems
