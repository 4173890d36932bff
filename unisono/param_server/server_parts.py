"""The state of optimizers that is divided among parameter servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.roles import RoleGroup
from unisono.errors import LoopError
from unisono.train.pipelining.stage_state import LocalPart, gather_states


class ServerParts:
    """Optimizers whose state is on several servers: gather the state to save it, and divide it to load it."""

    speaks = True
    """No other process has the state of a server."""

    def __init__(self, crew: RoleGroup) -> None:
        self.crew = crew

    def whole(self, thing: Any, state: Any, shelf: LocalPart | None = None) -> Any:
        """Return, on the main process, each parameter's state from its server. With a shelf, each state stays there."""
        if not isinstance(thing, torch.optim.Optimizer) or self.crew.servers == 1:
            return state
        return self.together(state, gather_states(self.crew, self.held(thing, state), shelf))

    def held(self, optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
        """Return the states that this process steps with, by the number of the parameter, as text."""
        return {str(i): state["state"][i] for i in self._ours(optimizer) if i in state["state"]}

    @staticmethod
    def together(state: Any, parts: Sequence[Mapping[str, Any]]) -> Any:
        found = {int(number): of for part in parts for number, of in part.items()}
        return {**state, "state": dict(sorted(found.items()))}

    def part(self, thing: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a state that this process steps with."""
        if not isinstance(thing, torch.optim.Optimizer):
            return state
        ours = set(self._ours(thing))
        return {**state, "state": {i: of for i, of in state["state"].items() if i in ours}}

    def _ours(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the numbers of this process's parameters, as the optimizer counts them."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return [i for i, p in enumerate(params) if self.crew.shares.of(p) == self.crew.rank]


def refuse_foreign(things: Iterable[Any], servers: int) -> None:
    """Raise LoopError for an optimizer that does not inherit from torch's, because its state has another form."""
    for thing in things:
        if servers > 1 and hasattr(thing, "param_groups") and not isinstance(thing, torch.optim.Optimizer):
            raise LoopError(
                f"Cannot track a {type(thing).__name__} with several servers.",
                f"It is no torch.optim.Optimizer, and with server.count={servers} its state would be on several "
                "servers, and could not be gathered.",
                "let it inherit from torch.optim.Optimizer, or --set server.count=1.",
            )
