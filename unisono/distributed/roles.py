"""Roles of processes: the first ones are servers, which hold the parameters; the others are workers, which compute.

    --ranks 5, server.count=2        rank 0   rank 1   |   rank 2   rank 3   rank 4
                                     server   server   |   worker   worker   worker
                                     main process

Each parameter is assigned as a whole to the server with the fewest bytes so far, in the order in which parameters first
appear. So no server holds more than an even share plus one parameter, and every process computes the same assignment
without a message. A parameter stays on its server when others are frozen, unfrozen or added, because the state of its
optimizer is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from unisono.distributed.process_group import ProcessGroup


class ParameterAssignment:
    """The server of each parameter."""

    def __init__(self, servers: int = 1) -> None:
        self.bytes = [0] * servers
        """Bytes on each server."""
        self._of: dict[int, tuple[int, torch.Tensor]] = {}  # with the parameter, so that its id is not reused

    def of(self, p: torch.Tensor) -> int:
        """Return the server of this parameter. All processes must first call this in the same order of parameters."""
        entry = self._of.get(id(p))
        if entry is None:
            entry = self._of[id(p)] = self.bytes.index(min(self.bytes)), p
            self.bytes[entry[0]] += p.nbytes
        return entry[0]

    def assign(self, params: Iterable[torch.Tensor]) -> None:
        """Assign the parameters that have no server yet."""
        for p in params:
            self.of(p)


@dataclass(eq=False)
class RoleGroup(ProcessGroup):
    """A group whose first `servers` processes are servers."""

    servers: int = 1
    shares: ParameterAssignment = field(default_factory=ParameterAssignment)

    @property
    def is_server(self) -> bool:
        """Whether this process is a server."""
        return self.rank < self.servers

    @property
    def workers(self) -> range:
        """The ranks of the workers."""
        return range(self.servers, self.size)


def assign_roles(group: ProcessGroup, servers: int) -> RoleGroup:
    """Return a group of the same processes with roles.

    They share no memory, even on one host: another process may use a server's result only when it is sent.
    """
    assert 1 <= servers < group.size, "checked with the settings"
    return RoleGroup(
        group.rank,
        group.size,
        group.device,
        group.mixed,
        group.staged,
        servers=servers,
        shares=ParameterAssignment(servers),
    )
