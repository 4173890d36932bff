"""How often the launcher has restarted all processes of the run."""

from __future__ import annotations

from unisono.environment.process_variables import variables

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables with the number of restarts.
https://docs.pytorch.org/docs/2.13/elastic/run.html and https://slurm.schedmd.com/sbatch.html"""


def restart_count() -> int:
    """Return how often torchrun or Slurm has restarted all processes."""
    return sum(int(count) for count in variables(RESTARTS).values() if count.isdecimal())
