"""A crew: the processes of a run whose roles differ. The first ones are servers, which hold the parameters; the others
are workers, which compute.

    --ranks 5, server.count=2        rank 0   rank 1   |   rank 2   rank 3   rank 4
                                     server   server   |   worker   worker   worker
                                     main process

Servers share the parameters whole, one by one: each goes to whoever has least so far, in the order in which they are
first seen. So nobody has more than an even share and one parameter, every process finds the same without asking, and a
parameter stays where it is when others are frozen, unfrozen or new: its optimizer's state is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from unisono.distributed.process_group import ProcessGroup


class ParameterAssignment:
    """Which server holds which parameter."""

    def __init__(self, servers: int = 1) -> None:
        self.bytes = [0] * servers
        """What each of them holds."""
        self._of: dict[int, tuple[int, torch.Tensor]] = {}  # with the parameter, so that its id stays its own

    def of(self, p: torch.Tensor) -> int:
        """The server that holds this parameter. All processes must first ask for them in the same order."""
        known = self._of.get(id(p))
        if known is None:
            known = self._of[id(p)] = self.bytes.index(min(self.bytes)), p
            self.bytes[known[0]] += p.nbytes
        return known[0]

    def know(self, params: Iterable[torch.Tensor]) -> None:
        """These come next."""
        for p in params:
            self.of(p)


@dataclass(eq=False)
class RoleGroup(ProcessGroup):
    """A group of which the first `servers` processes are servers."""

    servers: int = 1
    shares: ParameterAssignment = field(default_factory=ParameterAssignment)

    @property
    def serves(self) -> bool:
        """Is this process a server?"""
        return self.rank < self.servers

    @property
    def workers(self) -> range:
        """The ranks of those who compute."""
        return range(self.servers, self.size)


def build_crew(group: ProcessGroup, servers: int) -> RoleGroup:
    """The processes of a group, with roles. They send each other messages, also on one host: what a server makes of a
    gradient is another's only when it is sent."""
    assert 1 <= servers < group.size, "checked with the settings"
    return RoleGroup(
        group.rank, group.size, group.device, group.mixed, servers=servers, shares=ParameterAssignment(servers)
    )
