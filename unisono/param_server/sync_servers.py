"""A run with parameter servers in step (exchange=server, server.staleness=0): what differs from any other run.

Every process runs the script and meets the others in every step; the virtual ranks are dealt to the workers only, and
gradients lie where their parameters do (param_server/push_pull.py). So the gradient's norm is put together from rows,
each made by the server that has it, and a checkpoint's optimizer from what each server has of it: both come out as in
one process, on any number of servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from unisono.config import Settings
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.roles import RoleGroup, build_crew
from unisono.errors import LoopError
from unisono.plan.assignment import Spans, assign_evenly
from unisono.train.loop import StepLoop
from unisono.train.optimization.grad_norm import clip_, norm_of, rows_of
from unisono.train.pipelining.stage_state import LocalPart, gather_states
from unisono.train.run import Run

if TYPE_CHECKING:
    from unisono.distributed.mesh import Mesh

Module = TypeVar("Module", bound=torch.nn.Module)


def run_class(settings: Settings) -> type[Run[Any]]:
    """Return the class of a run with synchronous or asynchronous servers."""
    if settings.server.staleness == 0:
        return SyncServerRun
    from unisono.param_server.async_run import kind_of_pace

    return kind_of_pace(settings)


class RoleRun(Run[Settings]):
    """A run of servers and workers: who has which parameter is known as soon as there are parameters."""

    crew: RoleGroup

    def place(self, model: Any, **more: Any) -> Any:
        placed = super().place(model, **more)
        self.crew.shares.know(placed.parameters())
        return placed

    def track(self, **things: Any) -> None:
        refuse_foreign(things.values(), self.crew.servers)
        super().track(**things)


class SyncServerRun(RoleRun):
    """A run whose group is a crew."""

    def __init__(
        self, settings: Settings, *, group: ProcessGroup, engine: type[StepLoop] = StepLoop, **more: Any
    ) -> None:
        crew = build_crew(group, settings.server.count)
        kind = type("Engine", (engine, SyncServerLoop), {}) if engine is not StepLoop else SyncServerLoop
        super().__init__(settings, group=crew, engine=kind, **more)
        self.crew = crew
        self._state.stages = ServerParts(crew)

    def result(self) -> dict[str, Any]:
        """Workers have the same weights; the state of an optimizer is on its server only."""
        return {**super().result(), "servers": self.crew.servers, "survival": "checkpoint"}


class SyncServerLoop(StepLoop):
    """Virtual ranks are the workers', gradients the servers'."""

    @staticmethod
    def spans(settings: Settings, mesh: Mesh, size: int) -> Spans:
        servers = settings.server.count
        return ((0, 0),) * servers + assign_evenly(settings.virtual_ranks, size - servers)

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float:
        """As in one process (grad_norm.py): each row is one server's, everybody adds up their squares in order."""
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


class ServerParts:
    """Optimizers whose state lies on several servers: whole to be saved, and apart when they are loaded."""

    speaks = True
    """Nobody else has what a server has."""

    def __init__(self, crew: RoleGroup) -> None:
        self.crew = crew

    def whole(self, thing: Any, state: Any, shelf: LocalPart | None = None) -> Any:
        """On the main process: each parameter's state from the server that holds it; with a shelf, it stays there."""
        if not isinstance(thing, torch.optim.Optimizer) or self.crew.servers == 1:
            return state
        return self.together(state, gather_states(self.crew, self.held(thing, state), shelf))

    def held(self, optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
        """What this process steps with, by the parameter's number, as a word."""
        return {str(i): state["state"][i] for i in self._ours(optimizer) if i in state["state"]}

    @staticmethod
    def together(state: Any, parts: Sequence[Mapping[str, Any]]) -> Any:
        found = {int(number): of for part in parts for number, of in part.items()}
        return {**state, "state": dict(sorted(found.items()))}

    def part(self, thing: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this process steps with."""
        if not isinstance(thing, torch.optim.Optimizer):
            return state
        ours = set(self._ours(thing))
        return {**state, "state": {i: of for i, of in state["state"].items() if i in ours}}

    def _ours(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """The numbers of this process's parameters, as the optimizer counts them."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return [i for i, p in enumerate(params) if self.crew.shares.of(p) == self.crew.rank]


def refuse_foreign(things: Iterable[Any], servers: int) -> None:
    """An optimizer that is none of torch's keeps its state in ways of its own."""
    for thing in things:
        if servers > 1 and hasattr(thing, "param_groups") and not isinstance(thing, torch.optim.Optimizer):
            raise LoopError(
                f"run.track was given a {type(thing).__name__}.",
                f"It is no torch.optim.Optimizer, and with server.count={servers} its state would lie on several "
                "servers, in a way that nobody can put together.",
                "let it inherit from torch.optim.Optimizer, or --set server.count=1.",
            )
