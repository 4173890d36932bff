"""What the launchers of all implementations of MPI have in common: none of them gives an address.

So MASTER_ADDR and MASTER_PORT are required. Without them, processes that are all on one host, and have a name of the
job, use a port there that follows from the name.
"""

from __future__ import annotations

import shlex
import sys

from unisono.environment.addresses import PORTS, hosted_address, port_of_job
from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables, not_set
from unisono.environment.world import World

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class MpiVariables(RankVariables):
    """The names of the variables of one implementation, and what it needs besides them."""

    def joined(self, rank: str, size: str, local_rank: str, local_size: str, job: str) -> World:
        """Return the World of variables with these names.

        Args:
            rank: the variable of the rank, as are the next three.
            size: of the number of processes.
            local_rank: of the rank on this host.
            local_size: of the number of processes on this host.
            job: the name of the job; "" if it has none.

        Raises:
            WorldError: the variables are incomplete or contradict each other, or an address is missing.
        """
        self.number(size)
        self.require(rank, size, local_rank, local_size)
        numbers = [self.number(name) for name in (rank, size, local_rank, local_size)]
        self.world("mpirun", numbers[0], numbers[1], numbers[2], numbers[3], "")
        missing = [name for name in ADDRESS if not self.has(name)]
        if missing and (not job or numbers[3] < numbers[1]):
            raise self.error(f"mpirun gives no address for their rendezvous, and {not_set(missing)}")
        job = job or "mpirun"
        port = self.port() if self.has("MASTER_PORT") else port_of_job(job)
        store = hosted_address(self.text("MASTER_ADDR") or "127.0.0.1", port, job)
        return self.world("mpirun", numbers[0], numbers[1], numbers[2], numbers[3], store)


def started_by(implementation: str, size: str, passes: str) -> MpiVariables:
    """Return the reader for processes of an implementation of MPI.

    Args:
        implementation: its name.
        size: the variable with the number of processes.
        passes: how its mpirun passes a variable on, as a format of name and value.
    """
    count = variables((size,))[size]
    headline = f"Cannot join the {count} processes that mpirun ({implementation}) has started."
    return MpiVariables(headline, instead_of_mpirun(count if count.isdecimal() else "2", passes))


def instead_of_mpirun(size: str, passes: str = "-x {}={}") -> str:
    """Return commands to use where mpirun's variables are not enough."""
    script = shlex.join(sys.argv)
    given = " ".join(passes.format(name, value) for name, value in zip(ADDRESS, ("HOST", PORTS[0]), strict=True))
    here = f"unisono run {script} --ranks {size} (one host)"
    return f"{here}, or: mpirun {given} -n {size} python {script} (HOST: where rank 0 is)"
