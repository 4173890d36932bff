"""unisono tune --population: check what was typed, run the population, and print what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unisono.cli.request.request_checks import CheckedRequest, check_settings
from unisono.cli.request.run_dir import lock_run_dir, write
from unisono.cli.request.run_options import RunRequest
from unisono.cli.start.sigterm import ended_by_sigterm
from unisono.cli.tuning.population.lineage import lines_of, result_of
from unisono.cli.tuning.population.member_segment import folder_of
from unisono.cli.tuning.population.population_flags import (
    FACTORS,
    QUANTILE,
    RESAMPLE,
    PopulationFlags,
    factors_of,
    problems_of_space,
)
from unisono.cli.tuning.population.population_record import PopulationRecord
from unisono.cli.tuning.population.population_run import PopulationRun
from unisono.cli.tuning.study_checks import (
    as_before,
    checked_space,
    dimensions_of,
    plain_request,
    problems_of_objectives,
)
from unisono.config import CommandLine
from unisono.config.exchange_registry import EXCHANGES
from unisono.errors import Problem, SettingsError
from unisono.security.file_modes import make_closed


def tune_population(
    given: Mapping[str, Any],
    flags: PopulationFlags,
    request: RunRequest,
    folder: Path,
    before: Mapping[str, Any],
    problems: list[Problem],
    line: CommandLine,
) -> int:
    """Run a study with a population, and return the exit status.

    Args:
        given: The other flags of `unisono tune` by name, and the target.
        flags: The flags of the population.
        request: The flags of all members.
        folder: The folder of the study.
        before: The record of the study that continues; {}: it is new.
        problems: What is wrong so far.
        line: The typed command, for messages.
    """
    typed = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    problems = [*problems, *flags.problems(typed, line)]
    if not before and flags.interval is None:
        facts = "After this number of steps, the worst members copy the best ones."
        problems.append(Problem("--population needs --interval.", facts, str(line.flag("--interval", "100"))))
    request = as_before(request, before)
    search = given["search"] or tuple(before.get("search", ()))
    dimensions = dimensions_of(search, request, line, problems) if search or not problems else []
    objectives = _objectives(given, before, line, problems)
    if problems:
        raise SettingsError.of(problems)
    plain = plain_request(request)
    ready, dimensions = checked_space(given["target"], plain, dimensions, line)
    record = PopulationRecord(
        script=str(ready.script),
        sets=request.sets,
        settings_file=str(request.settings_file or ""),
        own=request.own,
        search=tuple(map(str, dimensions)),
        objectives=tuple(objectives),
        seed=before.get("seed", 0) if given["study_seed"] is None else given["study_seed"],
        population=flags.population or before["population"],
        interval=flags.interval or before.get("interval", 1),
        quantile=flags.quantile or before.get("quantile", QUANTILE),
        factors=factors_of(flags.factors) or tuple(before.get("factors", FACTORS)),
        resample=before.get("resample", RESAMPLE) if flags.resample is None else flags.resample,
    )
    problems = problems_of_space(dimensions, ready.report.results if ready.report is not None else (), line)
    problems += _problems_of_run(ready, plain, record, line)
    problems += record.problems_against(before, folder, line) if before else []
    if problems:
        raise SettingsError.of(problems)
    study = PopulationRun(
        folder=folder,
        record=record,
        dimensions=dimensions,
        script=ready.script,
        request=plain,
        report=ready.report,
        processes=given["ranks"],
        at_once=given["at_once"] or given["ranks"],
        say=partial(print, file=sys.stderr if request.json else sys.stdout, flush=True),
        line=line,
    )
    return _run(study, as_json=request.json)


def _objectives(
    given: Mapping[str, Any], before: Mapping[str, Any], line: CommandLine, problems: list[Problem]
) -> list[tuple[str, str]]:
    """Return the objectives with their directions, and add what is wrong with them to the problems."""
    found = [(name, way) for way in ("minimize", "maximize") for name in given[way]]
    found = found or [(name, way) for name, way in before.get("objectives", [("loss", "minimize")])]
    problems += problems_of_objectives(found, "", line)
    if len(found) > 1:
        facts = f"The objectives are {', '.join(name for name, _ in found)}, and members are ranked by one."
        name, way = found[-1]
        problems.append(Problem("A population has one objective.", facts, str(line.without(f"--{way}", name))))
    return found


def _problems_of_run(
    ready: CheckedRequest, plain: RunRequest, record: PopulationRecord, line: CommandLine
) -> list[Problem]:
    """Return why the runs of a script cannot pause after an interval, as far as the settings say."""
    settings, problems = check_settings(ready.script, 1, plain, line, report=ready.report)
    if settings is None:
        return problems
    found = []
    if EXCHANGES[settings.exchange].loop:
        facts = "A generation ends with a step that all processes make together."
        do = str(line.setting("exchange=tree"))
        found.append(Problem(f"A population cannot use exchange={settings.exchange}.", facts, do))
    if settings.steps is not None and record.interval >= settings.steps:
        facts = f"The run has {settings.steps} steps, so no member would copy another one."
        do = str(line.flag("--interval", str(max(1, settings.steps // 10))))
        found.append(Problem(f"--interval {record.interval} is too long.", facts, do))
    return found


def _run(study: PopulationRun, *, as_json: bool) -> int:
    """Run the study in its folder, and print what it found."""
    folder, line = study.folder, study.line
    make_closed(folder)
    try:
        with ended_by_sigterm(), lock_run_dir(folder, line):
            study.record.write(folder)
            generations = study.run()
            result = result_of(generations, study.record)
            write(folder / "result.json", json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        again = line.without("--resume").flag("--resume")
        print(f"Stopped: members that run are saved.\n  Next: {again}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(result), flush=True)
        return 0
    print("", *lines_of(generations, study.record, result), sep="\n")
    for member in result["best"]:
        run_dir = folder_of(folder, member, generations[-1].begin)
        print(f"  Next: {CommandLine(('unisono', 'export', str(run_dir), 'DIR'))}")
    return 0
