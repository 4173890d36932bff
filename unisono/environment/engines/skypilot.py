"""A node of a SkyPilot task.

https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html

    SKYPILOT_NODE_RANK        this node
    SKYPILOT_NODE_IPS         the addresses of all nodes, one a line
    SKYPILOT_NUM_NODES        their number
    SKYPILOT_TASK_ID          the task; the same after a managed job has recovered
"""

from __future__ import annotations

import shlex
import sys

from unisono.environment.nodes import Nodes, checked_nodes
from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables

INDEX, ADDRESSES, COUNT = "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES"
TASK = "SKYPILOT_TASK_ID"


def read_nodes() -> Nodes | None:
    """Return the nodes of a task; None outside of one, and for one node.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    if not variables((INDEX, ADDRESSES, COUNT)):
        return None
    alone = shlex.join(["env", "-u", INDEX, "-u", ADDRESSES, "-u", COUNT, "python", *sys.argv])
    given = RankVariables(
        "Cannot join the nodes of a SkyPilot task.",
        f"sky exec CLUSTER task.yaml, which sets all of them; alone: {alone}",
    )
    given.require(INDEX, ADDRESSES)
    addresses = given.text(ADDRESSES).split()
    count = given.number(COUNT) if given.has(COUNT) else len(addresses)
    if count != len(addresses):
        raise given.error(f"{COUNT} is {count}, and {ADDRESSES} has {len(addresses)} addresses.")
    if count > 1:
        given.require(TASK)
    return checked_nodes(given, "skypilot", count, given.number(INDEX), "".join(addresses[:1]), given.text(TASK))
