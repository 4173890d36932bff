"""The flags that name several hosts: --hosts for ssh; --nodes, --node, --meet and --secret-file without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.request.restarts import Hosts, say_line
from unisono.cli.request.run_options import WHERE
from unisono.cli.request.suggestions import WHOLE
from unisono.environment import read_nodes
from unisono.errors import SettingsError
from unisono.handshake.mutual_proof import RunSecret
from unisono.handshake.secret_file import read_secret
from unisono.launcher.hosts.cluster import SshConnector
from unisono.launcher.hosts.host_list import ListedHost, assign_slots, parse_hosts
from unisono.launcher.hosts.node_link import MeetingPoint, NodeConnector, serve_node


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """The flags.

    Parameters
    ----------
    hosts
        Start the processes on these hosts with ssh: a:4,b:4 for four on each, or a file with a host on each line.
    nodes
        Number of hosts on which this command is typed, each with its --node, and the same --meet.
    node
        Number of this host, from 0. Node 0 starts the processes of all.
    meet
        The host of node 0, and a port there.
    secret_file
        A file with a secret that is the same on all nodes. Node 0 then accepts no other program at its port.
    """

    hosts: Annotated[str, Parameter(metavar="A:N,B:N", show_default=False, group=WHERE)] = ""
    nodes: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=WHERE)] = 1
    node: Annotated[int, WHOLE, Parameter(metavar="I", show_default=False, group=WHERE)] = 0
    meet: Annotated[str, Parameter(metavar="HOST:PORT", show_default=False, group=WHERE)] = ""
    secret_file: Annotated[str, Parameter(metavar="FILE", show_default=False, group=WHERE)] = ""

    @property
    def words(self) -> list[str]:
        """The flags that are not the default."""
        found = ["--hosts", self.hosts] if self.hosts else []
        if self.nodes != 1 or self.meet:
            found += ["--nodes", str(self.nodes), "--node", str(self.node), "--meet", self.meet]
        return found + (["--secret-file", self.secret_file] if self.secret_file else [])

    @property
    def is_agent(self) -> bool:
        """Whether this host only runs processes that node 0 starts."""
        return self.nodes > 1 and self.node > 0

    def in_job(self, ranks: str) -> HostFlags:
        """Return the flags, with the nodes of the job that an engine has started (SkyPilot, dstack, Kubernetes).

        Without --ranks each node is one process, which needs no launcher: then the flags stay.
        """
        nodes = read_nodes()
        if nodes is None or replace(self, secret_file="").words or ranks == "1":
            return self
        address = f"[{nodes.address}]" if ":" in nodes.address else nodes.address
        return replace(self, nodes=nodes.count, node=nodes.index, meet=f"{address}:{nodes.port}")

    def ranks(self, typed: str) -> str:
        """Return the number of processes: as typed, or the slots of the hosts.

        Raises:
            SettingsError: the flags are wrong, or contradict each other.
        """
        if self.hosts and self.nodes != 1:
            fact = "ssh starts all processes from one host; with --nodes the command is typed on each."
            raise SettingsError("--hosts cannot be combined with --nodes.", fact, "one of them")
        if self.nodes > 1 and not self.meet:
            fact = "The nodes need an address at which they find each other."
            raise SettingsError("--nodes needs --meet.", fact, "--meet HOST:29500, the host of node 0 and a port there")
        if self.secret_file and self.nodes <= 1:
            fact = "The other ways to start a run pass a secret of their own, or have no port."
            raise SettingsError("--secret-file needs --nodes.", fact, "--nodes N --node I --meet HOST:29500")
        if self.nodes < 1 or not 0 <= self.node < self.nodes:
            fact = f"Nodes have the numbers from 0 to {max(0, self.nodes - 1)}."
            raise SettingsError(
                f"--node {self.node} is out of range.", fact, "--node 0 on the first host, --node 1 ..."
            )
        if typed != "1":
            return typed
        if self.nodes > 1:
            return str(self.nodes)
        return str(sum(max(1, host.slots) for host in parse_hosts(self.hosts))) if self.hosts else typed

    def places(self, ranks: int) -> Hosts | None:
        """Return the hosts; None: this one alone."""
        if self.hosts:
            return Hosts(assign_slots(parse_hosts(self.hosts), ranks), SshConnector())
        if self.nodes > 1:
            listed = [ListedHost(f"node-{number}", is_here=number == self.node) for number in range(self.nodes)]
            connector = NodeConnector(MeetingPoint.parse(self.meet), self._secret(), say_line)
            return Hosts(assign_slots(listed, ranks), connector)
        return None

    def serve(self) -> int:
        """Serve node 0. Return the exit status of the run."""
        return serve_node(self.node, MeetingPoint.parse(self.meet), self._secret(), say_line)

    def _secret(self) -> RunSecret:
        """Return the secret of the nodes. Say so if there is none."""
        if self.secret_file:
            return read_secret(self.secret_file)
        say_line(f"Without --secret-file, every program that reaches {self.meet} can be a node of this run.")
        return RunSecret()
