"""Connect to a cluster of Ray, and reserve room for the actors of a run: a placement group."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from unisono.config import plural
from unisono.environment import variables
from unisono.errors import SettingsError

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html"""


ANSWER_SECONDS = 5.0
"""Time limit for the head of a cluster to accept a connection."""


class RayRequest(NamedTuple):
    """What a run asks of Ray.

    Attributes:
        ranks: the number of actors, one for each process.
        cpus: logical CPUs of an actor.
        gpus: GPUs of an actor.
        strategy: how actors are placed on nodes.
        seconds: time limit for room.
    """

    ranks: int
    cpus: float = 1.0
    gpus: float = 0.0
    strategy: str = "PACK"
    seconds: float = 60.0

    def bundle(self) -> dict[str, float]:
        """Return the resources of one actor."""
        return {name: count for name, count in (("CPU", self.cpus), ("GPU", self.gpus)) if count}

    def __str__(self) -> str:
        each = ", ".join(f"{count:g} {name}" for name, count in self.bundle().items())
        return f"{plural(self.ranks, 'actor')} with {each} each ({self.strategy})"


class RayRoom:
    """The placement group of a run.

    Args:
        request: what was asked.
        group: the placement group.
        first: the index of the first bundle for a process.
    """

    def __init__(self, request: RayRequest, group: Any, first: int = 0) -> None:
        self.request, self._group, self._first = request, group, first

    def actor_class(self, cls: type, number: int) -> Any:
        """Return a class as one of Ray's, whose actors get bundle `number`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, self._first + number)
        options = {"num_cpus": self.request.cpus, "num_gpus": self.request.gpus, "scheduling_strategy": place}
        return ray.remote(cls).options(max_restarts=0, max_task_retries=0, **options)

    def own_address(self) -> str:
        """Return the address of this node, as Ray uses it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free(self) -> str:
        """Return what is free on each node, in words."""
        return free_resources()


def require_ray() -> None:
    """Check that Ray is installed. Raises SettingsError."""
    if find_spec("ray") is None:
        fact = f"{sys.executable} finds no module ray."
        raise SettingsError("Ray is not installed.", fact, "pip install 'unisono[ray]', on all nodes")


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster while the block runs. Where this process is connected already, that cluster is used.

    Args:
        address: auto, local (a cluster on this host, for the block), or HOST:PORT of the head.

    Raises:
        SettingsError: Ray is not installed, the address is not one, or no cluster answers.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        require_answer(resolved(address))
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **more)
    except SettingsError:
        raise
    except Exception as error:  # ConnectionError, ValueError, RuntimeError: it depends on what is wrong
        fact = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        do = "ray start --head, and ray start --address HEAD:6379 on the others; or --address local, for this host"
        raise SettingsError(f"Cannot reach a cluster of Ray (--address {address}).", f"{fact}.", do) from None
    try:
        yield
    finally:
        ray.shutdown()


def resolved(address: str) -> str:
    """Return the address that Ray uses: for auto that of RAY_ADDRESS, or of the cluster of this host."""
    from ray._private.services import canonicalize_bootstrap_address

    if address == "auto":
        address = variables(["RAY_ADDRESS"]).get("RAY_ADDRESS") or address
    return address if address.startswith("ray://") else canonicalize_bootstrap_address(address) or address


def require_answer(address: str) -> None:
    """Check that the head of a cluster answers. Ray itself would try for minutes.

    Raises:
        SettingsError: the address is one of Ray's client.
        ConnectionError: there is no answer.
    """
    if address.startswith("ray://"):
        fact = "The client of Ray keeps the launcher outside of the cluster, whose nodes could not reach it."
        do = "ray job submit --address http://HEAD:8265 -- unisono ray ...; or type the command on a node, with auto"
        raise SettingsError(f"--address {address} is not supported.", fact, do)
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"At {address}: {(error.strerror or str(error)).lower()}") from None


@contextmanager
def reserved(request: RayRequest) -> Iterator[RayRoom]:
    """Reserve room while the block runs: in the placement group of the trial of Ray Tune, or in a new one.

    Raises:
        SettingsError: there is no room within the limit.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    current = ray.util.get_current_placement_group()
    if current is not None:
        yield _within(current, request)
        return
    group = placement_group([request.bundle()] * request.ranks, strategy=request.strategy)
    try:
        if not group.wait(request.seconds):
            fact = f"The run asks for {request}; {free_resources()}. Waited {request.seconds:g} s."
            do = "fewer --ranks, less --cpus-per-rank or --gpus-per-rank, or --wait SECONDS until others have ended"
            raise SettingsError("The cluster has no room for the run.", fact, do)
        yield RayRoom(request, group)
    finally:
        with suppress(Exception):  # the connection to the cluster has ended
            remove_placement_group(group)


def _within(group: Any, request: RayRequest) -> RayRoom:
    """Return the room in the placement group of this task: its first bundle is that of the task itself."""
    bundles: list[Mapping[str, float]] = group.bundle_specs
    fits = [all(bundle.get(name, 0) >= count for name, count in request.bundle().items()) for bundle in bundles[1:]]
    if len(fits) < request.ranks or not all(fits[: request.ranks]):
        fact = f"The run asks for {request}, and the placement group of this task has {bundles} with it."
        do = f"tune.with_resources(trial, unisono.ray.resources(ranks={request.ranks}))"
        raise SettingsError("The placement group has no room for the run.", fact, do)
    return RayRoom(request, group, 1)


def free_resources() -> str:
    """Return what is free, and what the nodes have, in words."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not alive:
        return "no node is alive"
    free = ray.available_resources()
    kinds = [kind for kind in ("CPU", "GPU") if any(node.get(kind) for node in alive)]
    totals = [f"{free.get(kind, 0):g} of {sum(node.get(kind, 0) for node in alive):g} {kind}" for kind in kinds]
    nodes = [" and ".join(f"{node[kind]:g} {kind}" for kind in kinds if node.get(kind)) for node in alive]
    listed = ", ".join(f"{nodes.count(each)} with {each or 'none'}" for each in dict.fromkeys(nodes))
    return f"free are {' and '.join(totals) or 'no CPUs'}; of {plural(len(alive), 'node')}, {listed}"
