"""The readers of all engines, in the order in which they are asked. To add one: docs/guide/hosts/engines.md.

An engine often starts inside another one, and the variables of both are then set. The inner one is asked first:

    torchrun     starts inside everything else
    mpirun       uses srun to start on other hosts, so a task of that step is not a process of the run
    srun         starts inside a batch job; after mpirun for that reason, and after PMI, which srun imitates
    submitit     starts on one host, for example on a node of the engines below
    nodes        Kubeflow is a layer on Kubernetes, so its names come first; SkyPilot and dstack may use Kubernetes, too

Last come those that only refuse: a rank without a size, or a size without a rank, that no other engine explains.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.environment.engines import (
    dstack,
    kubeflow,
    kubernetes,
    mpich,
    open_mpi,
    pmix,
    skypilot,
    slurm,
    submitit_local,
    torchrun,
)
from unisono.environment.nodes import Nodes
from unisono.environment.process_variables import variables
from unisono.environment.world import World

NODE_READERS: tuple[Callable[[], Nodes | None], ...] = (
    kubeflow.read_nodes,
    skypilot.read_nodes,
    dstack.read_nodes,
    kubernetes.read_nodes,
)
"""Engines that number nodes and start one command on each of them."""


def read_nodes() -> Nodes | None:
    """Return the nodes of the job that this process is in; None without several nodes, and in torchrun's processes.

    Raises:
        WorldError: the variables of an engine are incomplete or contradict each other.
    """
    if variables(("RANK",)):
        return None
    return next((nodes for read in NODE_READERS if (nodes := read()) is not None), None)


def process_of_node() -> World | None:
    """Return the World of a command that an engine starts once on each node: one process there."""
    nodes = read_nodes()
    return nodes.process() if nodes is not None else None


READERS: tuple[Callable[[], World | None], ...] = (
    torchrun.read,
    open_mpi.read,
    mpich.read,
    slurm.read,
    submitit_local.read,
    process_of_node,
    pmix.refuse,
    torchrun.refuse_size_alone,
)
"""Engines that number processes, then those that number nodes, then the refusals. The first World is used."""
