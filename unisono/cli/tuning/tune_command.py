"""unisono tune: search settings of a script. Each trial is a run, and a study is the same wherever it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from unisono.cli.request.request_checks import CheckedRequest
from unisono.cli.request.run_dir import RUNS, lock_run_dir, write
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.cli.start.sigterm import ended_by_sigterm
from unisono.cli.tuning.population.population_flags import PopulationFlags
from unisono.cli.tuning.search_space import Dimension
from unisono.cli.tuning.study_checks import (
    as_before,
    checked_space,
    dimensions_of,
    plain_request,
    problems_of_folder,
    problems_of_objectives,
)
from unisono.cli.tuning.study_record import FILE, StudyRecord, read_record
from unisono.cli.tuning.study_table import complete, print_study, require_complete, result_of
from unisono.config import CommandLine
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
    trials: Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False, group=SEARCH)] = None,
    minimize: Annotated[Texts, Parameter(metavar="NAME", show_default=False, group=SEARCH)] = (),
    maximize: Annotated[Texts, Parameter(metavar="NAME", show_default=False, group=SEARCH)] = (),
    sampler: Annotated[str, Parameter(metavar="NAME", show_default=False, group=SEARCH)] = "",
    pruner: Annotated[str, Parameter(metavar="NAME", show_default=False, group=SEARCH)] = "",
    round_size: Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False, group=SEARCH)] = None,
    study_seed: Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False, group=SEARCH)] = None,
    storage: Annotated[str, Parameter(metavar="URL", show_default=False, group=SEARCH)] = "",
    ranks: Annotated[int, WHOLE, Parameter(name=("--ranks", "-n"), metavar="N", group=WHERE)] = 1,
    at_once: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=WHERE)] = 0,
    no_move: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False,
    flags: PopulationFlags = PopulationFlags(),  # noqa: B008  (frozen)
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Search settings of a script, with Optuna's samplers and pruners, or with a population. Each trial is a run.

    A study has the same trials and results on any number of processes, and after it was killed: --resume continues it,
    with everything that was typed at first.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    search
        A setting and its values: lr=log(1e-4,1e-1), dropout=linear(0,0.5), model.depth=[2,4,8]. Repeatable.
    trials
        The number of trials, by default 20. A study that is resumed may have more.
    minimize
        A value that the script logs, or seconds, memory or parameters. Repeatable. By default loss.
    maximize
        The same, for values that are to be large.
    sampler
        tpe (the default), random, gp, nsgaii, cmaes, qmc, grid, bruteforce, with options as in tpe(multivariate=true).
    pruner
        median, hyperband, successivehalving, none, ... By default median, and none for several objectives.
    round_size
        Number of trials that are drawn together, by default 4. Draws depend on it, and on nothing about processes.
    study_seed
        The seed of the sampler, by default 0.
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
    trials: int | None,
    minimize: Texts,
    maximize: Texts,
    sampler: str,
    pruner: str,
    round_size: int | None,
    study_seed: int | None,
    storage: str,
    ranks: int,
    at_once: int,
    no_move: bool,
    flags: PopulationFlags,
    request: RunRequest,
) -> int:
    """Check everything that was typed, and run the study."""
    given = locals()
    words = _words(given, NOT_TYPED)
    line = request.line("unisono", "tune", target, *words, *flags.words())
    folder = request.run_dir or RUNS / f"{Path(target).stem}-tune"
    is_new = not (folder / FILE).is_file()
    where = {"ranks": ranks, "at_once": at_once, "no_move": no_move}
    problems = problems_of_folder(folder, request, line, is_new=is_new)
    before: Mapping[str, Any] = {} if is_new or problems else read_record(folder)
    counts = {"--trials": trials, "--round-size": round_size, "--ranks": ranks, "--at-once": at_once}
    for flag, number in counts.items():
        if number is not None and number < (0 if flag == "--at-once" else 1):
            problems.append(Problem(f"{flag} {number} is out of range.", "At least 1.", str(line.flag(flag, "1"))))
    if flags.population is not None or "population" in before:
        from unisono.cli.tuning.population.population_command import tune_population

        return tune_population(given, flags, request, folder, before, problems, line)
    problems += flags.problems_without_population(line)
    if find_spec("optuna") is None:
        raise SettingsError("unisono tune needs the package optuna.", "It is not installed.", INSTALL)
    request = as_before(request, before)
    search = search or tuple(before.get("search", ()))
    dimensions = dimensions_of(search, request, line, problems) if search or not problems else []
    objectives = [(name, "minimize") for name in minimize] + [(name, "maximize") for name in maximize]
    objectives = objectives or [(name, way) for name, way in before.get("objectives", [("loss", "minimize")])]
    problems += problems_of_objectives(objectives, pruner, line)
    if problems:
        raise SettingsError.of(problems)
    plain = plain_request(request)
    ready, dimensions = checked_space(target, plain, dimensions, line)
    record = StudyRecord(
        script=str(ready.script),
        sets=request.sets,
        settings_file=str(request.settings_file or ""),
        own=request.own,
        search=tuple(map(str, dimensions)),
        objectives=tuple(objectives),
        sampler=sampler or before.get("sampler", SAMPLER),
        pruner=pruner or before.get("pruner", PRUNER if len(objectives) == 1 else "none"),
        seed=before.get("seed", 0) if study_seed is None else study_seed,
        round_size=before.get("round_size", ROUND) if round_size is None else round_size,
        storage=storage or before.get("storage", ""),
        optuna=_version(),
        trials=before.get("trials", TRIALS) if trials is None else trials,
    )
    if not is_new and (wrong := record.problems_against(folder, line)):
        raise SettingsError.of(wrong)
    words = _words({**asdict(record), "study_seed": record.seed, **where, **_ways(record)}, USUAL)
    line = request.line("unisono", "tune", target, *words)
    return _run(folder, record, dimensions, ready, plain, ranks, at_once or ranks, line, moving=not no_move)


NOT_TYPED = {"trials": None, "sampler": "", "pruner": "", "round_size": None, "study_seed": None, "storage": ""}
USUAL = {"trials": TRIALS, "sampler": SAMPLER, "pruner": PRUNER, "round_size": ROUND, "study_seed": 0, "storage": ""}
"""Values of flags that need not be typed."""
INSTALL = "pip install 'unisono[tune]'"


def _version() -> str:
    from unisono.cli.tuning.study_storage import VERSION

    return VERSION


def _ways(record: StudyRecord) -> dict[str, list[str]]:
    """Return the values of --minimize and --maximize."""
    if record.objectives == (("loss", "minimize"),):
        return {"minimize": [], "maximize": []}
    return {way: [name for name, each in record.objectives if each == way] for way in ("minimize", "maximize")}


def _words(given: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """Return the flags that are not usual, as they are typed."""
    words = [
        word for name in ("search", "minimize", "maximize") for each in given[name] for word in (f"--{name}", each)
    ]
    for name, default in {**usual, "ranks": 1, "at_once": 0}.items():
        words += [f"--{name.replace('_', '-')}", str(given[name])] if given[name] != default else []
    return words + ["--no-move"] * given["no_move"]


def _run(
    folder: Path,
    record: StudyRecord,
    dimensions: Sequence[Dimension],
    ready: CheckedRequest,
    plain: RunRequest,
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
    optimizer = Optimizer(
        dimensions=dimensions,
        directions=record.directions,
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
            fresh = not (folder / FILE).is_file()
            storage = StudyStorage(folder, record.storage, folder.name, record.directions, line, fresh=fresh)
            record.write(folder)
            say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
            if storage.is_new and (folder / "trials").is_dir():
                say(f"{storage.where} has no study {folder.name}: its trials are read from {folder / 'trials'}.")
            study = StudyRun(
                folder=folder,
                record=record,
                optimizer=optimizer,
                storage=storage,
                script=ready.script,
                request=plain,
                report=ready.report,
                trials=record.trials,
                processes=ranks,
                at_once=at_once,
                moving=moving,
                say=say,
                line=line,
            )
            rows = study.run()
            result = {**result_of(rows, record), **study.times.as_json()}
            write(folder / "result.json", json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        again = line.without("--resume").flag("--resume")
        print(f"Stopped: trials that run are saved.\n  Next: {again}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print_study(rows, record, result, line)
        require_complete(rows, record, line)
    return 0 if complete(rows) else 1
