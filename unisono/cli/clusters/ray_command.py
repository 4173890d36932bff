"""unisono ray: train in actors of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from unisono.cli.commands.run_command import launched, numbers
from unisono.cli.request.restarts import Hosts, say_line
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.start.autoresume import resumed_request
from unisono.clusters.ray.ray_connector import RayConnector
from unisono.clusters.ray.ray_room import STRATEGIES, RayRequest, connected, require_ray, reserved
from unisono.config import CommandLine
from unisono.environment import DeviceAssignment, World
from unisono.errors import Problem, SettingsError
from unisono.launcher.hosts.host_list import ListedHost

CLUSTER = Group("Ray", sort_key=3)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class RayFlags:
    """The flags about the cluster.

    Parameters
    ----------
    address
        The cluster: auto for the one of this host, or of RAY_ADDRESS; local for a new one on this host; or HOST:6379.
    cpus_per_rank
        Logical CPUs of each actor.
    gpus_per_rank
        GPUs of each actor.
    strategy
        Placement of actors: PACK on few nodes, SPREAD over many, STRICT_PACK on one, or STRICT_SPREAD one on each.
    wait
        Seconds to wait for room.
    """

    address: Annotated[str, Parameter(metavar="ADDRESS", group=CLUSTER)] = "auto"
    cpus_per_rank: Annotated[float, Parameter(metavar="N", group=CLUSTER)] = 1.0
    gpus_per_rank: Annotated[float, Parameter(metavar="N", group=CLUSTER)] = 0.0
    strategy: Annotated[str, Parameter(metavar="NAME", group=CLUSTER)] = "PACK"
    wait: Annotated[float, Parameter(metavar="SECONDS", group=CLUSTER)] = 60.0

    def words(self) -> Iterator[str]:
        """Yield the flags that are not the default."""
        for name, value, default in (
            ("--address", self.address, "auto"),
            ("--cpus-per-rank", f"{self.cpus_per_rank:g}", "1"),
            ("--gpus-per-rank", f"{self.gpus_per_rank:g}", "0"),
            ("--strategy", self.strategy, "PACK"),
            ("--wait", f"{self.wait:g}", "60"),
        ):
            if value != default:
                yield from (name, value)

    def problems(self, line: CommandLine) -> list[Problem]:
        """Return what is wrong with them."""
        found = []
        if self.strategy not in STRATEGIES:
            do = str(line.flag("--strategy", "PACK"))
            found.append(Problem(f"Invalid value for --strategy: {self.strategy}", f"{', '.join(STRATEGIES)}.", do))
        for name, value, usual in (
            ("--cpus-per-rank", self.cpus_per_rank, "1"),
            ("--gpus-per-rank", self.gpus_per_rank, "1"),
            ("--wait", self.wait, "60"),
        ):
            counts = name != "--wait"
            if value < 0 or (counts and value > 1 and value % 1):
                fact = "Ray takes 0, a fraction of one, or a whole number." if counts else "It takes 0 or more seconds."
                found.append(Problem(f"{name} {value:g} is out of range.", fact, str(line.flag(name, usual))))
        if not self.cpus_per_rank and not self.gpus_per_rank:
            fact = "Each actor needs a part of a CPU or of a GPU, by which Ray finds room for it."
            found.append(Problem("--cpus-per-rank is 0.", fact, str(line.flag("--cpus-per-rank", "1"))))
        return found

    def request(self, ranks: int) -> RayRequest:
        """Return what the run asks of Ray."""
        return RayRequest(ranks, self.cpus_per_rank, self.gpus_per_rank, self.strategy, self.wait)


def ray(
    target: str,
    /,
    *,
    ranks: Annotated[str, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = "1",
    no_dry_run: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False,
    watch: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False,
    cluster: RayFlags = RayFlags(),
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Train on a cluster of Ray, with one actor for each process.

    When a process, an actor or a node dies, the other processes continue, and a fresh actor replaces it. Arguments
    after `--` are passed to the script.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    ranks
        Number of processes, or MIN:MAX (unisono run --help).
    no_dry_run
        Skip the dry run that checks, before the start, whether the model supports the requested parallel layout.
    watch
        Serve the growing report of the run, and print its address (unisono watch).
    """
    flags = [*(["--ranks", ranks] if ranks != "1" else []), *cluster.words(), *["--watch"] * watch]
    flags += ["--no-dry-run"] * no_dry_run
    typed = request.line("unisono", "ray", target, *flags)
    if (world := World.current()).foreign and world.size > 1:
        fact = f"{world.launcher} has started this process as one of {world.size}, and Ray starts all of them."
        raise SettingsError(f"unisono ray cannot be combined with {world.launcher}.", fact, f"{typed}, once")
    request = resumed_request(request, Path(target), typed, restarts=0)
    line = request.line("unisono", "ray", target, *flags)
    sizes = numbers(ranks, 0, line)._replace(devices=DeviceAssignment(sees_only_own=True))
    if problems := cluster.problems(line):
        raise SettingsError.of(problems)
    require_ray()
    asked = cluster.request(sizes.usual)
    return launched(
        target, sizes, request, line, no_dry_run=no_dry_run, watch=watch, places=lambda: actors(cluster.address, asked)
    )


@contextmanager
def actors(address: str, asked: RayRequest) -> Iterator[Hosts]:
    """Connect to a cluster and reserve room, while the block runs."""
    with connected(address), reserved(asked) as room:
        listed = [ListedHost(f"actor-{number}", 1) for number in range(asked.ranks)]
        yield Hosts(listed, RayConnector(room, say_line))
