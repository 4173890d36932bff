"""The nodes of a job, for engines that number nodes and start one command on each of them.

`unisono run` starts several processes on each node. `python train.py` is one process on each node.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.environment.addresses import hosted_address, port_of_job, unbracketed
from unisono.environment.rank_variables import RankVariables
from unisono.environment.restart_count import restart_count
from unisono.environment.terminal import draws_live_lines
from unisono.environment.world import World


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and where their processes meet.

    Attributes:
        count: number of nodes, at least 2.
        index: of this node, 0 to count - 1.
        address: of node 0, without brackets: a name, or an IPv4 or IPv6 address.
        port: on node 0.
        engine: kubeflow, skypilot, dstack or kubernetes.
        job: the name of the job, which is the same on all nodes.
    """

    count: int
    index: int
    address: str
    port: int
    engine: str
    job: str

    def process(self) -> World:
        """Return the World of the only process on this node."""
        return World(
            rank=self.index,
            size=self.count,
            local_rank=0,
            local_size=1,
            store=hosted_address(self.address, self.port, f"{self.job}-{restart_count()}"),
            launcher=self.engine,
            restarts=restart_count(),
            terminal=self.index == 0 and draws_live_lines(),
        )


def checked_nodes(given: RankVariables, engine: str, count: int, index: int, address: str, job: str) -> Nodes | None:
    """Return the nodes of a job; None for one node. MASTER_ADDR and MASTER_PORT override address and port.

    Raises:
        WorldError: the index contradicts the count, or MASTER_PORT is no port.
    """
    if index >= max(count, 1):
        raise given.error(f"Node {index} of {count} is impossible: nodes are numbered from 0.")
    if count < 2:
        return None
    address = given.text("MASTER_ADDR") or address
    port = given.port() if given.has("MASTER_PORT") else port_of_job(job)
    return Nodes(count, index, unbracketed(address), port, engine, job)
