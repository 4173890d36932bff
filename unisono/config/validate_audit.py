"""What does not go together with audits: a virtual rank is computed twice where each process has a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.mesh_shape import MeshShape
from unisono.errors import Problem

BESIDE_NOT = {
    "server": "Its processes are servers and workers, which hold different things.",
    "local_sgd": "Its sites have different weights between two meetings, so each makes gradients of its own.",
}
"""Exchanges under which nobody else can compute the same."""

DIVIDED = ("shard", "tensor", "pipeline", "context")


def problems_of_audits(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """`values`: of the settings that count, by their dotted names; `axes`: of the mesh that they make."""
    if not values.get("audit_every"):
        return []
    asked, off = f"audit_every = {values['audit_every']}", line.setting("audit_every=0")
    problems = []
    if values.get("virtual_ranks") == 1:
        true = "One virtual rank draws its random numbers from one stream, so nothing of it can be computed again."
        do = f"{off}, or (other bits): {line.setting('virtual_ranks=2')}"
        problems.append(Problem(f"{asked} and virtual_ranks = 1", true, do))
    exchange = values.get("exchange", "tree")
    if exchange in BESIDE_NOT:
        do = f"{off}, or: {line.setting('exchange=tree')}"
        problems.append(Problem(f"{asked} and exchange = {exchange}", BESIDE_NOT[exchange], do))
    for axis in DIVIDED:
        if (size := getattr(axes, axis)) > 1:
            true = "A virtual rank is computed again by a process that has the whole model."
            do = f"{off}, or: {line.setting(f'parallel.{axis}=1')}"
            problems.append(Problem(f"{asked} and parallel.{axis} = {size}", true, do))
    return problems
