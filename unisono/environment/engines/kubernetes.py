"""A pod of an Indexed Job, and so of a JobSet with one Indexed Job.

https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode and https://jobset.sigs.k8s.io

    JOB_COMPLETION_INDEX      this pod; Kubernetes sets it
    WORLD_SIZE                number of pods; the manifest sets it (`completions`)
    MASTER_ADDR               pod 0 in a headless service: train-0.train; the manifest sets it

Without WORLD_SIZE, an index belongs to a sweep of independent jobs, and means nothing here.
"""

from __future__ import annotations

import shlex
import sys

from unisono.environment.nodes import Nodes, checked_nodes
from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables

STOPPED_STATUS = 143
"""Exit status of a run in a pod that a signal has stopped: 128 + SIGTERM. After 0 its index would count as complete."""

INDEX, COUNT, ADDRESS = "JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR"


def read_nodes() -> Nodes | None:
    """Return the pods of an Indexed Job; None outside of one, without WORLD_SIZE, and for one pod.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    found = variables((INDEX, COUNT))
    if len(found) < 2:
        return None
    given = RankVariables(
        f"Cannot join the {found[COUNT]} pods of a Kubernetes Job.",
        f"set {COUNT} and {ADDRESS} in the manifest (docs/guide/hosts/engines.md#kubernetes); alone: "
        + shlex.join(["env", "-u", COUNT, "python", *sys.argv]),
    )
    count = given.number(COUNT)
    if count > 1:
        given.require(ADDRESS)
    address = given.text(ADDRESS)
    return checked_nodes(given, "kubernetes", count, given.number(INDEX), address, address)


def status_of_stop() -> int:
    """Return the exit status of a run that a signal has stopped: 0; in a pod of an Indexed Job STOPPED_STATUS.

    Kubernetes then starts the pod again, and --autoresume continues the run.
    """
    return STOPPED_STATUS if variables((INDEX,)) else 0
