"""The loop with synchronous parameter servers (exchange=server, server.staleness=0): its differences from other loops.

Every process runs the script, and all processes synchronize in every step. Virtual ranks are assigned to the workers
only, and a gradient is on the server of its parameter (param_server/push_pull.py). So the gradient's norm is assembled
from rows, each computed by the server that has it. In the same way a checkpoint's optimizer is assembled from the parts
of the servers. Both are as in one process, on any number of servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from unisono.config import Settings
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.roles import RoleGroup, assign_roles
from unisono.param_server.server_parts import ServerParts, refuse_foreign
from unisono.plan.assignment import Spans, assign_evenly
from unisono.train.context import RunContext
from unisono.train.gradient_sync import GradientSync
from unisono.train.loop import SyncLoop
from unisono.train.optimization.grad_norm import clip_, norm_of, rows_of


def choose_server_loop(settings: Settings, group: ProcessGroup) -> SyncLoop:
    """Build the loop of a run with synchronous or asynchronous servers."""
    if settings.server.staleness == 0:
        return SyncServerLoop(settings, group)
    from unisono.param_server.async_run import AsyncServerLoop

    return AsyncServerLoop(settings, group)


class SyncServerLoop(SyncLoop):
    """The loop of servers and workers that run every step together."""

    is_uniform = False

    def __init__(self, settings: Settings, group: ProcessGroup) -> None:
        self.crew = assign_roles(group, settings.server.count)
        super().__init__(settings, self.crew)

    def attach(self, context: RunContext) -> None:
        context.state.stages = ServerParts(self.crew)

    def place(self, model: torch.nn.Module) -> None:
        self.crew.shares.assign(model.parameters())

    def track(self, things: Iterable[Any]) -> None:
        refuse_foreign(things, self.crew.servers)

    def spans(self, size: int) -> Spans:
        servers = self.crew.servers
        return ((0, 0),) * servers + assign_evenly(self.settings.virtual_ranks, size - servers)

    def build_sync(self, *arguments: Any, **more: Any) -> GradientSync:
        return ServerGradientSync(*arguments, **more)

    def result(self) -> Mapping[str, Any]:
        """Return entries of result.json. Workers have the same weights; the state of an optimizer is on its server."""
        return {"servers": self.crew.servers, "survival": "checkpoint"}


class ServerGradientSync(GradientSync):
    """Gradients that are on the servers that hold their parameters."""

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float:
        """Clip as in one process (grad_norm.py): each row is on one server, and all add up their squares in order."""
        crew = self.group
        assert isinstance(crew, RoleGroup)
        held = [p.grad is not None and crew.shares.of(p) == crew.rank for p in params]
        used = crew.sum_(torch.tensor(held, dtype=torch.float64, device=crew.device)).bool().tolist()
        rows: list[torch.Tensor] = []
        for p, has in zip(params, used, strict=True):
            if has:
                mine = p.grad is not None and crew.shares.of(p) == crew.rank
                length = p.numel() if p.dim() < 2 else len(p)
                none = torch.zeros(length, dtype=torch.float64, device=crew.device)
                rows.append(rows_of(p.grad).to(crew.device) if mine and p.grad is not None else none)
        squares = float(crew.sum_(torch.cat(rows)).square().sum()) if rows else 0.0
        norm = norm_of(squares, 0.0, ProcessGroup())
        if limit is not None:
            clip_([p.grad for p in params if p.grad is not None], limit, norm)
        return norm
