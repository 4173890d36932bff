"""The form in which gradients travel: what is wrong with `compress` beside the other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.mesh_shape import MeshShape
from unisono.config.schema import CompressSettings
from unisono.config.value_types import shown
from unisono.errors import Problem

COMPRESSES = ("tree", "allreduce")
"""Exchanges whose sums can be compressed."""

READ_BY = {"start_step": None, "groups": None, "rank": "powersgd", "ratio": "topk"}
"""Which kind reads a setting of `compress`; None: every one."""


def problems_of_forms(exchange: str, values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """`values`: of the settings that count, by their dotted names. `axes`: the mesh that the processes form."""
    kind = values.get("compress.kind", "none")
    problems = _not_read(exchange, kind, values, line)
    if kind == "none":
        return problems
    asked, off = f"compress.kind = {kind}", line.setting("compress.kind=none")
    if exchange not in COMPRESSES:
        true = f"What is compressed are the sums of {' and '.join(COMPRESSES)}; {exchange} has messages of its own."
        do = f"{line.setting('exchange=tree')}, or: {off}"
        problems.append(Problem(f"{asked} and exchange = {exchange}", true, do))
    for axis in ("shard", "tensor", "pipeline", "context"):
        if (size := getattr(axes, axis)) > 1:
            true = "What is compressed are gradients of whole models; here processes hold parts of them."
            do = f"{off}, or: {line.setting(f'parallel.{axis}=1')}"
            problems.append(Problem(f"{asked} and parallel.{axis} = {size}", true, do))
    ranks = values.get("virtual_ranks")
    if ranks == 1:
        true = "One virtual rank runs on one process, so no gradient travels."
        problems.append(
            Problem(f"{asked} and virtual_ranks = 1", true, f"{off}, or: {line.setting('virtual_ranks=8')}")
        )
    if values.get("balance.work_stealing"):
        true = "What a node has left over lies with its process, so who computes it is settled before a step."
        do = f"{line.setting('balance.work_stealing=false')}, or: {off}"
        problems.append(Problem(f"{asked} and balance.work_stealing = true", true, do))
    keep = values.get("compress.ratio")
    if kind == "topk" and keep is not None and not 0 < keep <= 1:
        true = "It is a part of a gradient: above 0, and 1 at most."
        problems.append(Problem(f"compress.ratio = {shown(keep)}", true, str(line.setting("compress.ratio=0.01"))))
    return problems + _no_level(values.get("compress.groups"), ranks, line)


def _no_level(nodes: int | None, ranks: int | None, line: CommandLine) -> list[Problem]:
    """Nodes that are no level of the tree."""
    if nodes is None or ranks is None or ranks < 2:
        return []
    levels = sorted({2**i for i in range(1, ranks.bit_length()) if 2**i <= ranks} | {ranks})
    if nodes in levels or nodes < 2:
        return []
    true = f"The tree over {ranks} virtual ranks has levels of {', '.join(map(str, levels))} nodes."
    best = min(levels, key=lambda n: abs(n - nodes))
    return [Problem(f"compress.groups = {nodes}", true, str(line.setting(f"compress.groups={best}")))]


def _not_read(exchange: str, kind: str, values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """A setting of `compress` that was changed, and that nobody reads."""
    problems = []
    for name, reader in READ_BY.items():
        default = getattr(CompressSettings(), name)
        value = values.get(f"compress.{name}", default)
        if value == default:
            continue
        asked, drop = f"compress.{name} = {shown(value)}", line.setting(f"compress.{name}={shown(default)}")
        if kind == "none" or (reader or kind) != kind:
            wants = reader or "int8"
            true = f"It is for {f'compress.kind={reader}' if reader else 'forms'}, and compress.kind = {kind}."
            problems.append(Problem(asked, true, f"{line.setting(f'compress.kind={wants}')}, or: {drop}"))
        elif name == "groups" and exchange == "allreduce":
            true = "With exchange=allreduce what each process has added up is compressed as one."
            problems.append(Problem(asked, true, f"{line.setting('exchange=tree')}, or: {drop}"))
    return problems
