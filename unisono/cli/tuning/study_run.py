"""Run a study: ask for rounds of trials, run them side by side, prune them, and give them free processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from unisono.cli.request.request_checks import ScriptReport, check_settings
from unisono.cli.request.run_options import RunRequest
from unisono.cli.tuning.proposals import Optimizer, PruningJudge
from unisono.cli.tuning.round_plan import MoveTimes, RunningTrial, larger, rounds, share, taken
from unisono.cli.tuning.study_record import BUILT_IN, FILE, StudyRecord
from unisono.cli.tuning.study_storage import StudyStorage
from unisono.cli.tuning.study_table import TrialRow
from unisono.cli.tuning.trial_process import POLL_SECONDS, STOPPED, VALUES, TrialProcess
from unisono.cli.tuning.trial_values import TrialValues
from unisono.config import CommandLine, nearest_name, shown
from unisono.errors import SettingsError, StudyError
from unisono.report.result_file import read_result

STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


@dataclass
class ActiveTrial:
    """A trial of the present round.

    Attributes:
        number: Its number.
        process: Its run.
        values: What it has logged.
        judge: Decides whether it is pruned.
        most: The largest number of processes on which its settings can run.
        known: Intermediate values that the storage has already, by step.
        judged: The number of reports that the judge has seen.
        verdict: The state in which it ends, and why; None: not decided.
        decided: The number of steps after which the judge or a value that is not finite ended it; 0: neither.
        moves: The number of processes on which it continues; 0: it was not stopped for a move.
        stopped: The time of the signal that stopped it for a move, in seconds since 1970; 0: the move was measured.
        timed: The time of the newest beginning that was measured.
        reports: The values that were judged, as (step, value).
    """

    number: int
    process: TrialProcess
    values: TrialValues
    judge: PruningJudge
    most: int
    known: Mapping[int, float]
    judged: int = 0
    verdict: tuple[TrialState, str] | None = None
    decided: int = 0
    moves: int = 0
    stopped: float = 0.0
    timed: float = 0.0
    reports: list[tuple[int, float]] = field(default_factory=list)


@dataclass(kw_only=True)
class StudyRun:
    """One execution of a study.

    Attributes:
        folder: The folder of the study.
        record: Everything on which the trials depend.
        optimizer: Asks for trials, and prunes them.
        storage: Has the trials.
        script: The script.
        request: The flags of all trials.
        report: The script's own report.
        trials: The number of trials.
        processes: The number of processes of the study.
        at_once: The largest number of trials side by side.
        moving: Whether trials continue on processes that become free.
        say: Prints a line.
        line: The typed command, for messages.
        times: What moves have taken in this execution.
    """

    folder: Path
    record: StudyRecord
    optimizer: Optimizer
    storage: StudyStorage
    script: Path
    request: RunRequest
    report: ScriptReport | None
    trials: int
    processes: int
    at_once: int
    moving: bool
    say: Callable[[str], None]
    line: CommandLine
    times: MoveTimes = field(default_factory=MoveTimes)

    def run(self) -> list[TrialRow]:
        """Run all trials that have not finished, and return all rows."""
        for numbers in rounds(self.trials, self.record.round_size):
            known = self.storage.trials()
            if not all(n < len(known) and known[n].state.is_finished() for n in numbers):
                whole = range(numbers.start, numbers.start + self.record.round_size)
                self._run_round(whole, numbers, self._asked(whole, known))
            if numbers.start == 0:
                self._require_metrics([row_of(trial) for trial in self.storage.trials()[: numbers.stop]])
        return [row_of(trial) for trial in self.storage.trials()[: self.trials] if trial.state.is_finished()]

    def _asked(self, numbers: range, known: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return the trials of a round. Ask for them, unless the storage has all of them."""
        if len(known) < numbers.stop:
            for proposal in self.optimizer.ask(known[: numbers.start], len(numbers))[len(known) - numbers.start :]:
                self.storage.add(proposal, self.optimizer.space)
            known = self.storage.trials()
        return list(known[numbers.start : numbers.stop])

    def _run_round(self, whole: range, numbers: range, asked: Sequence[FrozenTrial]) -> None:
        """Run the trials of a round."""
        earlier = self.storage.trials()[: whole.start]
        waiting = [
            self._active(number, earlier, asked, whole)
            for number in numbers
            if not asked[number - whole.start].state.is_finished()
        ]
        running: list[ActiveTrial] = []
        try:
            while waiting or running:
                self._require_folder()
                self._start(waiting, running)
                if self.moving and not waiting:
                    self._move(running)
                for trial in list(running):
                    ended = not trial.process.is_running
                    self._judge(trial)
                    self._time(trial)
                    if ended:
                        running.remove(trial)
                        self._ended(trial, waiting)
                time.sleep(POLL_SECONDS)
        except BaseException:
            for trial in running:
                trial.process.stop()
            for trial in running:
                trial.process.wait()
            raise

    def _require_folder(self) -> None:
        """Raise StudyError if the folder of the study was removed."""
        if not (self.folder / FILE).is_file():
            facts = f"{self.folder / FILE} was removed while the study was running."
            do = self.line.without("--resume").flag("--run-dir", f"{self.folder}-2")
            raise StudyError("The folder of the study is gone.", facts, f"{do} (from the start)")

    def _active(self, number: int, earlier: Sequence[FrozenTrial], asked: Sequence[FrozenTrial], whole: range) -> Any:
        """Return a trial that is about to run."""
        frozen, run_dir = asked[number - whole.start], self.folder / "trials" / f"{number:04d}"
        sets = (*self.request.sets, *(f"{name}={shown(value)}" for name, value in frozen.params.items()))
        request = replace(self.request, sets=sets)
        judge = self.optimizer.judge(earlier, asked, number - whole.start)
        process = TrialProcess(self.script, request, run_dir)
        most = next((n for n in range(self.processes, 0, -1) if self._fits(request, n)), 1)
        return ActiveTrial(
            number, process, TrialValues(run_dir / VALUES), judge, most, dict(frozen.intermediate_values)
        )

    def _fits(self, request: RunRequest, ranks: int) -> bool:
        """Return whether the settings of a trial allow this number of processes."""
        return not check_settings(self.script, ranks, request, self.line, report=self.report)[1]

    # -- processes

    def _start(self, waiting: list[ActiveTrial], running: list[ActiveTrial]) -> None:
        """Start waiting trials where there is room."""
        while waiting and len(running) < self.at_once:
            used = [slot for trial in running for slot in trial.process.slots]
            free = self.processes - len(used)
            if not free:
                return
            trial = waiting.pop(0)
            if self._ended_before(trial):
                self._finish(trial)
                continue
            count = trial.moves or share(self.processes, self.at_once, len(waiting) + len(running) + 1)
            trial.process.start(taken(self.processes, used, min(free, count, trial.most)))
            trial.moves = 0
            running.append(trial)

    def _ended_before(self, trial: ActiveTrial) -> bool:
        """Return whether a trial ended before the command was killed, or before the database was lost."""
        failure = trial.process.recorded_failure()
        trial.process.release()
        trial.values.read()
        if not (self._judge(trial) or self._has_result(trial) or failure):
            return False
        if trial.verdict is None and failure:
            trial.verdict = TrialState.FAIL, failure
        return True

    def _has_result(self, trial: ActiveTrial) -> bool:
        """Return whether a trial has ended. A script may evaluate and log after its last step."""
        made = read_result(trial.process.run_dir) or {}
        return trial.values.is_complete and made.get("steps") == trial.values.end["end"]

    def _time(self, trial: ActiveTrial) -> None:
        """Measure how long the newest start took, or the move, once the loop of the trial has begun."""
        begun = float(trial.values.begin.get("t", 0.0))
        if begun <= max(trial.process.began, trial.timed):
            return
        self.times.starts.append(begun - trial.process.began)
        if trial.stopped:
            self.times.moves.append(begun - trial.stopped)
        trial.timed, trial.stopped = begun, 0.0

    def _move(self, running: Sequence[ActiveTrial]) -> None:
        """Stop trials that continue on more processes."""
        if any(trial.moves or trial.verdict for trial in running):
            return  # the processes of those that are ending are counted once they have ended
        free = self.processes - sum(len(trial.process.slots) for trial in running)
        if not free:
            return
        candidates = []
        for trial in running:
            most = min(trial.most, int(trial.values.begin.get("virtual_ranks", 1)))
            began = float(trial.values.begin.get("t", 0.0))  # of an earlier process, until this one enters its loop
            begun = trial.process.began < began < trial.values.newest
            seconds = trial.values.seconds_left() if begun else None
            candidates.append(RunningTrial(trial.number, len(trial.process.slots), most, seconds))
        for number, ranks in larger(candidates, free, self.times.expected_seconds).items():
            trial = next(trial for trial in running if trial.number == number)
            self.say(f"trial {number} moves from {len(trial.process.slots)} to {ranks} processes")
            trial.moves, trial.stopped = ranks, time.time()
            trial.process.stop()

    def _ended(self, trial: ActiveTrial, waiting: list[ActiveTrial]) -> None:
        """Finish a trial whose process has ended, or let it continue on more processes."""
        ended = self._has_result(trial) if trial.moves else trial.values.is_complete
        stopped = trial.process.status == 0 or (trial.moves and trial.process.status in STOPPED)
        if trial.verdict is None and stopped and not ended:
            if trial.moves:
                waiting.append(trial)
                return
            if trial.values.end:  # a signal from outside
                raise KeyboardInterrupt
            trial.verdict = TrialState.FAIL, "The script made no step."
        elif trial.verdict is None and not stopped:
            trial.verdict = TrialState.FAIL, trial.process.reason()
        self._finish(trial)

    # -- values

    def _judge(self, trial: ActiveTrial) -> bool:
        """Read what a trial has logged, and decide whether it ends here. Return whether that is decided."""
        trial.values.read()
        if trial.verdict is not None or not trial.values.total:
            return trial.verdict is not None
        name = self.record.names[0]
        for step, value in trial.values.reports(name)[trial.judged :]:
            trial.judged += 1
            if not math.isfinite(value):
                trial.verdict = TrialState.FAIL, f"{name} is {value} at step {step}: the trial diverges."
            else:
                if step not in trial.known:
                    self.storage.report(trial.number, step, value)
                trial.reports.append((step, value))
                if trial.judge.prunes(step, value):
                    trial.verdict = TrialState.PRUNED, f"{name} was {value:.6g} at step {step}."
            if trial.verdict is not None:
                trial.decided = step + 1
                trial.process.stop()
                return True
        return False

    def _finish(self, trial: ActiveTrial) -> None:
        """Store the result of a trial, and print it."""
        values = trial.values
        values.read()
        found = [values.last(name) for name in self.record.names]
        missing = [name for name, value in zip(self.record.names, found, strict=True) if value is None]
        wrong = [
            f"{n} is {v} at the end."
            for n, v in zip(self.record.names, found, strict=True)
            if v is not None and not math.isfinite(v)
        ]
        never = missing[:1] if trial.verdict is None else []
        if never:
            trial.verdict = TrialState.FAIL, f"It never logs {missing[0]}; it logs {', '.join(values.names)}."
        elif trial.verdict is None and wrong:
            trial.verdict = TrialState.FAIL, wrong[0]
        state, reason = trial.verdict or (TrialState.COMPLETE, "")
        result: list[float] | None = None
        if state == TrialState.COMPLETE:
            result = [value for value in found if value is not None]
        elif state == TrialState.PRUNED:
            result = [trial.reports[-1][1]]
        made = read_result(trial.process.run_dir) or {}
        steps = trial.decided or values.steps
        facts = {"steps": steps, "total": values.total, "computed_steps": values.steps, "reason": reason}
        facts |= {"promise": made.get("promise", "")}
        if state == TrialState.COMPLETE:
            facts |= {"weights_sha256": made.get("weights_sha256")}
        if never:
            facts |= {"missing": never[0], "logged": values.names}
        if state == TrialState.FAIL:
            trial.process.record_failure(reason)
        self.storage.finish(trial.number, state, result, facts, trial.judge.system_attrs)
        self.say(self._line_of(trial, state, result, reason, steps))

    def _line_of(
        self, trial: ActiveTrial, state: TrialState, result: Sequence[float] | None, reason: str, steps: int
    ) -> str:
        if state == TrialState.FAIL:
            what = f"failed: {reason}"
        else:
            pairs = zip(self.record.names, result or (), strict=False)
            what = ", ".join(f"{name} {value:.6g}" for name, value in pairs)
            what += f", pruned after {steps} of {trial.values.total} steps" if state == TrialState.PRUNED else ""
        sets = " ".join(trial.process.request.sets[len(self.request.sets) :])
        return f"trial {trial.number} of {self.trials}: {what} ({sets})"

    def _require_metrics(self, rows: Sequence[TrialRow]) -> None:
        """Raise SettingsError if no trial of the first round has logged some objective."""
        lacking = [row.facts.get("missing") for row in rows]
        if rows and all(lacking):
            name, logged = str(lacking[0]), list(rows[0].facts.get("logged", ()))
            near = nearest_name(name, [*logged, *BUILT_IN]) or (logged or ["loss"])[0]
            direction = dict(self.record.objectives)[name]
            new = self.line.without("--resume").flag(f"--{direction}", near, name)
            do = str(new.flag("--run-dir", f"{self.folder}-2"))
            facts = f"Its trials log {', '.join(logged)}."
            raise SettingsError(f"The script never logs {name}.", facts, do)


def row_of(trial: FrozenTrial) -> TrialRow:
    """Return the row of a finished trial."""
    state = STATES.get(trial.state, "running")
    return TrialRow(trial.number, state, tuple(trial.values or ()), trial.params, trial.user_attrs)
