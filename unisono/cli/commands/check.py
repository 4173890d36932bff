"""unisono check: is a script placement-proof? Runs a few steps of it here and there, and lays them side by side."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.compare.trace_diff import (
    AGAIN,
    KINDS,
    WORKER,
    DifferenceCause,
    Key,
    TraceFile,
    cause_of,
    first_difference,
    read,
)
from unisono.cli.compare.trial_runner import Trial, TrialRunner, reason_of, refuse_unfit
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import plural
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome

FIXED_HASHES = {"PYTHONHASHSEED": "0"}
MEND = "mend what the message names."

WORTH = 200
"""An epoch of so many steps is longer than anybody waits."""

ONE = Trial("1 process", 1)
OTHERS = (Trial(AGAIN, 1), Trial("2 processes", 2), Trial("3 processes", 3))


def check(
    target: str,
    /,
    *,
    steps: Annotated[int, WHOLE, Parameter(metavar="N", group=WHERE)] = 3,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Is a script placement-proof? Run a few steps of it on 1, 2 and 3 processes, and compare them bit by bit.

    If they differ: the first thing that does, in which step and where, and why it probably does. Nothing is kept of
    these runs. Exit status 1: they differ, or one of them fails.

    Parameters
    ----------
    target
        A recipe's name, or the path to a script.
    steps
        How many steps are compared.
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
    told: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> int:
        outcome = self._trace(ONE)
        if outcome.stopped:
            return self._stopped()
        if outcome.exit_status or not self.traces[ONE.name].values:
            return self._no_ground(outcome)
        settings = self._settings(ONE.name)
        virtual_ranks, workers = int(settings["virtual_ranks"]), int(settings["loader.workers"])
        worker = Trial(WORKER, 1, sets=(f"loader.workers={int(workers == 0)}",))
        self._tell(ONE.name, f"{plural(len(self.traces[ONE.name].values), 'value')} of {plural(self.steps, 'step')}")
        for trial in (trial for trial in (*OTHERS, worker) if trial.ranks <= virtual_ranks):
            outcome = self._trace(trial)
            if outcome.stopped:
                return self._stopped()
            if outcome.exit_status:
                self._tell(trial.name, "fails")
                return self._fails(trial, outcome)
            first = first_difference(self.traces[ONE.name], self.traces[trial.name])
            self._tell(trial.name, "the same" if first is None else f"differs: {first}")
            if first is not None:
                return self._convict(first, trial.name)
        return self._proof(virtual_ranks)

    # -- runs

    def _trace(self, trial: Trial) -> RunOutcome:
        outcome = self._run(trial)
        self.traces[trial.name] = read(self.notes(trial.name))
        return outcome

    def _cause(self, first: Key, name: str) -> DifferenceCause:
        """The likely cause; where two runs alike differ, more runs tell more of it."""
        one, other, hashes = self.traces[ONE.name], self.traces[name], False
        if name == AGAIN and KINDS[first.kind] == "samples":
            fixed = [Trial(f"fixed {i}", 1, variables=FIXED_HASHES) for i in (1, 2)]
            if not any(self._trace(trial).exit_status for trial in fixed):
                hashes = first_difference(*(self.traces[trial.name] for trial in fixed)) is None
        elif name == AGAIN:
            warned = Trial("warned", 1, notes="{steps}:operators:{folder}")
            self._trace(warned)
            other = replace(other, operators=self.traces[warned.name].operators)
        return cause_of(first, name, one, other, hashes=hashes)

    # -- what is said

    def _tell(self, name: str, said: str) -> None:
        self.told.append({"run": name, "said": said})
        self._say(f"{name:34} {said}")

    def _facts(self, status: int) -> dict[str, Any]:
        return {"placement_proof": status == 0, "runs": self.told}

    def _proof(self, virtual_ranks: int) -> int:
        most = "1 process" if virtual_ranks == 1 else f"1 to {virtual_ranks} processes"
        proved = f"Placement-proof in {plural(self.steps, 'step')}: the same bits wherever it ran."
        self._say(f"\n{proved} Run it on {most}.")
        epoch = self.traces[ONE.name].epoch
        if self.steps <= epoch:
            unseen = f"An epoch has {plural(epoch, 'step')}: what the script does at its end was not seen."
            next_ = f"\n  Next: {self.line.flag('--steps', str(epoch + 1))}" if epoch < WORTH else ""
            self._say(f"{unseen}{next_}")
        return self._leave(0)

    def _convict(self, first: Key, name: str) -> int:
        cause = self._cause(first, name)
        self._say(
            f"\nNot placement-proof. What differs first, with {name}: {first}.\n  {cause.said}\n  Next: {cause.do}"
        )
        place = {"step": first.step, "pass": first.walk, "virtual_rank": first.virtual_rank, "number": first.number}
        where = {"what": str(first), "name": first.name, **place}
        return self._leave(1, first=where, with_run=name, cause=cause.name, said=cause.said, do=cause.do)

    def _fails(self, trial: Trial, outcome: RunOutcome) -> int:
        message, text = reason_of(outcome)
        self._say(f"\nNot placement-proof: it fails with {trial.name}, and not with 1 process.\n\n{text}")
        return self._leave(1, with_run=trial.name, cause="failure", said=message, do=MEND)

    def _no_ground(self, outcome: RunOutcome) -> int:
        """There is nothing to compare with."""
        if outcome.failure is not None:
            return self._leave(outcome.exit_status, cause="failure", said=self._say_no_ground(outcome), do=MEND)
        do = "for step in run.steps(train_set), inside of what is given to unisono.main"
        raise SettingsError(str(self.line), "It ran, and made no step that could be compared.", do)
