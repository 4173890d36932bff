"""Examine the hosts of a job from within: the first process of each host reports, and probes the links to the others.

The processes are those that torchrun, srun, mpirun or another engine has started. They form a group first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.cli.benchmark.pair_rounds import tournament
from unisono.cli.request.restarts import say_line
from unisono.cli.survey.host_survey import HostClock, Survey, SurveyedHost, SurveyedLink, marked
from unisono.distributed.init import join_process_group
from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.environment import World, variables
from unisono.environment.routes import interface_named, route_to
from unisono.launcher.hosts.host_facts import facts_of
from unisono.launcher.hosts.network.link_probe import LinkProbe, probe
from unisono.train.profiling.host_clocks import measure_clocks


def examine_job(world: World, script: Path | None, run_dir: Path, findings: Sequence[Any]) -> tuple[Survey, list[Any]]:
    """Join the group, and examine its hosts. All processes call this.

    Args:
        world: this process's place in the job.
        script: the script that must be the same on all hosts; None: none.
        run_dir: the folder for runs, which all must see.
        findings: what the first process of a host has found there; others pass ().

    Returns:
        The survey, and the findings of each host with its name, the same on all processes.
    """
    with join_process_group(world) as group, wrap_peer_errors("unisono doctor"):
        names = group.all_gather_object(world.host)
        leaders = [names.index(name) for name in dict.fromkeys(names)]  # the first rank of each host
        with marked(script, run_dir) as own:
            about = group.all_gather_object(own)[0]  # the mark of rank 0
            facts = group.all_gather_object(facts_of(**about) if world.rank in leaders else {})
            group.barrier()
        every = group.all_gather_object(list(findings))
        clocks = group.all_gather_object(
            {name: (each.offset_us, each.round_trip_us) for name, each in measure_clocks(group, names).items()}
        )[0]
        address = _own_address(names, leaders)
        addresses = group.all_gather_object(address)
        hosts = [
            SurveyedHost(names[rank], facts[rank], addresses[rank], _clock(clocks, names[rank]), ()) for rank in leaders
        ]
        links = _links(group, leaders, addresses)
        return Survey(facts[0], hosts, links), [(names[rank], finding) for rank in leaders for finding in every[rank]]


def _clock(clocks: Mapping[str, tuple[float, float]], name: str) -> HostClock | None:
    found = clocks.get(name)
    return HostClock(found[0] / 1e6, found[1] / 2e6) if found is not None else None


def _own_address(names: Sequence[str], leaders: Sequence[int]) -> str:
    """Return the address at which other hosts reach this one: that of gloo's interface, or the name's."""
    if len(leaders) == 1:
        return ""
    named = variables(("GLOO_SOCKET_IFNAME",)).get("GLOO_SOCKET_IFNAME", "")
    found = interface_named(named) or route_to(names[0])
    return found.address if found is not None else ""


def _links(group: ProcessGroup, leaders: Sequence[int], addresses: Sequence[str]) -> list[SurveyedLink]:
    """Measure the links between the first processes of hosts, in rounds of disjoint pairs."""
    mine: dict[str, Any] = {"error": "its address is not known"}
    listening = None
    if group.rank in leaders and addresses[group.rank]:
        listening = LinkProbe(addresses[group.rank], say_line)
        mine = {"port": listening.port, "token": listening.token}
    there = group.all_gather_object(mine)
    found: list[tuple[Any, ...]] = []
    for turn in tournament(len(leaders)):
        for pairs in (turn, [pair[::-1] for pair in turn]):
            group.barrier()
            for source, target in pairs:
                if leaders[source] == group.rank:
                    found.append(tuple(_measured(source, target, addresses[leaders[target]], there[leaders[target]])))
    every = group.all_gather_object(found)
    if listening is not None:
        listening.close()
    return sorted(SurveyedLink(*link) for links in every for link in links)


def _measured(source: int, target: int, address: str, listening: Mapping[str, Any]) -> SurveyedLink:
    if "error" in listening:
        return SurveyedLink(source, target, address, error=str(listening["error"]))
    found = probe(address, listening["port"], listening["token"])
    if "error" in found:
        return SurveyedLink(source, target, address, error=str(found["error"]))
    return SurveyedLink(source, target, address, found["latency_seconds"], found["bytes_per_second"])
