"""Why a host cannot take part in a run: it cannot be reached, or it differs from the launcher's host."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from unisono.errors import Problem
from unisono.launcher.hosts.remote_host import RemoteHost

CONNECT_SECONDS = 30.0
"""Time limit for a connection to a host and for its facts."""

SAME = {"python": "Python", "torch": "torch", "unisono": "Unisono"}
"""Facts that must be the same on all hosts, and their names in messages."""


def why_unreachable(host: RemoteHost) -> Problem:
    """Return why the agent of a host has not answered, and what to do."""
    if not host.lost:
        fact, do = f"Its agent has not answered within {CONNECT_SECONDS:g} s.", f"ssh {host.name} true"
    elif host.lost.startswith("its shell"):
        fact = f"{host.lost[:1].upper()}{host.lost[1:]}."
        do = f"let the start files of its shell print nothing (ssh {host.name} true)"
    else:
        fact, do = host.link.failure()
    return Problem(f"Cannot start processes on host {host.name}.", fact, do.replace("HOST", host.name))


def differences(name: str, facts: Mapping[str, Any], here: Mapping[str, Any]) -> list[Problem]:
    """Return in what a host differs from this one."""
    problems = []
    error = f"Host {name} differs from {here['host']}."
    for key, what in SAME.items():
        if facts[key] != here[key]:
            fact = f"{what} is {facts[key]} there and {here[key]} here."
            problems.append(Problem(error, fact, f"install the same version there, for {sys.executable}"))
    if facts["script"] != here["script"]:
        fact = "The script is not the same file there." if facts["script"] else "The script does not exist there."
        problems.append(Problem(error, fact, "copy it there, to the same path, or use a shared folder"))
    if not facts["sees_run_dir"]:
        fact = "It does not see the run directory."
        problems.append(Problem(error, fact, "--run-dir DIR, on a file system that all hosts share"))
    return problems
