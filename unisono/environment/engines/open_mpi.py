"""Open MPI's mpirun, which also has a name of the job.

https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html

    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
    OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE
    PMIX_NAMESPACE (version 4 and newer), OMPI_MCA_ess_base_jobid     the job
"""

from __future__ import annotations

from unisono.environment.engines.mpi_launch import started_by
from unisono.environment.process_variables import variables
from unisono.environment.world import World

SIZE = "OMPI_COMM_WORLD_SIZE"
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def read() -> World | None:
    """Return the World of a process of Open MPI; None for one process.

    Raises:
        WorldError: the variables are incomplete or contradict each other, or an address is missing.
    """
    if variables((SIZE,)).get(SIZE, "1") in ("", "1"):
        return None
    given = started_by("Open MPI", SIZE, "-x {}={}")
    job = next(iter(variables(JOBS).values()), "")
    rank, local_rank, local_size = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE"))
    return given.joined(rank, SIZE, local_rank, local_size, job)
