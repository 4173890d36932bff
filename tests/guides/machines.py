"""The machines on which a page is followed: this one; two hosts with SSH servers; two nodes of a Slurm.

Hosts are namespaces with a network of their own (tests/network/hosts.py), and see one folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clusters import slurm_nodes
from tests.guides.page_needs import HOSTS, SLURM
from tests.guides.walk import PROGRAMS, Walk, runnable, walk
from tests.network import hosts as namespaces
from tests.network import ssh_hosts
from tests.network.ssh_hosts import SshHosts


def needs_hosts(page: str) -> bool:
    """Return whether commands of a page are typed on the hosts a and b."""
    return page in HOSTS or any(command.host for command in runnable(page))


def missing_for(page: str) -> str:
    """Return the reason why this machine cannot follow a page; "" if it can."""
    if page in SLURM:
        return slurm_nodes.missing()
    return namespaces.missing() or ssh_hosts.missing() if needs_hosts(page) else ""


def follow(page: str, folder: Path) -> Walk:
    """Type the commands of a page in a folder, on the machines that the page is for."""
    if page in SLURM:
        return _follow_with_slurm(page, folder)
    if not needs_hosts(page):
        return walk(page, folder)
    with _two_hosts(folder) as prefixes:
        return walk(page, folder, prefixes)


@contextmanager
def _two_hosts(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Start the hosts a and b, and yield the words that start a program in the folder on each."""
    with namespaces.hosts(2, shared=[folder]) as machines:
        ssh = SshHosts(machines, folder / ".ssh")
        wrapper = folder / PROGRAMS / "ssh"
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {ssh.config} "$@"\n')
        wrapper.chmod(0o755)
        prefixes = {host.name: host.command([], folder) for host in machines}
        yield {"": prefixes["a"], **prefixes}


def _follow_with_slurm(page: str, folder: Path) -> Walk:
    """Type the commands on the host of a Slurm's controller, and wait for the jobs that they submit."""
    with slurm_nodes.slurm_nodes(folder, "a", "b") as cluster:
        path = cluster.head.environment["PATH"]
        cluster.head.environment["PATH"] = f"{folder / PROGRAMS}{os.pathsep}{path}"
        found = walk(page, folder, {"": cluster.head.command([], folder)})
        for each in found.typed:
            if each.command.text.startswith("sbatch") and each.status == 0:
                job = each.output.split()[-1]
                state = cluster.wait_for_end(job)
                if state != "COMPLETED":
                    found.problems.append(f"{each.command.place}: job {job} ends as {state}: {cluster.logs()}")
    return found
