"""How gradients meet: what is wrong with `exchange` and its own settings, beside the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from unisono.errors import Problem
from unisono.settings.axes import FILL, Axes
from unisono.settings.every import LocalSettings, ServerSettings
from unisono.settings.line import Line
from unisono.settings.values import shown
from unisono.settings.words import plural

DIVIDED = ("shard", "context", "tensor", "pipeline")
"""Axes along which a model, or what it computes, is divided."""

CARRIES: dict[str, tuple[str, ...]] = {
    "tree": DIVIDED,
    "allreduce": DIVIDED,
    "wide": DIVIDED,
    "ring": DIVIDED,
    "ddp": (),
    "server": (),
    "local": (),
}
"""Axes that an exchange goes with, beside replicas."""

OWN = {"server": ServerSettings, "local": LocalSettings}
"""Settings that only the exchange of their name reads."""


def problems_of_exchange(values: Mapping[str, Any], axes: Axes, line: Line) -> list[Problem]:
    """`values`: of the settings that count, by their dotted names. `axes`: the mesh that the processes form."""
    exchange = values.get("exchange", "tree")
    problems = _not_carried(exchange, values, axes, line) + _not_read(exchange, values, line)
    problems += _not_claimed(exchange, values, axes, line)
    return problems + (_roles(values, axes, line) if exchange == "server" else [])


def computing(values: Mapping[str, Any], axes: Axes) -> int:
    """How many processes share the virtual ranks of a step: not those who serve, and where each worker has steps of its
    own, it has all of them."""
    if values.get("exchange") != "server":
        return axes.data
    return max(axes.data - values.get("server.count", 1), 1) if values.get("server.staleness", 0) == 0 else 1


def _roles(values: Mapping[str, Any], axes: Axes, line: Line) -> list[Problem]:
    """What does not go together with parameter servers."""
    problems, count = [], values.get("server.count", 1)
    workers, bound = axes.data - count, values.get("server.staleness", 0)
    if workers < 1:
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


def _not_claimed(exchange: str, values: Mapping[str, Any], axes: Axes, line: Line) -> list[Problem]:
    """What does not go together with claims."""
    if not values.get("deal.claim"):
        return []
    compress = values.get("compress.kind", "none")
    others: dict[str, tuple[Any, Any]] = {"exchange": (exchange, "tree"), "compress.kind": (compress, "none")}
    others |= {f"parallel.{axis}": (getattr(axes, axis), 1) for axis in DIVIDED}
    true = "Whoever is free computes a whole virtual rank, and the tree adds up what it makes of it."
    return [
        Problem(
            f"deal.claim = true and {name} = {value}",
            true,
            f"{line.setting('deal.claim=false')}, or: {line.setting(f'{name}={instead}')}",
        )
        for name, (value, instead) in others.items()
        if value != instead
    ]


def _not_carried(exchange: str, values: Mapping[str, Any], axes: Axes, line: Line) -> list[Problem]:
    """An axis that the exchange cannot go with."""
    problems = []
    for axis in DIVIDED:
        size = getattr(axes, axis)
        if size == 1:
            continue
        asked = f"exchange = {exchange} and parallel.{axis} = {size}"
        if axis not in CARRIES[exchange]:
            true = "This exchange adds up gradients of whole models."
            do = f"{line.setting('exchange=tree')}, or: {line.setting(f'parallel.{axis}=1')}"
            problems.append(Problem(asked, true, do))
        elif axis == "shard" and exchange != "tree" and values.get("parallel.gather") == "layer":
            true = "Shards that are gathered layer by layer send each gradient through the tree at once."
            do = f"{line.setting('exchange=tree')}, or: {line.setting('parallel.gather=step')}"
            problems.append(Problem(asked, true, do))
    return problems


def _not_read(exchange: str, values: Mapping[str, Any], line: Line) -> list[Problem]:
    """A setting that was changed, and that nobody reads."""
    problems = []
    for other, kind in OWN.items():
        for field in fields(kind):
            value = values.get(name := f"{other}.{field.name}", field.default)
            if exchange != other and value != field.default:
                true = f"It is for exchange={other}, and exchange = {exchange}."
                do = f"{line.setting(f'exchange={other}')}, or: {line.setting(f'{name}={shown(field.default)}')}"
                problems.append(Problem(f"{name} = {shown(value)}", true, do))
    return problems
