"""unisono tune: search settings of a script. Each trial is a run, and a study is the same wherever it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from unisono.cli.request.request_checks import CheckedRequest, check_settings, checked
from unisono.cli.request.run_dir import RUNS, lock_run_dir, problems_of_run_dir, write
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.cli.start.sigterm import ended_by_sigterm
from unisono.cli.tuning.search_space import Dimension, dimension_of, fitted
from unisono.cli.tuning.study_record import FILE, StudyRecord, read_record
from unisono.cli.tuning.study_table import TrialRow, complete, pareto_front, table
from unisono.config import CommandLine, plural
from unisono.errors import Problem, SettingsError
from unisono.security.file_modes import make_closed

SEARCH = Group("Search", sort_key=0)
TRIALS, ROUND = 20, 4
SAMPLER, PRUNER = "tpe", "median"

Texts = tuple[str, ...]


def tune(
    target: str,
    /,
    *,
    search: Annotated[Texts, Parameter(metavar="NAME=VALUES", show_default=False, group=SEARCH)] = (),
    trials: Annotated[int, WHOLE, Parameter(metavar="N", group=SEARCH)] = TRIALS,
    minimize: Annotated[Texts, Parameter(metavar="NAME", show_default=False, group=SEARCH)] = (),
    maximize: Annotated[Texts, Parameter(metavar="NAME", show_default=False, group=SEARCH)] = (),
    sampler: Annotated[str, Parameter(metavar="NAME", group=SEARCH)] = SAMPLER,
    pruner: Annotated[str, Parameter(metavar="NAME", show_default=False, group=SEARCH)] = "",
    round_size: Annotated[int, WHOLE, Parameter(metavar="N", group=SEARCH)] = ROUND,
    study_seed: Annotated[int, WHOLE, Parameter(metavar="N", group=SEARCH)] = 0,
    storage: Annotated[str, Parameter(metavar="URL", show_default=False, group=SEARCH)] = "",
    ranks: Annotated[int, WHOLE, Parameter(name=("--ranks", "-n"), metavar="N", group=WHERE)] = 1,
    at_once: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=WHERE)] = 0,
    no_move: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Search settings of a script, with Optuna's samplers and pruners. Each trial is a run.

    A study has the same trials and results on any number of processes, and after it was killed: --resume continues it.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    search
        A setting and its values: lr=log(1e-4,1e-1), dropout=linear(0,0.5), model.depth=[2,4,8]. Repeatable.
    trials
        The number of trials. A study that is resumed may have more.
    minimize
        A value that the script logs, or seconds, memory or parameters. Repeatable. By default loss.
    maximize
        The same, for values that are to be large.
    sampler
        tpe, random, gp, nsgaii, cmaes, qmc, grid, bruteforce, with options as in tpe(multivariate=true).
    pruner
        median, hyperband, successivehalving, none, ... By default median, and none for several objectives.
    round_size
        Number of trials that are drawn together. Draws depend on it, and on nothing about processes.
    study_seed
        The seed of the sampler.
    storage
        The address of a database, as in sqlite:///study.db. By default a journal in the folder of the study.
    ranks
        The number of processes of all trials together.
    at_once
        The largest number of trials side by side. By default one for each process.
    no_move
        Do not let trials continue on processes that become free.
    """
    return _tuned(**locals())


