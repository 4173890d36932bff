"""The mpirun of MPICH and Intel MPI (Hydra), and Cray's PALS, which name the local rank differently.

https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md

    PMI_RANK, PMI_SIZE
    MPI_LOCALRANKID, MPI_LOCALNRANKS          MPICH and Intel MPI
    PMI_LOCAL_RANK, PMI_LOCAL_SIZE            PALS

Slurm sets PMI_RANK and PMI_SIZE, too (srun --mpi=pmi2). Its own variables are then used.
"""

from __future__ import annotations

from unisono.environment.engines.mpi_launch import started_by
from unisono.environment.engines.slurm import step_size
from unisono.environment.process_variables import variables
from unisono.environment.world import World

SIZE = "PMI_SIZE"
HYDRA, PALS = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def read() -> World | None:
    """Return the World of a process of MPICH; None for one process, and under srun.

    Raises:
        WorldError: the variables are incomplete or contradict each other, or an address is missing.
    """
    size = variables((SIZE,)).get(SIZE, "1")
    if size in ("", "1") or size == step_size():
        return None
    local = PALS if variables(PALS) and not variables(HYDRA) else HYDRA
    return started_by("MPICH", SIZE, "-genv {} {}").joined("PMI_RANK", SIZE, *local, job="")
