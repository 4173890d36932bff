"""unisono run: train a recipe or a script, in as many processes as asked."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.request import WHERE, Request
from unisono.cli.rundir import choose_run_dir, newest_run, problems_of_run_dir
from unisono.cli.target import script_of
from unisono.errors import Problem, SettingsError
from unisono.launch import local
from unisono.launch.supervise import Outcome
from unisono.settings import Settings, check, load, settings_of


def run(
    target: str,
    /,
    *,
    ranks: Annotated[int, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = 1,
    request: Request = Request(),  # noqa: B008  (frozen)
) -> int:
    """Train a recipe or a script.

    Everything that is wrong with the request is told before any process starts. What comes after `--` is the script's.

    Parameters
    ----------
    target
        A recipe's name, or the path to a script.
    ranks
        How many processes. The result is the same for any number.
    """
    script, threads = _checked(target, ranks, request)
    command = f"unisono run {target}"
    run_dir = choose_run_dir(script.stem, request.run_dir, resume=request.resume, command=command)
    started = time.time()
    outcome = local.run(script, request.arguments(run_dir), ranks=ranks, logs=run_dir / "log", threads=threads)
    if request.json:
        print("\n" * outcome.in_line + json.dumps(_told(outcome, run_dir, started)), flush=True)
    return outcome.exit_status


def _checked(target: str, ranks: int, request: Request) -> tuple[Path, int]:
    """The script, and the threads of each process. Raises SettingsError with everything that is wrong."""
    script = script_of(target)
    problems: list[Problem] = []
    threads = 1
    if ranks < 1:
        problems.append(Problem(f"--ranks {ranks}", "A run needs at least one process.", "--ranks 1"))
    if request.accept_change and not request.resume:
        asked = " ".join(f"--accept-change {each}" for each in request.accept_change)
        problems.append(Problem(asked, "Only a resumed run has something to differ from.", f"{asked} --resume"))
    try:
        threads = _check_settings(script, target, max(ranks, 1), request)
    except SettingsError as error:
        problems.extend(error.problems)
    command = f"unisono run {target}"
    problems.extend(problems_of_run_dir(script.stem, request.run_dir, resume=request.resume, command=command))
    if problems:
        raise SettingsError.of(problems)
    return script, threads


def _check_settings(script: Path, target: str, ranks: int, request: Request) -> int:
    """Check the script's settings as far as they are known without running it; return its threads."""
    cls = settings_of(script)
    sets = request.sets_after(request.run_dir or newest_run(script.stem))
    if cls is not None:
        settings: Any = load(cls, file=request.settings_file, sets=sets).settings
        problems = check(settings, ranks, target)
    else:
        # Only what is given here is known, and only the names that every run has: the script's own say the rest.
        loaded = load(Settings, file=request.settings_file, sets=sets, strangers=True)
        settings = replace(loaded.settings, steps=loaded.settings.steps or 1)
        given = {name for name, source in loaded.sources.items() if source != "default"}
        named = {f"{ranks} processes": "virtual_ranks"}
        problems = [
            problem
            for problem in check(settings, ranks, target)
            if named.get(problem.asked, problem.asked.partition(" = ")[0]) in given
        ]
    if problems:
        raise SettingsError.of(problems)
    return int(settings.threads)


def _told(outcome: Outcome, run_dir: Path, started: float) -> dict[str, Any]:
    """How it ended, for programs: the run's own result, or the error."""
    if outcome.failure is not None:
        record = outcome.failure.record
        return {
            "error": {
                "exit_status": outcome.exit_status,
                "rank": outcome.failure.rank,
                "signal": outcome.failure.signal or None,
                "type": record.kind if record else None,
                "message": record.message if record else str(outcome.failure),
                "traceback": record.traceback if record else None,
                "problems": [problem._asdict() for problem in record.problems] if record else [],
                "run_dir": str(run_dir),
                "log": str(outcome.failure.log),
            }
        }
    result = run_dir / "result.json"
    if result.exists() and result.stat().st_mtime >= started:
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content
    return {"stopped": outcome.stopped, "exit_status": outcome.exit_status, "run_dir": str(run_dir)}
