"""A pod of Kubeflow Trainer, which sets the flags of torchrun as variables with PET_ before the name.

https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/

    PET_NNODES, PET_NODE_RANK               number of pods, and this one
    PET_MASTER_ADDR, PET_MASTER_PORT        pod 0

`torchrun train.py` in the pod reads them, too. Its processes have RANK.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

from unisono.environment.nodes import Nodes, checked_nodes
from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables

COUNT, INDEX, ADDRESS, PORT = "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"


def read_nodes() -> Nodes | None:
    """Return the pods of a TrainJob; None outside of one, and for one pod.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    count = variables((COUNT,)).get(COUNT, "1")
    if count in ("", "1"):
        return None
    torchrun = shlex.join(["torchrun", *sys.argv])
    given = RankVariables(f"Cannot join the {count} pods of Kubeflow.", f"{torchrun}, which reads the same variables")
    if ":" in count:
        raise given.error(f"{COUNT} is {count}, a range: only torchrun's agents know how many pods there are.")
    given.require(INDEX, ADDRESS, PORT)
    address = given.text(ADDRESS)
    nodes = checked_nodes(given, "kubeflow", given.number(COUNT), given.number(INDEX), address, address)
    return nodes if nodes is None or given.has("MASTER_PORT") else replace(nodes, port=given.number(PORT))
