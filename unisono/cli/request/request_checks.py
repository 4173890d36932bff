"""Find what is wrong with a request for a run, before any process of the run starts.

Most of it follows from the command line, the settings file and the settings that every run has. The script's own
settings are known once the script runs: one process runs it up to `unisono.main`, which reports its settings and the
problems that it finds (`inspect_script`). That takes as long as the script's imports, so `unisono run` does so only if
the request is wrong anyway; otherwise the processes of the run check its settings before they join.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from unisono.cli.request.run_dir import newest_run, problems_of_run_dir
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.target import script_of
from unisono.cli.start.device_checks import problems_here, problems_where_mixed
from unisono.config import CommandLine, Settings, gather, merge_corrections
from unisono.config.validate import examine, needs_dry_run
from unisono.errors import Problem, SettingsError
from unisono.launcher import local_launch

INSPECTION_SECONDS = 300
"""The longest time for a script to reach `unisono.main`; on a busy machine the import of torch alone takes a minute."""


class ScriptReport(NamedTuple):
    """The settings of a script, as `unisono.main` reports them.

    Args:
        names: all settings by their dotted names.
        table: the table of settings for `--help`.
        defaults: settings of every run for which the script has another default.
        kinds: the type of each setting in words, as `config.kind` returns it.
        results: the settings that results depend on.
        problems: everything that is wrong with the request.
    """

    names: tuple[str, ...]
    table: str
    defaults: Mapping[str, Any]
    kinds: Mapping[str, str] = MappingProxyType({})
    results: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


class CheckedRequest(NamedTuple):
    """A request without a known problem.

    Args:
        script: the script to run.
        threads: the number of threads of each process.
        unsure: whether only the script's model can show that the request is possible.
        serves: whether the first processes are parameter servers.
        report: the script's own report, if it was inspected.
    """

    script: Path
    threads: int
    unsure: bool
    serves: bool
    report: ScriptReport | None


def mentions_unisono(script: Path) -> bool:
    """Return whether a script may call `unisono.main`. A script for another library is never run to be inspected."""
    return b"unisono" in script.read_bytes()


def inspect_script(
    script: Path,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
    ranks: int = 1,
    line: CommandLine = CommandLine(),  # noqa: B008  (frozen)
) -> ScriptReport | None:
    """Run the script up to `unisono.main` in one process, and return the report; None if it never called it.

    Args:
        script: the script.
        request: the request to check.
        ranks: the number of processes of the run.
        line: the typed command, for messages.

    Raises:
        KeyboardInterrupt: if the user interrupts the script.
    """
    if not mentions_unisono(script):
        return None
    earlier = (request.run_dir or newest_run(script.stem)) if request.resume else None
    with tempfile.TemporaryDirectory(prefix="unisono-settings-") as folder:
        file = Path(folder) / "settings.json"
        request = replace(request, describe=file, typed=str(line))
        arguments = request.arguments(earlier or Path(script.stem))
        outcome = local_launch.dry_run(script, arguments, ranks=ranks, seconds=INSPECTION_SECONDS)
        if outcome.stopped:
            raise KeyboardInterrupt
        if not file.is_file():
            return None
        report = ScriptReport(**json.loads(file.read_text(encoding="utf-8")))
    record = outcome.failure.record if outcome.failure is not None else None
    wrong = record is not None and record.exit_status == 2
    return report._replace(problems=record.problems if record is not None and wrong else ())


def checked(
    target: str, ranks: int, request: RunRequest, line: CommandLine, *, cpu_ranks: int = 0, inspect: bool = True
) -> CheckedRequest:
    """Return the request if nothing is wrong with it.

    Args:
        target: the name of a recipe, or the path of a script.
        ranks: the number of processes.
        request: the flags of the run.
        line: the typed command, for messages.
        cpu_ranks: the number of processes that compute on the CPU.
        inspect: inspect the script in any case; otherwise only if the request is wrong.

    Raises:
        SettingsError: with everything that is wrong.
    """
    problems: list[Problem] = []
    if ranks < 1:
        do = str(line.flag("--ranks", "1"))
        problems.append(Problem(f"--ranks {ranks} is out of range.", "A run needs at least one process.", do))
    script, found = Path(target), True
    try:
        script = script_of(target, line)
    except SettingsError as error:  # continue: other problems do not depend on it
        problems[:0], found = error.problems, False
    size, mixed = max(ranks, 1), 0 < cpu_ranks < ranks
    report = inspect_script(script, request, size, line) if found and (inspect or cpu_ranks) else None
    settings, wrong = check_settings(script, size, request, line, report=report, mixed=mixed)
    if found or request.run_dir is not None:  # runs/ has no run of a script that does not exist
        in_run_dir = problems_of_run_dir(script.stem, request.run_dir, resume=request.resume, line=line)
    else:
        in_run_dir = []
    if found and report is None and (problems or wrong or in_run_dir):
        report = inspect_script(script, request, size, line)
    if report is not None and report.problems:
        known = {problem.error for problem in report.problems}
        wrong = [*report.problems, *(problem for problem in wrong if problem.error not in known)]
    if problems := [*problems, *wrong, *in_run_dir]:
        raise SettingsError.of(merge_corrections(problems, line))
    assert settings is not None
    unsure = needs_dry_run(settings) and mentions_unisono(script)
    return CheckedRequest(script, settings.threads, unsure, serves=settings.exchange == "server", report=report)


def check_settings(
    script: Path,
    ranks: int,
    request: RunRequest,
    line: CommandLine,
    *,
    report: ScriptReport | None,
    mixed: bool = False,
) -> tuple[Settings | None, list[Problem]]:
    """Return the settings that every run has, and what is wrong with them.

    Without a report the script's defaults are not known, so only values that the request gives are checked.
    """
    gathered = gather(
        Settings,
        file=request.settings_file,
        sets=request.sets,
        earlier=request.earlier(request.run_dir or newest_run(script.stem)),
        defaults=report.defaults if report is not None else {},
        allow_unknown=True,
        line=line,
    )
    loaded, problems = examine(gathered, ranks, only_given=report is None)
    if loaded is not None and not problems:
        problems += problems_here(loaded.settings, ranks, line)
        problems += problems_where_mixed(loaded.settings, line) if mixed else []
    problems += request.problems_of_accepted((), line) + request.problems_of_faults(line)
    return loaded.settings if loaded is not None else None, problems
