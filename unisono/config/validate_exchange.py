"""How gradients meet: what is wrong with `exchange` and its own settings, beside the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.mesh_shape import MeshShape
from unisono.config.schema import DdpSettings, LocalSGDSettings, ServerSettings
from unisono.config.validate_compression import problems_of_forms
from unisono.config.validate_local_sgd import problems_of_sites
from unisono.config.validate_server import problems_of_roles
from unisono.config.value_types import shown
from unisono.errors import Problem

DIVIDED = ("shard", "context", "tensor", "pipeline")
"""Axes along which a model, or what it computes, is divided."""

CARRIES: dict[str, tuple[str, ...]] = {
    "tree": DIVIDED,
    "allreduce": DIVIDED,
    "wide": ("shard", "context", "tensor"),
    "ring": DIVIDED,
    "ddp": (),
    "server": (),
    "local_sgd": (),
}
"""Axes that an exchange goes with, beside replicas."""

WHY_NOT = {
    ("wide", "pipeline"): "The grids of its sums are agreed on by all processes, and these hold different parameters.",
}
"""Where that is not because it adds up gradients of whole models."""

OWN = {"ddp": DdpSettings, "server": ServerSettings, "local_sgd": LocalSGDSettings}
"""Settings that one exchange alone reads."""


def problems_of_exchange(values: Mapping[str, Any], axes: MeshShape | None, line: CommandLine) -> list[Problem]:
    """`values`: of the settings that count, by their dotted names. `axes`: the mesh that the processes form; None: they
    form none."""
    exchange = values.get("exchange", "tree")
    problems = _not_read(exchange, values, line)
    asked = axes or MeshShape(**{axis: max(1, values.get(f"parallel.{axis}") or 1) for axis in DIVIDED})
    problems += _not_carried(exchange, values, asked, line)
    if axes is not None:
        problems += _not_claimed(exchange, values, axes, line)
        problems += problems_of_forms(exchange, values, axes, line)
    return problems + (ALSO[exchange](values, axes, line) if exchange in ALSO else [])


def _not_claimed(exchange: str, values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """What does not go together with claims."""
    if not values.get("balance.work_stealing"):
        return []
    compress = values.get("compress.kind", "none")
    others: dict[str, tuple[Any, Any]] = {"exchange": (exchange, "tree"), "compress.kind": (compress, "none")}
    others |= {f"parallel.{axis}": (getattr(axes, axis), 1) for axis in DIVIDED}
    true = "Whoever is free computes a whole virtual rank, and the tree adds up what it makes of it."
    return [
        Problem(
            f"balance.work_stealing = true and {name} = {value}",
            true,
            f"{line.setting('balance.work_stealing=false')}, or: {line.setting(f'{name}={instead}')}",
        )
        for name, (value, instead) in others.items()
        if value != instead
    ]


def _not_carried(exchange: str, values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """An axis that the exchange cannot go with."""
    problems = []
    for axis in DIVIDED:
        size = getattr(axes, axis)
        if size == 1:
            continue
        asked = f"exchange = {exchange} and parallel.{axis} = {size}"
        if axis not in CARRIES[exchange]:
            true = WHY_NOT.get((exchange, axis), "This exchange adds up gradients of whole models.")
            do = f"{line.setting('exchange=tree')}, or: {line.setting(f'parallel.{axis}=1')}"
            problems.append(Problem(asked, true, do))
        elif axis == "shard" and exchange != "tree" and values.get("parallel.reshard") == "layer":
            true = "Shards that are gathered layer by layer send each gradient through the tree at once."
            do = f"{line.setting('exchange=tree')}, or: {line.setting('parallel.reshard=step')}"
            problems.append(Problem(asked, true, do))
    return problems


def _not_read(exchange: str, values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
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


ALSO: dict[str, Callable[[Mapping[str, Any], MeshShape | None, CommandLine], list[Problem]]] = {
    "server": problems_of_roles,
    "local_sgd": problems_of_sites,
}
"""What else may be wrong with the settings of an exchange."""
