"""unisono plan: predict the memory and the time of placements from a few micro-batches on one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.compare.repeated_runs import refuse_unfit
from unisono.cli.planning.device_request import DeviceRequest
from unisono.cli.planning.rate_flags import RateFlags
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import CommandLine
from unisono.costs.device_table import bytes_in
from unisono.costs.recorded_costs import WARM_UP
from unisono.errors import SettingsError

STEPS, TRIALS = 6, 3


def plan(
    target: str,
    /,
    *,
    ranks: Annotated[int | None, WHOLE, Parameter(name=("--ranks", "-n"), metavar="N", group=WHERE)] = None,
    memory: Annotated[str, Parameter(metavar="SIZE", show_default=False, group=WHERE)] = "",
    steps: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = STEPS,
    virtual_ranks: Annotated[bool, Parameter(negative=(), show_default=False, group=WHERE)] = False,
    trials: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = TRIALS,
    offload: Annotated[bool, Parameter(negative=(), show_default=False, group=WHERE)] = False,
    rates: RateFlags = RateFlags(),  # noqa: B008  (frozen)
    compared: DeviceRequest = DeviceRequest(),  # noqa: B008  (frozen)
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Predict the memory and the step time of a script's placements, without training.

    One process computes a step of fake tensors, which need no memory, and a few steps of real ones. So do 2, 4, ...
    processes together. The placements that fit are listed, quickest first, as commands to type.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    ranks
        The largest number of processes. By default one for each core, at most one for each virtual rank.
    memory
        The memory that a process may use, as in 24GB. By default that of this machine, divided by the processes.
    steps
        Number of steps that processes compute. The first 2 are not timed.
    virtual_ranks
        Also measure the same batch with 1, 2, 4, ..., 32 virtual ranks on one process.
    trials
        How often placements that are close to the quickest are measured; up to three times as often on a machine whose
        speed varies.
    offload
        Also plan shards in the memory of the host (parallel.offload), on this machine.
    """
    words = ["--ranks", str(ranks)] if ranks is not None else []
    words += ["--memory", memory] if memory else []
    words += ["--steps", str(steps)] if steps != STEPS else []
    words += ["--virtual-ranks"] if virtual_ranks else []
    words += ["--trials", str(trials)] if trials != TRIALS else []
    words += ["--offload"] if offload else []
    words += compared.words
    line = request.line("unisono", "plan", target, *words)
    if rates.given:
        return rates.test(target, ranks, request, line)
    refuse_unfit(line, steps, request)
    _refuse_too_few(steps, trials, line)
    limit = bytes_of_text(memory, line) if memory else None
    devices = compared.found(line)
    script, threads, *_ = checked(target, 1 if ranks is None else ranks, request, line)
    from unisono.cli.planning.plan_trials import PlanTrials  # here, because it loads numpy

    with tempfile.TemporaryDirectory(prefix="unisono-plan-") as folder:
        return PlanTrials(
            script=script,
            threads=threads,
            steps=steps,
            request=request,
            line=line,
            folder=Path(folder),
            ranks=ranks,
            limit=limit,
            compares_virtual_ranks=virtual_ranks,
            offloads=offload,
            trials=trials,
            devices=devices,
            run_line=request.line("unisono", "run", target).without("--json"),
        ).run()


def _refuse_too_few(steps: int, trials: int, line: CommandLine) -> None:
    """Raise SettingsError if these steps or trials measure nothing."""
    if steps <= WARM_UP:
        facts = f"The first {WARM_UP} steps are not timed."
        raise SettingsError(f"--steps {steps} is out of range.", facts, str(line.flag("--steps", str(STEPS))))
    if trials < 1:
        facts = "Each placement is measured once at least."
        raise SettingsError(f"--trials {trials} is out of range.", facts, str(line.flag("--trials", str(TRIALS))))


def bytes_of_text(text: str, line: CommandLine) -> int:
    """Return the bytes that a size stands for: 24GB, 512 MB or 1000000; 1 GB is 10^9 bytes.

    Raises:
        SettingsError: It is no size above 0.
    """
    found = bytes_in(text)
    if found:
        return found
    facts = "It is a number of bytes above 0, with a unit: 24GB, 512MB."
    raise SettingsError(f"Invalid value for --memory: {text}", facts, str(line.flag("--memory", "24GB")))
