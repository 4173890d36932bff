"""A launcher that speaks only PMIx (prterun, prun): it numbers the processes, and does not count them.

https://pmix.github.io/pmix-standard and https://docs.open-mpi.org/en/v5.0.x/running-apps/pmix-and-prrte.html

    PMIX_RANK, PMIX_NAMESPACE

The number of processes is known only to a program that links the library of PMIx. Open MPI and Slurm (srun --mpi=pmix)
set these variables, too, and their own ones count the processes.
"""

from __future__ import annotations

from unisono.environment.engines.mpi_launch import instead_of_mpirun
from unisono.environment.engines.slurm import step_size
from unisono.environment.process_variables import variables
from unisono.environment.world import World
from unisono.errors import WorldError


def refuse() -> World | None:
    """Refuse a process with a rank above 0. (A process with rank 0 may be the only one.)

    Raises:
        WorldError: there are other processes, and their number is unknown.
    """
    rank = variables(("PMIX_RANK",)).get("PMIX_RANK", "0")
    if rank in ("", "0") or step_size() != "1" or variables(("OMPI_COMM_WORLD_SIZE",)):
        return None
    facts = f"PMIX_RANK is {rank}, and no variable gives the number of processes."
    raise WorldError("Cannot join the processes of a PMIx launcher.", facts, instead_of_mpirun("2"))
