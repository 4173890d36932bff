"""The actor of one process. It starts an agent (actor_agent.py) as a process of its own, and waits for its end.

Training does not run within the worker of Ray: its signal handlers, threads and memory stay out of the computation. The
agent's standard input ends with the worker, however that dies, and the agent ends its process then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

AGENT = "unisono.clusters.ray.actor_agent"

PURPOSE = "ray"
"""The kind of the launcher's port, in proofs (handshake/mutual_proof.py)."""


class AgentOrder(NamedTuple):
    """What an agent needs.

    Attributes:
        number: the number of the actor.
        address: where the launcher waits.
        port: the port there.
        secret: the secret of the run, in hexadecimal digits.
        folder: the working folder of the launcher.
        node: the node of Ray on which the actor is.
    """

    number: int
    address: str
    port: int
    secret: str
    folder: str
    node: str = ""


class RankActor:
    """An actor for one process."""

    def serve(self, fields: tuple[Any, ...]) -> int:
        """Serve the launcher until the run has ended, and return the status of the agent."""
        import ray

        order = AgentOrder(*fields)._replace(node=ray.get_runtime_context().get_node_id())
        folder = order.folder if Path(order.folder).is_dir() else None  # if it is not there, the launcher says so
        command = [sys.executable, "-u", "-P", "-m", AGENT]
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=folder, start_new_session=True) as agent:
            assert agent.stdin is not None
            agent.stdin.write(json.dumps(order).encode() + b"\n")  # not as an argument, which other users can read
            agent.stdin.flush()
            return agent.wait()
