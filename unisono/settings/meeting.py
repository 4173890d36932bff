"""How gradients meet: what is wrong with `exchange` and its own settings, beside the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from unisono.errors import Problem
from unisono.settings.axes import Axes
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


def sites_of(settings: Any) -> int:
    """How many sites train by themselves between two meetings; 1: all processes make every step together."""
    return {"local": int(settings.local.sites)}.get(settings.exchange, 1)


def problems_of_exchange(values: Mapping[str, Any], axes: Axes, line: Line) -> list[Problem]:
    """`values`: of the settings that count, by their dotted names. `axes`: the mesh that the processes form."""
    exchange = values.get("exchange", "tree")
    problems = _not_carried(exchange, values, axes, line) + _not_read(exchange, values, line)
    return problems + MORE.get(exchange, lambda *_: [])(values, line)


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


# -- sites


def problems_of_sites(values: Mapping[str, Any], size: int, line: Line) -> list[Problem]:
    """Sites have equally many virtual ranks and processes. `size`: processes in all."""
    sites = values.get("local.sites", LocalSettings.sites)
    if values.get("exchange") not in MORE or sites < 2:
        return []
    problems, ranks, batch = [], values.get("virtual_ranks"), values.get("batch")
    if ranks is not None and ranks % sites and ranks >= 1:
        true = f"Every site has as many virtual ranks as the others: multiples of {sites}."
        fewer, more = ranks // sites * sites, -(-ranks // sites) * sites
        fits = [n for n in (fewer, more) if n >= size and n > 0 and (batch is None or n <= batch)]
        dos = [str(line.setting(f"virtual_ranks={n}")) for n in fits] + _other_sites(ranks, sites, line)
        problems.append(Problem(f"virtual_ranks = {ranks} and local.sites = {sites}", true, ", or: ".join(dos)))
    if size % sites:
        true = f"Every site has as many processes as the others, and one at least: multiples of {sites}."
        fits = [n for n in (-(-size // sites) * sites, size // sites * sites) if n > 0]
        dos = [str(line.in_processes(n)) for n in fits] + _other_sites(size, sites, line)
        asked = f"{plural(size, 'process', 'processes')} and local.sites = {sites}"
        problems.append(Problem(asked, true, ", or: ".join(dos)))
    return problems


def _other_sites(count: int, sites: int, line: Line) -> list[str]:
    """The nearest number of sites that so many things can be dealt to."""
    fits = [n for n in range(2, count + 1) if count % n == 0]
    return [str(line.setting(f"local.sites={min(fits, key=lambda n: abs(n - sites))}"))] if fits else []


def _of_meetings(values: Mapping[str, Any], line: Line) -> list[Problem]:
    """When sites meet, and what they make of it."""
    known = {field.name: values.get(f"local.{field.name}", field.default) for field in fields(LocalSettings)}
    problems = []

    def problem(name: str, true: str, *better: Any) -> None:
        dos = [str(line.setting(f"local.{setting}")) for setting in better]
        problems.append(Problem(f"local.{name} = {shown(known[name])}", true, ", or: ".join(dos)))

    every = known["every"]
    if known["fragments"] > every >= 1:
        true = f"Sites meet every {plural(every, 'step')}, and at most one part of the model in each."
        problem("fragments", true, f"fragments={every}", f"every={known['fragments']}")
    if known["overlap"] >= every >= 1:
        true = f"It must have arrived before the next meeting, {plural(every, 'step')} later."
        problem("overlap", true, f"overlap={every - 1}", f"every={known['overlap'] + 1}")
    if not known["lr"] > 0:
        problem("lr", "An outer learning rate is a number above 0.", "lr=0.7")
    if not 0 <= known["momentum"] < 1:
        problem("momentum", "It is what stays of the last steps in the next one: at least 0, below 1.", "momentum=0.9")
    for name in ("lr", "momentum"):
        default = getattr(LocalSettings, name)
        if known["outer"] == "average" and known[name] != default:
            true = "The mean of the sites is taken as it is: nothing else has a say."
            problem(name, true, "outer=nesterov", f"{name}={shown(default)}")
    return problems


MORE = {"local": _of_meetings}
"""What else may be wrong with the settings of an exchange."""
