"""unisono speedup: measure which other kernels make the steps of a script faster, and what they do to its bits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.compare.repeated_runs import refuse_unfit
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.cli.speedup.speed_options import options
from unisono.cli.speedup.speed_rows import WARM_UP
from unisono.cli.speedup.speed_trials import SpeedTrials
from unisono.config import CommandLine, nearest_name
from unisono.errors import SettingsError

STEPS, ROUNDS = 12, 3


def speedup(
    target: str,
    /,
    *,
    ranks: Annotated[int, WHOLE, Parameter(name=("--ranks", "-n"), metavar="N", group=WHERE)] = 1,
    steps: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = STEPS,
    rounds: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = ROUNDS,
    only: Annotated[tuple[str, ...], Parameter(metavar="OPTION", show_default=False, group=WHERE)] = (),
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Try other kernels on a few steps of a script: step time, memory, time to compile, and bits.

    Compiled layers, models and optimizers, fused optimizers, channels_last, back ends of attention, threads, and
    formats with fewer digits. Each option runs once in every round. These runs are deleted.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    ranks
        The number of processes.
    steps
        Number of steps of each run. The first 3 are not timed.
    rounds
        Number of timed runs of each option.
    only
        An option to try, as the table names it. Repeatable. By default all of them.
    """
    words = ["--ranks", str(ranks)] if ranks != 1 else []
    words += ["--steps", str(steps)] if steps != STEPS else []
    words += ["--rounds", str(rounds)] if rounds != ROUNDS else []
    words += [word for each in only for word in ("--only", each)]
    line = request.line("unisono", "speedup", target, *words)
    refuse_unfit(line, steps, request)
    _check(steps, rounds, only, line)
    script, threads, *_, report = checked(target, ranks, request, line)
    of_run = ["--ranks", str(ranks)] if ranks != 1 else []
    with tempfile.TemporaryDirectory(prefix="unisono-speedup-") as folder:
        return SpeedTrials(
            script=script,
            threads=threads,
            steps=steps,
            request=request,
            line=line,
            folder=Path(folder),
            ranks=ranks,
            rounds=rounds,
            only=only,
            report=report,
            run_line=request.line("unisono", "run", target, *of_run).without("--json"),
        ).run()


def _check(steps: int, rounds: int, only: tuple[str, ...], line: CommandLine) -> None:
    """Raise SettingsError for a request that cannot work."""
    if steps <= WARM_UP:
        facts = f"The first {WARM_UP} steps are not timed."
        raise SettingsError(f"--steps {steps} is out of range.", facts, str(line.flag("--steps", str(STEPS))))
    if rounds < 1:
        facts = "At least one round is timed."
        raise SettingsError(f"--rounds {rounds} is out of range.", facts, str(line.flag("--rounds", str(ROUNDS))))
    known = [option.name for option in options(1)]
    for name in only:
        if name not in known:
            near = nearest_name(name, known)
            do = line.flag("--only", near, name) if near is not None else line.without("--only", name)
            raise SettingsError(f"There is no option {name}.", f"Options are: {', '.join(known)}.", str(do))
