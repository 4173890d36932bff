"""`unisono doctor` for the hosts of a list, of --nodes, and of the job in which it is typed."""

from __future__ import annotations

import json as json_
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from unisono.cli.request.host_flags import HostFlags
from unisono.cli.survey.host_survey import Survey, examine_hosts
from unisono.cli.survey.host_troubles import Trouble, troubles_of
from unisono.cli.survey.survey_table import as_json, lines_of
from unisono.environment import World
from unisono.errors import Problem, SettingsError

RUNS = Path("runs")
"""The folder for runs, by default."""


def doctor_hosts(several: HostFlags, script: Path | None, run_dir: Path | None, *, json: bool) -> int:
    """Examine the hosts that the flags name. Return the exit status.

    Raises:
        SettingsError: the flags are wrong, or the script does not exist.
    """
    check_script(script)
    count = int(several.ranks("1"))
    if several.is_agent:
        return several.serve()
    where = several.places(count)
    assert where is not None
    return _ended(examine_hosts(where.listed, where.connector, script, run_dir or RUNS), json, [])


def doctor_job(
    world: World,
    script: Path | None,
    run_dir: Path | None,
    examine: Callable[[], Iterable[tuple[str, str, str, str]]],
    *,
    json: bool,
) -> int:
    """Examine the hosts of the job in which this process is. Rank 0 prints. Return the exit status.

    Args:
        world: this process's place in the job.
        script: the script that must be the same on all hosts; None: none.
        run_dir: the folder for runs, which all hosts must see; None: the default.
        examine: examines this host, and yields findings: level, what was examined, what was found, and what to type.
        json: print the survey as JSON.
    """
    from unisono.cli.survey.job_survey import examine_job  # here, because it loads torch

    check_script(script)
    own = [tuple(finding) for finding in examine()] if world.local_rank == 0 else []
    survey, found = examine_job(world, script, run_dir or RUNS, own)
    troubles = [
        Trouble(level, Problem(f"Host {host}: {what}.", facts, remedy))
        for host, (level, what, facts, remedy) in found
        if level != "ok" and remedy
    ]
    if world.is_main:
        return _ended(survey, json, troubles)
    return _status([*troubles, *troubles_of(survey)])


def check_script(script: Path | None) -> None:
    """Raise SettingsError if there is no such script here."""
    if script is not None and not script.is_file():
        fact = "Each host is compared with this one."
        raise SettingsError(f"There is no script {script} on this host.", fact, "--script PATH, or without --script")


def _ended(survey: Survey, json: bool, more: Sequence[Trouble]) -> int:
    """Print a survey, and return the exit status."""
    troubles = [*more, *troubles_of(survey)]
    status = _status(troubles)
    if json:
        print(json_.dumps({"exit_status": status, **as_json(survey, troubles)}))
        return status
    for line in lines_of(survey, troubles):
        print(line)
    worse = sum(trouble.level != "note" for trouble in troubles)
    names = ",".join(host.name for host in survey.hosts)
    print(f"\n{worse} broken." if worse else f"\nReady. Next: unisono run text --hosts {names}")
    return status


def _status(troubles: Sequence[Trouble]) -> int:
    """Return 2 if a host cannot be examined, 1 if a run cannot start, else 0."""
    levels = {trouble.level for trouble in troubles}
    return 2 if "unreachable" in levels else 1 if "broken" in levels else 0
