"""A node of a distributed task of dstack.

https://dstack.ai/docs/concepts/tasks/#system-environment-variables

    DSTACK_NODE_RANK, DSTACK_NODES_NUM      this node, and their number
    DSTACK_MASTER_NODE_IP                   node 0
    DSTACK_RUN_ID                           the run
"""

from __future__ import annotations

import shlex
import sys

from unisono.environment.nodes import Nodes, checked_nodes
from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables

INDEX, COUNT, ADDRESS, RUN = "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP", "DSTACK_RUN_ID"


def read_nodes() -> Nodes | None:
    """Return the nodes of a run; None outside of one, and for one node.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    count = variables((COUNT,)).get(COUNT, "1")
    if count in ("", "1"):
        return None
    alone = shlex.join(["env", "-u", COUNT, "python", *sys.argv])
    remedy = f"dstack apply, which sets all of them; alone: {alone}"
    given = RankVariables(f"Cannot join the {count} nodes of a dstack run.", remedy)
    given.require(INDEX, ADDRESS, RUN)
    address, run = given.text(ADDRESS), given.text(RUN)
    return checked_nodes(given, "dstack", given.number(COUNT), given.number(INDEX), address, run)
