"""The flags that name several hosts: --hosts for ssh; --nodes, --node and --meet where each host runs the command."""

from __future__ import annotations

from typing import NamedTuple

from unisono.cli.request.restarts import Hosts, say_line
from unisono.errors import SettingsError
from unisono.launcher.hosts.cluster import SshConnector
from unisono.launcher.hosts.host_list import ListedHost, assign_slots, parse_hosts
from unisono.launcher.hosts.node_link import MeetingPoint, NodeConnector, serve_node


class HostFlags(NamedTuple):
    """The flags, as they were typed."""

    listed: str
    nodes: int
    node: int
    meet: str

    @property
    def words(self) -> list[str]:
        """The flags that are not the default."""
        found = ["--hosts", self.listed] if self.listed else []
        if self.nodes != 1 or self.meet:
            found += ["--nodes", str(self.nodes), "--node", str(self.node), "--meet", self.meet]
        return found

    @property
    def is_agent(self) -> bool:
        """Whether this host only runs processes that node 0 starts."""
        return self.nodes > 1 and self.node > 0

    def ranks(self, typed: str) -> str:
        """Return the number of processes: as typed, or the slots of the hosts.

        Raises:
            SettingsError: the flags are wrong, or contradict each other.
        """
        if self.listed and self.nodes != 1:
            fact = "ssh starts all processes from one host; with --nodes the command is typed on each."
            raise SettingsError("--hosts cannot be combined with --nodes.", fact, "one of them")
        if self.nodes > 1 and not self.meet:
            fact = "The nodes need an address at which they find each other."
            raise SettingsError("--nodes needs --meet.", fact, "--meet HOST:29500, the host of node 0 and a port there")
        if self.nodes < 1 or not 0 <= self.node < self.nodes:
            fact = f"Nodes have the numbers from 0 to {max(0, self.nodes - 1)}."
            raise SettingsError(
                f"--node {self.node} is out of range.", fact, "--node 0 on the first host, --node 1 ..."
            )
        if typed != "1":
            return typed
        if self.nodes > 1:
            return str(self.nodes)
        return str(sum(max(1, host.slots) for host in parse_hosts(self.listed))) if self.listed else typed

    def hosts(self, ranks: int) -> Hosts | None:
        """Return the hosts; None: this one alone."""
        if self.listed:
            return Hosts(assign_slots(parse_hosts(self.listed), ranks), SshConnector())
        if self.nodes > 1:
            listed = [ListedHost(f"node-{number}", is_here=number == self.node) for number in range(self.nodes)]
            return Hosts(assign_slots(listed, ranks), NodeConnector(MeetingPoint.parse(self.meet), say_line))
        return None

    def serve(self) -> int:
        """Serve node 0. Return the exit status of the run."""
        return serve_node(self.node, MeetingPoint.parse(self.meet), say_line)
