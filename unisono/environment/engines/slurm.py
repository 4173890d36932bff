"""A task of a Slurm step, which srun starts.

https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES

    SLURM_STEP_NUM_TASKS, SLURM_PROCID            number of tasks, and this one
    SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID       4(x2),3: tasks on each host, and this host
    SLURM_LOCALID                                 this task on its host
    SLURM_STEP_NODELIST                           a[01-04,7],b2: the hosts
    SLURM_JOB_ID, SLURM_STEP_ID                   the job; it does not change when the job is requeued

Only a step has several processes: a batch script is one, whatever SLURM_NTASKS is there. The store is on the step's
first host, where task 0 is, at a port that follows from the job's number. MASTER_ADDR and MASTER_PORT override that,
where Slurm's host names do not resolve or a firewall blocks the port.
"""

from __future__ import annotations

import re
import shlex
import sys

from unisono.environment.addresses import hosted_address, port_of_job
from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables
from unisono.environment.restart_count import restart_count
from unisono.environment.world import World

SIZE = "SLURM_STEP_NUM_TASKS"


def step_size() -> str:
    """Return the number of tasks of the step, as Slurm writes it; "1" outside of a step."""
    return variables((SIZE,)).get(SIZE) or "1"


def read() -> World | None:
    """Return the World of a task; None outside of a step, and for a step of one task.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    if step_size() == "1":
        return None
    given = RankVariables(
        f"Cannot join the {step_size()} tasks of Slurm's step {job()}.",
        f"srun -n 2 {shlex.join(['python', *sys.argv])}, which sets all of its variables",
    )
    tasks_name, hosts_name = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
    given.require("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", hosts_name, tasks_name)
    name = f"{job()}-{restart_count()}"
    address = given.text("MASTER_ADDR") or first_host(given.text(hosts_name))
    port = given.port() if given.has("MASTER_PORT") else port_of_job(name)
    tasks = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", given.text(tasks_name))
        for _ in range(int(times or 1))
    ]
    rank, size, node = given.number("SLURM_PROCID"), given.number(SIZE), given.number("SLURM_NODEID")
    local_size = tasks[node] if node < len(tasks) else 0
    store = hosted_address(address, port, name)
    return given.world("srun", rank, size, given.number("SLURM_LOCALID"), local_size, store)


def job() -> str | None:
    """Return Slurm's name of this process's step, such as 17.0 (17: the batch script itself); None without Slurm.

    It does not change when a job is requeued.
    """
    ids = variables(("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return ".".join(ids.values()) if "SLURM_JOB_ID" in ids else None


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list such as a[01-04,7],b2 (see `scontrol show hostnames`)."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else hosts)
