"""Sites that train by themselves between two meetings: how many there are, and what does not go together with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import inf
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.mesh_shape import MeshShape
from unisono.config.schema import LocalSGDSettings
from unisono.config.value_types import shown
from unisono.config.wording import plural
from unisono.errors import Problem


def sites_of(settings: Any) -> int:
    """How many sites train by themselves between two meetings; 1: all processes make every step together."""
    return {"local_sgd": int(settings.local_sgd.sites)}.get(settings.exchange, 1)


def problems_of_sites(values: Mapping[str, Any], axes: MeshShape | None, line: CommandLine) -> list[Problem]:
    """Sites have equally many virtual ranks and processes. `axes`: None, where the processes form no mesh."""
    sites, problems = values.get("local_sgd.sites", LocalSGDSettings.sites), _of_meetings(values, line)
    if axes is None or sites < 2:
        return problems
    size, ranks, batch = axes.size, values.get("virtual_ranks"), values.get("batch")
    if ranks is not None and ranks % sites and ranks >= 1:
        true = f"Every site has as many virtual ranks as the others: multiples of {sites}."
        fewer, more = ranks // sites * sites, -(-ranks // sites) * sites
        fits = [n for n in (fewer, more) if n >= size and n > 0 and (batch is None or n <= batch)]
        dos = [str(line.setting(f"virtual_ranks={n}")) for n in fits] + _other_sites(ranks, sites, line)
        problems.append(Problem(f"virtual_ranks = {ranks} and local_sgd.sites = {sites}", true, ", or: ".join(dos)))
    if size % sites:
        true = f"Every site has as many processes as the others, and one at least: multiples of {sites}."
        fits = [n for n in (-(-size // sites) * sites, size // sites * sites) if n > 0]
        dos = [str(line.in_processes(n)) for n in fits] + _other_sites(size, sites, line)
        asked = f"{plural(size, 'process', 'processes')} and local_sgd.sites = {sites}"
        problems.append(Problem(asked, true, ", or: ".join(dos)))
    return problems


def _other_sites(count: int, sites: int, line: CommandLine) -> list[str]:
    """The nearest number of sites that so many things can be dealt to."""
    fits = [n for n in range(2, count + 1) if count % n == 0]
    return [str(line.setting(f"local_sgd.sites={min(fits, key=lambda n: abs(n - sites))}"))] if fits else []


def _of_meetings(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """When sites meet, and what they make of it."""
    known = {field.name: values.get(f"local_sgd.{field.name}", field.default) for field in fields(LocalSGDSettings)}
    problems = []

    def problem(name: str, true: str, *better: Any) -> None:
        dos = [str(line.setting(f"local_sgd.{setting}")) for setting in better]
        problems.append(Problem(f"local_sgd.{name} = {shown(known[name])}", true, ", or: ".join(dos)))

    every = known["sync_every"]
    if known["num_fragments"] > every >= 1:
        true = f"Sites meet every {plural(every, 'step')}, and at most one part of the model in each."
        problem("num_fragments", true, f"num_fragments={every}", f"sync_every={known['num_fragments']}")
    if known["sync_delay"] >= every >= 1:
        true = f"It must have arrived before the next meeting, {plural(every, 'step')} later."
        problem("sync_delay", true, f"sync_delay={every - 1}", f"sync_every={known['sync_delay'] + 1}")
    if not 0 < known["outer_lr"] < inf:
        problem("outer_lr", "An outer learning rate is a finite number above 0.", "outer_lr=0.7")
    if not 0 <= known["outer_momentum"] < 1:
        problem("outer_momentum", "The outer momentum is at least 0 and below 1.", "outer_momentum=0.9")
    for name in ("outer_lr", "outer_momentum"):
        default = getattr(LocalSGDSettings, name)
        if known["outer_optimizer"] == "average" and known[name] != default:
            true = "The mean of the sites is taken as it is: nothing else has a say."
            problem(name, true, "outer_optimizer=nesterov", f"{name}={shown(default)}")
    return problems