def _tuned(
    *,
    target: str,
    search: Texts,
    trials: int,
    minimize: Texts,
    maximize: Texts,
    sampler: str,
    pruner: str,
    round_size: int,
    study_seed: int,
    storage: str,
    ranks: int,
    at_once: int,
    no_move: bool,
    request: RunRequest,
) -> int:
    """Check everything that was typed, and run the study."""
    words = _words(locals())
    line = request.line("unisono", "tune", target, *words)
    if find_spec("optuna") is None:
        raise SettingsError("unisono tune needs the package optuna.", "It is not installed.", INSTALL)
    folder = request.run_dir or RUNS / f"{Path(target).stem}-tune"
    is_new = not (folder / FILE).is_file()
    problems = _problems_of_folder(folder, request, line, is_new=is_new)
    if not is_new and not search and not problems:
        search = tuple(read_record(folder)["search"])
    for flag, number in (
        ("--trials", trials),
        ("--round-size", round_size),
        ("--ranks", ranks),
        ("--at-once", at_once),
    ):
        if number < (0 if flag == "--at-once" else 1):
            problems.append(Problem(f"{flag} {number} is out of range.", "At least 1.", str(line.flag(flag, "1"))))
    dimensions = _dimensions(search, request, line, problems)
    objectives = [(name, "minimize") for name in minimize] + [(name, "maximize") for name in maximize]
    objectives = objectives or [("loss", "minimize")]
    problems += _problems_of_objectives(objectives, pruner, line)
    if problems:
        raise SettingsError.of(problems)
    plain = _plain(request)
    ready, dimensions = _checked(target, plain, dimensions, line)
    record = StudyRecord(
        script=str(ready.script),
        sets=request.sets,
        settings_file=str(request.settings_file or ""),
        own=request.own,
        search=tuple(map(str, dimensions)),
        objectives=tuple(objectives),
        sampler=sampler,
        pruner=pruner or (PRUNER if len(objectives) == 1 else "none"),
        seed=study_seed,
        round_size=round_size,
        storage=storage,
        optuna=_version(),
    )
    if not is_new and (wrong := record.problems_against(folder, line)):
        raise SettingsError.of(wrong)
    return _run(folder, record, dimensions, ready, plain, trials, ranks, at_once or ranks, line, moving=not no_move)


INSTALL = "pip install 'unisono[tune]'"


def _version() -> str:
    from unisono.cli.tuning.study_storage import VERSION

    return VERSION


def _plain(request: RunRequest) -> RunRequest:
    """Return the flags of every trial."""
    return RunRequest(sets=request.sets, settings_file=request.settings_file, own=request.own)


def _words(given: dict[str, Any]) -> list[str]:
    """Return the flags that are not the default, as they are typed."""
    words = [
        word for name in ("search", "minimize", "maximize") for each in given[name] for word in (f"--{name}", each)
    ]
    usual = {"trials": TRIALS, "sampler": SAMPLER, "pruner": "", "round_size": ROUND, "study_seed": 0, "storage": ""}
    for name, default in {**usual, "ranks": 1, "at_once": 0}.items():
        words += [f"--{name.replace('_', '-')}", str(given[name])] if given[name] != default else []
    return words + ["--no-move"] * given["no_move"]


def _problems_of_folder(folder: Path, request: RunRequest, line: CommandLine, *, is_new: bool) -> list[Problem]:
    """Return why a study cannot begin or continue in a folder."""
    resume = request.resume or request.autoresume
    if not is_new and not resume:
        do = f"{line.flag('--resume')}, or: {line.flag('--run-dir', f'{folder}-2')}"
        return [Problem(f"{folder} already contains a study.", "A study continues with --resume.", do)]
    if is_new and request.resume:
        return [Problem("Nothing to resume.", f"There is no study in {folder}.", str(line.without("--resume")))]
    return problems_of_run_dir(folder.name, folder, resume=not is_new, line=line)


