"""torchrun, and everything that sets the same variables in each process: Ray Train, Accelerate, or a user by hand.

https://docs.pytorch.org/docs/2.13/elastic/run.html#environment-variables and
https://docs.ray.io/en/latest/train/getting-started-pytorch.html

    RANK, WORLD_SIZE                this process, and the number of processes; all four are required
    MASTER_ADDR, MASTER_PORT        the store
    LOCAL_RANK, LOCAL_WORLD_SIZE    this process on its host; without them it is the only one there
    TORCHELASTIC_USE_AGENT_STORE    True: torchrun's agent hosts the store; otherwise rank 0 does
"""

from __future__ import annotations

import shlex
import sys

from unisono.environment.process_variables import variables
from unisono.environment.rank_variables import RankVariables
from unisono.environment.world import World

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AGENT = "TORCHELASTIC_USE_AGENT_STORE"


def read() -> World | None:
    """Return the World of torchrun's variables; None without RANK.

    Raises:
        WorldError: only some of them are set. Training with one process would hide that mistake.
    """
    if not variables(("RANK",)):
        return None
    given = _given()
    given.require(*REQUIRED)
    rank, size = given.number("RANK"), given.number("WORLD_SIZE")
    local_rank = given.number("LOCAL_RANK") if given.has("LOCAL_RANK") else 0
    local_size = given.number("LOCAL_WORLD_SIZE") if given.has("LOCAL_WORLD_SIZE") else local_rank + 1
    given.port()
    return given.world("torchrun", rank, size, local_rank, local_size, "env://")


def agent_hosts_store() -> bool:
    """Return whether torchrun's agent hosts the store of its variables, instead of rank 0."""
    return variables((AGENT,)).get(AGENT) == "True"


def refuse_size_alone() -> World | None:
    """Refuse WORLD_SIZE without RANK, where no other engine has a use for it. A size of 1 needs no rank.

    Raises:
        WorldError: WORLD_SIZE is set.
    """
    if variables(("WORLD_SIZE",)).get("WORLD_SIZE", "1") != "1":
        _given().require(*REQUIRED)
    return None


def _given() -> RankVariables:
    found = ", ".join(f"{name}={value}" for name, value in variables(("RANK", "WORLD_SIZE")).items())
    alone = shlex.join(["env", "-u", "RANK", "-u", "WORLD_SIZE", "python", *sys.argv])
    remedy = f"{alone} (one process), or start it with torchrun, which sets all of them."
    return RankVariables(f"Invalid torchrun variables: {found}.", remedy)
