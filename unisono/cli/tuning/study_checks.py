"""Check what was typed for a study: its folder, its search space, its objectives, and the settings of its script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.cli.request.request_checks import CheckedRequest, check_settings, checked
from unisono.cli.request.run_dir import problems_of_run_dir
from unisono.cli.request.run_options import RunRequest
from unisono.cli.tuning.search_space import Dimension, dimension_of, fitted
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError


def as_before(request: RunRequest, before: Mapping[str, Any]) -> RunRequest:
    """Return the flags of the trials. What was not typed is as in the record of the study; {}: there is none."""
    file = before.get("settings_file", "")
    return replace(
        request,
        sets=request.sets or tuple(before.get("sets", ())),
        settings_file=request.settings_file or (Path(file) if file else None),
        own=request.own or tuple(before.get("own", ())),
    )


def plain_request(request: RunRequest) -> RunRequest:
    """Return the flags of every trial."""
    return RunRequest(sets=request.sets, settings_file=request.settings_file, own=request.own)


def problems_of_folder(folder: Path, request: RunRequest, line: CommandLine, *, is_new: bool) -> list[Problem]:
    """Return why a study cannot begin or continue in a folder."""
    resume = request.resume or request.autoresume
    if not is_new and not resume:
        do = f"{line.flag('--resume')}, or: {line.flag('--run-dir', f'{folder}-2')}"
        return [Problem(f"{folder} already contains a study.", "A study continues with --resume.", do)]
    if is_new and request.resume:
        start = line.without("--resume")
        start = start if "--search" in line.words else start.flag("--search", "lr=log(1e-4,1e-1)")
        return [Problem("Nothing to resume.", f"There is no study in {folder}.", f"{start} (from the start)")]
    return problems_of_run_dir(folder.name, folder, resume=not is_new, line=line)


def dimensions_of(
    search: Sequence[str], request: RunRequest, line: CommandLine, problems: list[Problem]
) -> list[Dimension]:
    """Return the search space, and add what is wrong with it to the problems."""
    if not search:
        do = str(line.flag("--search", "lr=log(1e-4,1e-1)"))
        problems.append(Problem("A study needs --search.", "It names settings and their values.", do))
    found: list[Dimension] = []
    fixed = {each.partition("=")[0].strip() for each in request.sets}
    for text in search:
        dimension = dimension_of(text, line)
        if isinstance(dimension, Problem):
            problems.append(dimension)
            continue
        if dimension.name in fixed or dimension.name in {each.name for each in found}:
            other = "--set" if dimension.name in fixed else "another --search"
            do = str(line.without("--search", text))
            problems.append(Problem(f"{dimension.name} is searched twice.", f"{other} gives it values as well.", do))
        found.append(dimension)
    return found


def problems_of_objectives(objectives: Sequence[tuple[str, str]], pruner: str, line: CommandLine) -> list[Problem]:
    """Return what is wrong with the objectives."""
    names = [name for name, _ in objectives]
    if twice := next((name for name in names if names.count(name) > 1), None):
        do = str(line.without("--maximize", twice).without("--minimize", twice).flag("--minimize", twice))
        return [Problem(f"{twice} is an objective twice.", "Each objective has one direction.", do)]
    if len(names) > 1 and pruner not in ("", "none"):
        facts = f"The objectives are {', '.join(names)}, and a pruner compares one."
        return [Problem("Pruning needs one objective.", facts, str(line.without("--pruner")))]
    return []


def checked_space(
    target: str, plain: RunRequest, dimensions: Sequence[Dimension], line: CommandLine
) -> tuple[CheckedRequest, list[Dimension]]:
    """Check the script with the first values of the space, and the types of all values. Raises SettingsError."""
    ready = checked(target, 1, plain, line)
    report = ready.report
    if report is None:
        return ready, list(dimensions)
    found = [fitted(dimension, report.kinds, report.names, line) for dimension in dimensions]
    problems = [each for each in found if isinstance(each, Problem)]
    good = [each for each in found if isinstance(each, Dimension)]
    if not problems:
        for end in (0, 1):
            sets = (*plain.sets, *(each.setting(each.ends[end]) for each in good))
            wrong = check_settings(ready.script, 1, replace(plain, sets=sets), line, report=report)[1]
            problems += [problem for problem in wrong if problem not in problems]
    if problems:
        raise SettingsError.of(problems)
    return ready, good
