"""unisono check: compare a few steps of a script on 1, 2 and 3 processes, bit by bit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.compare.repeated_runs import reason_of, refuse_unfit
from unisono.cli.compare.trace_diff import (
    KINDS,
    OTHER_LOADER,
    REPEATED,
    DifferenceCause,
    Key,
    TraceFile,
    cause_of,
    first_difference,
    read,
)
from unisono.cli.compare.trial_runner import Trial, TrialRunner
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import plural
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome

FIXED_HASHES = {"PYTHONHASHSEED": "0"}
FIX = "fix what the message names."

LONGEST_EPOCH = 200
"""Steps of an epoch, up to which a check of the whole epoch is proposed."""

ONE = Trial("1 process", 1)
OTHERS = (Trial(REPEATED, 1), Trial("2 processes", 2), Trial("3 processes", 3))


def check(
    target: str,
    /,
    *,
    steps: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = 3,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Check that a script computes the same bits on 1, 2 and 3 processes.

    If it does not, report the first difference, its step, and the likely cause. Nothing is kept of these runs.

    Exit status 1: the bits differ, or a run fails.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    steps
        Number of steps to compare.
    """
    line = request.line("unisono", "check", target, *(["--steps", str(steps)] if steps != 3 else []))
    refuse_unfit(line, steps, request)
    script, threads, *_ = checked(target, 1, request, line)
    with tempfile.TemporaryDirectory(prefix="unisono-check-") as folder:
        return CountCheck(
            script=script, threads=threads, steps=steps, request=request, line=line, folder=Path(folder)
        ).run()


@dataclass(kw_only=True)
class CountCheck(TrialRunner):
    """The trials of one check."""

    traces: dict[str, TraceFile] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> int:
        """Run the trials until one differs, and return the exit status."""
        outcome = self._trace(ONE)
        if outcome.stopped:
            return self._stopped(cause="stopped")
        if outcome.exit_status or not self.traces[ONE.name].values:
            return self._no_baseline(outcome)
        settings = self._settings(ONE.name)
        virtual_ranks, workers = int(settings["virtual_ranks"]), int(settings["loader.workers"])
        other_loader = Trial(OTHER_LOADER, 1, sets=(f"loader.workers={int(workers == 0)}",))
        self._report(ONE.name, f"{plural(len(self.traces[ONE.name].values), 'value')} of {plural(self.steps, 'step')}")
        for trial in (trial for trial in (*OTHERS, other_loader) if trial.ranks <= virtual_ranks):
            outcome = self._trace(trial)
            if outcome.stopped:
                return self._stopped(cause="stopped")
            if outcome.exit_status:
                self._report(trial.name, "fails")
                return self._fails(trial, outcome)
            first = first_difference(self.traces[ONE.name], self.traces[trial.name])
            self._report(trial.name, "equal" if first is None else f"differs: {first}")
            if first is not None:
                return self._differs(first, trial.name)
        return self._passed(virtual_ranks)

    def _trace(self, trial: Trial) -> RunOutcome:
        outcome = self._run(trial)
        self.traces[trial.name] = read(self.recording(trial.name))
        return outcome

    def _cause(self, first: Key, name: str) -> DifferenceCause:
        """Return the likely cause. If two identical runs differ, further runs narrow it down."""
        one, other, hashes = self.traces[ONE.name], self.traces[name], False
        if name == REPEATED and KINDS[first.kind] == "samples":
            fixed = [Trial(f"fixed {i}", 1, variables=FIXED_HASHES) for i in (1, 2)]
            if not any(self._trace(trial).exit_status for trial in fixed):
                hashes = first_difference(*(self.traces[trial.name] for trial in fixed)) is None
        elif name == REPEATED:
            warned = Trial("warned", 1, recording="{steps}:operators:{folder}")
            self._trace(warned)
            other = replace(other, operators=self.traces[warned.name].operators)
        return cause_of(first, name, one, other, hashes=hashes)

    # -- the report

    def _facts(self, status: int) -> dict[str, Any]:
        return {"placement_proof": status == 0, "runs": self.results}

    def _report(self, name: str, result: str) -> None:
        self.results.append({"run": name, "message": result})
        self._say(f"{name:34} {result}")

    def _passed(self, virtual_ranks: int) -> int:
        most = "1 process" if virtual_ranks == 1 else f"1 to {virtual_ranks} processes"
        self._say(f"\nPlacement-proof: the same bits in {plural(self.steps, 'step')}. Run it on {most}.")
        epoch = self.traces[ONE.name].epoch
        if self.steps <= epoch:
            next_ = f"\n  Next: {self.line.flag('--steps', str(epoch + 1))}" if epoch < LONGEST_EPOCH else ""
            self._say(f"The end of an epoch, after {plural(epoch, 'step')}, was not checked.{next_}")
        return self._leave(0)

    def _differs(self, first: Key, name: str) -> int:
        cause = self._cause(first, name)
        self._say(
            f"\nThe result depends on the placement. First difference, with {name}: {first}."
            f"\n  {cause.facts}\n  Next: {cause.remedy}"
        )
        place = {"step": first.step, "pass": first.walk, "virtual_rank": first.virtual_rank, "number": first.number}
        where = {"what": str(first), "name": first.name, **place}
        return self._leave(1, first=where, with_run=name, cause=cause.name, message=cause.facts, remedy=cause.remedy)

    def _fails(self, trial: Trial, outcome: RunOutcome) -> int:
        message, text = reason_of(outcome)
        self._say(
            f"\nThe result depends on the placement: the script fails with {trial.name}, but not with 1 process."
            f"\n\n{text}"
        )
        return self._leave(1, with_run=trial.name, cause="failure", message=message, remedy=FIX)

    def _no_baseline(self, outcome: RunOutcome) -> int:
        """Report that there is nothing to compare with."""
        if outcome.failure is not None:
            return self._leave(outcome.exit_status, cause="failure", message=self._baseline_fails(outcome), remedy=FIX)
        do = "for step in run.steps(train_set), in the function that is passed to unisono.main"
        raise SettingsError(f"{self.script.name} made no step.", "There is nothing to compare.", do)