def _dimensions(
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


def _problems_of_objectives(objectives: Sequence[tuple[str, str]], pruner: str, line: CommandLine) -> list[Problem]:
    """Return what is wrong with the objectives."""
    names = [name for name, _ in objectives]
    if twice := next((name for name in names if names.count(name) > 1), None):
        do = str(line.without("--maximize", twice).without("--minimize", twice).flag("--minimize", twice))
        return [Problem(f"{twice} is an objective twice.", "Each objective has one direction.", do)]
    if len(names) > 1 and pruner not in ("", "none"):
        facts = f"The objectives are {', '.join(names)}, and a pruner compares one."
        return [Problem("Pruning needs one objective.", facts, str(line.without("--pruner")))]
    return []


def _checked(
    target: str, plain: RunRequest, dimensions: Sequence[Dimension], line: CommandLine
) -> tuple[CheckedRequest, list[Dimension]]:
    """Check the script with the first values of the space, and the types of all values. Raises SettingsError."""
    from dataclasses import replace

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


def _run(
    folder: Path,
    record: StudyRecord,
    dimensions: Sequence[Dimension],
    ready: CheckedRequest,
    plain: RunRequest,
    trials: int,
    ranks: int,
    at_once: int,
    line: CommandLine,
    *,
    moving: bool,
) -> int:
    """Run the study, print the table, and return the exit status."""
    from unisono.cli.tuning.proposals import Optimizer, quiet
    from unisono.cli.tuning.study_run import StudyRun
    from unisono.cli.tuning.study_storage import StudyStorage
    from unisono.cli.tuning.variant_names import build_pruner, build_sampler, problem_of_space

    as_json = "--json" in line.words
    directions = [direction for _, direction in record.objectives]
    optimizer = Optimizer(
        dimensions=dimensions,
        directions=directions,
        sampler=record.sampler,
        pruner=record.pruner,
        seed=record.seed,
        line=line,
    )
    with quiet():
        build_sampler(record.sampler, 0, optimizer.space, line)
        build_pruner(record.pruner, line)
    infinite = any(each.kind != "choices" and not each.whole and not each.step for each in dimensions)
    if problem := problem_of_space(record.sampler, infinite, line):
        raise SettingsError.of([problem])
    make_closed(folder)
    try:
        with ended_by_sigterm(), lock_run_dir(folder, line):
            if fresh := not (folder / FILE).is_file():
                record.write(folder)
            ran = (folder / "trials").is_dir()
            study = StudyRun(
                folder=folder,
                record=record,
                optimizer=optimizer,
                storage=StudyStorage(folder, record.storage, folder.name, directions, line, fresh=fresh, ran=ran),
                script=ready.script,
                request=plain,
                report=ready.report,
                trials=trials,
                processes=ranks,
                at_once=at_once,
                moving=moving,
                say=lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True),
                line=line,
            )
            rows = study.run()
            result = _result(rows, record, directions)
            write(folder / "result.json", json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        again = line.without("--resume").flag("--resume")
        print(f"Stopped: trials that run are saved.\n  Next: {again}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        _print(rows, record, directions, result, line)
    return 0 if complete(rows) else 1


def _result(rows: Sequence[TrialRow], record: StudyRecord, directions: Sequence[str]) -> dict[str, Any]:
    """Return the result of a study for JSON."""
    promises = {row.facts.get("promise") for row in complete(rows)}
    exact = promises <= {"exact"} and not record.is_measured
    reason = "every trial is exact, and draws depend on results of earlier rounds"
    if record.is_measured:
        reason = "an objective is measured, and draws depend on it"
    elif not exact:
        reason = f"trials promise {', '.join(sorted(str(each) for each in promises))}"
    return {
        "promise": "exact" if exact else "tolerance",
        "reason": reason,
        "objectives": record.names,
        "best": [row.number for row in pareto_front(rows, directions)],
        "trials": [row.as_json() for row in rows],
        "steps": sum(row.facts.get("steps", 0) for row in rows),
        "steps_without_pruning": sum(row.facts.get("total", 0) for row in rows),
    }


def _print(
    rows: Sequence[TrialRow], record: StudyRecord, directions: Sequence[str], result: dict[str, Any], line: CommandLine
) -> None:
    """Print the table of a study and the command that trains with the best settings."""
    print("\n" + "\n".join(table(rows, record.names, directions)))
    states = [row.state for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("complete", "pruned", "failed"))
    saved = 1 - result["steps"] / max(1, result["steps_without_pruning"])
    print(f"\n{plural(len(rows), 'trial')}: {counts}. Pruning saved {saved:.0%} of the steps.")
    print(f"promise: {result['promise']} ({result['reason']})")
    for number in result["best"][:3]:
        sets = [word for pair in rows[number].sets.split() for word in ("--set", pair)]
        own = [word for each in record.sets for word in ("--set", each)]
        print(f"  Next: {CommandLine(('unisono', 'run', line.words[2], *own, *sets))}")
