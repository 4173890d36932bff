"""unisono scale: measure strong and weak scaling of a script, and what keeps its steps from becoming shorter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from unisono.cli.compare.repeated_runs import refuse_unfit
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_dir import RUNS
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import CommandLine
from unisono.costs.recorded_costs import WARM_UP
from unisono.errors import Problem, SettingsError

STEPS, ROUNDS = 12, 3


def scale(
    target: str,
    /,
    *,
    ranks: Annotated[str, Parameter(name=("--ranks", "-n"), metavar="N,N,...", show_default=False, group=WHERE)] = "",
    only: Annotated[Literal["strong", "weak"] | None, Parameter(group=WHERE)] = None,
    steps: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = STEPS,
    rounds: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = ROUNDS,
    page: Annotated[Path | None, Parameter(metavar="FILE", show_default=False, group=WHERE)] = None,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Measure the time of a step on several numbers of processes: speed-up, efficiency, and what costs it.

    Strong scaling: the same batch. Weak scaling: the same batch for each process. Each number of processes runs once
    in every round, a few steps long. These runs are deleted. A page with the curves is written.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    ranks
        The numbers of processes, as in 1,2,4. By default powers of two up to the cores of this machine.
    only
        Measure one of the two.
    steps
        Number of steps of each run. The first 2 are not timed.
    rounds
        Number of runs of each number of processes.
    page
        The file for the plot, a page of HTML. By default runs/NAME-scale.html.
    """
    words = ["--ranks", ranks] if ranks else []
    words += ["--only", only] if only else []
    words += ["--steps", str(steps)] if steps != STEPS else []
    words += ["--rounds", str(rounds)] if rounds != ROUNDS else []
    words += ["--page", str(page)] if page is not None else []
    line = request.line("unisono", "scale", target, *words)
    refuse_unfit(line, steps, request)
    counts = _counts(ranks)
    if problems := _problems(ranks, counts, steps, rounds, page, line):
        raise SettingsError.of(problems)
    script, threads, *_ = checked(target, counts[-1], request, line)
    from unisono.cli.scaling_curve.scale_trials import ScaleTrials

    with tempfile.TemporaryDirectory(prefix="unisono-scale-") as folder:
        return ScaleTrials(
            script=script,
            threads=threads,
            steps=steps,
            request=request,
            line=line,
            folder=Path(folder),
            counts=counts,
            kinds=("strong", "weak") if only is None else (only,),
            rounds=rounds,
            page=page or RUNS / f"{script.stem}-scale.html",
            run_line=request.line("unisono", "run", target).without("--json"),
        ).run()


def _counts(text: str) -> list[int]:
    """Return the numbers of processes in ascending order; [] if they are no numbers."""
    if not text:
        from unisono.costs.placements import counts_up_to  # here, because it loads numpy
        from unisono.machine.host_load import usable_cores

        return counts_up_to(max(len(usable_cores()), 2))
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        return []


def _problems(
    text: str, counts: list[int], steps: int, rounds: int, page: Path | None, line: CommandLine
) -> list[Problem]:
    """Return everything that is wrong with the flags."""
    problems = []
    if len(counts) < 2 or counts[0] < 1:
        facts = "A curve has at least two numbers of processes, separated by commas, from 1 on."
        problems.append(Problem(f"--ranks {text} is no list to compare.", facts, str(line.flag("--ranks", "1,2"))))
    if steps <= WARM_UP:
        facts = f"The first {WARM_UP} steps are not timed."
        problems.append(Problem(f"--steps {steps} is out of range.", facts, str(line.flag("--steps", str(STEPS)))))
    if rounds < 1:
        facts = "Each number of processes runs at least once."
        problems.append(Problem(f"--rounds {rounds} is out of range.", facts, str(line.flag("--rounds", str(ROUNDS)))))
    if page is not None and not page.parent.is_dir():
        facts = f"There is no folder {page.parent}."
        problems.append(Problem(f"Cannot write {page}.", facts, str(line.without("--page"))))
    return problems
