"""submitit's local executor, which starts the tasks of a job on this host. (On a cluster, submitit uses Slurm.)

https://github.com/facebookincubator/submitit/blob/main/submitit/local/local.py

    SUBMITIT_LOCAL_GLOBALID, SUBMITIT_LOCAL_NTASKS      this task, and their number
    SUBMITIT_LOCAL_LOCALID                              this task on its host
    SUBMITIT_LOCAL_JOB_ID                               the job
"""

from __future__ import annotations

import shlex
import sys

from unisono.environment.addresses import hosted_address, port_of_job
from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables
from unisono.environment.world import World

SIZE, RANK, LOCAL_RANK = "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID"
JOB = "SUBMITIT_LOCAL_JOB_ID"


def read() -> World | None:
    """Return the World of a task; None without submitit, for one task, and in the process that starts the tasks.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    found = variables((SIZE, RANK))
    if len(found) < 2 or found[SIZE] == "1":
        return None
    given = RankVariables(
        f"Cannot join the {found[SIZE]} tasks of submitit's local executor.",
        f"unisono run {shlex.join(sys.argv)} --ranks N, which starts processes itself.",
    )
    given.require(LOCAL_RANK, JOB)
    size, name = given.number(SIZE), f"submitit-{given.text(JOB)}"
    port = given.port() if given.has("MASTER_PORT") else port_of_job(name)
    store = hosted_address("127.0.0.1", port, name)
    return given.world("submitit", given.number(RANK), size, given.number(LOCAL_RANK), size, store)
