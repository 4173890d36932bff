"""The trials of `unisono speedup`: rounds in which each option runs once, so that all see the same noise.

survey      one step: what the script computes with
first       each option once, with cold caches of compiled code: time to compile, bits, promise
round 1..N  each option once, in another order each time: time of a step, over that of the script as it is
together    the options that pay, combined, in further rounds
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.cli.compare.repeated_runs import reason_of
from unisono.cli.compare.trial_runner import Trial, TrialRunner
from unisono.cli.request.request_checks import ScriptReport, check_settings
from unisono.cli.speedup.speed_options import ScriptSurvey, SpeedOption, options
from unisono.cli.speedup.speed_rows import WARM_UP, SpeedRow, TimedTrial, header
from unisono.config import CommandLine, plural
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome
from unisono.report.result_file import read_result

QUIET = ("checkpoint.every=0", "track=", "profile.steps=", "metrics.port=0", "machine.every=0", "audit_every=0")
"""Settings of all trials: nothing but the steps is measured, and no tracker gets the trials as runs."""

UNCHECKED = ("promise.check=false", "divergence.every=0")
"""Settings of timed trials. The first trial of each option checks its promise."""


TOGETHER = "together"


class StoppedByUserError(Exception):
    """The user stopped a trial."""


@dataclass(kw_only=True)
class SpeedTrials(TrialRunner):
    """The trials of one comparison.

    Args:
        ranks: The number of processes.
        rounds: The number of rounds.
        only: The names of the options to try; (): all.
        report: The script's own report.
        run_line: The command that trains, for the last line.

    Attributes:
        base: The row of the script as it is.
        again: The row of the same once more, which shows the noise.
        rows: The rows of the options.
    """

    ranks: int
    rounds: int
    run_line: CommandLine
    only: Sequence[str] = ()
    report: ScriptReport | None = None
    base: SpeedRow = field(default_factory=lambda: SpeedRow(SpeedOption("as it is", (), "")))
    again: SpeedRow = field(default_factory=lambda: SpeedRow(SpeedOption("as it is, again", (), "")))
    rows: list[SpeedRow] = field(default_factory=list)

    def run(self) -> int:
        """Run all trials, print the table, and return the exit status."""
        try:
            outcome = self._start_trial("survey", (), "timing:1:survey:{folder}")
            if outcome.exit_status:
                return self._leave(outcome.exit_status, message=self._baseline_fails(outcome, self.ranks))
            survey = self._survey()
            for option in self._chosen():
                self.rows.append(SpeedRow(option, why_not=survey.why_not(option) or self._misfit(option)))
            self._measure([row for row in self.rows if not row.why_not])
            if (together := self._together()) is not None:
                self.rows.append(together)
                self._measure([together])
        except (StoppedByUserError, KeyboardInterrupt):
            self._table()
            return self._stopped(options=[row.as_json(self.base, pays=self._pays(row)) for row in self.rows])
        self._table()
        return self._end()

    # -- trials

    def _chosen(self) -> Iterator[SpeedOption]:
        """Yield the options to try."""
        known = list(options(max((os.cpu_count() or 1) // self.ranks, 1)))
        return (option for option in known if not self.only or option.name in self.only)

    def _measure(self, rows: Sequence[SpeedRow]) -> None:
        """Run each option once, then all of them in rounds, together with the script as it is, twice."""
        middle = len(rows) // 2
        everything = [self.base, *rows[:middle], self.again, *rows[middle:]]
        for row in everything:
            if row.first is None and row is not self.again:
                self._progress("first run", row)
                row.first = self._trial(row, ())
        done = len(self.base.trials)
        for number in range(done, done + self.rounds):
            turn = number % len(everything)
            for row in everything[turn:] + everything[:turn]:
                if row.failure:
                    continue
                self._progress(f"round {number - done + 1} of {self.rounds}", row)
                found = self._trial(row, UNCHECKED)
                if found is not None:
                    row.trials[number] = found
            if number in self.base.trials and number in self.again.trials:
                usual = (self.base.trials[number].step + self.again.trials[number].step) / 2
                for row in everything:
                    if number in row.trials:
                        row.ratios[number] = row.trials[number].step / usual

    def _trial(self, row: SpeedRow, sets: Sequence[str]) -> TimedTrial | None:
        """Run an option once. Return None if it fails, which the row then says."""
        outcome = self._start_trial(
            row.option.name, (*row.option.sets, *sets), "timing:{steps}::{folder}", threads=_threads(row, self.threads)
        )
        if outcome.exit_status:
            row.failure = reason_of(outcome)[0]
            return None
        result = read_result(self._run_dir(row.option.name)) or {}
        found = self._recorded(row.option.name)
        return TimedTrial(
            seconds=found[0]["seconds"],
            memory=max(each["memory"] for each in found),
            weights=result.get("weights_sha256"),
            promise=result.get("promise", "unknown"),
            reason=result.get("reason", ""),
        )

    def _start_trial(self, name: str, sets: Sequence[str], recording: str, threads: int = 0) -> RunOutcome:
        """Run a trial. Compiled code is cached in a folder of the option, so its first trial compiles everything."""
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache" / name), "PYTHONHASHSEED": "0"}
        trial = Trial(name, self.ranks, (*QUIET, *sets), cache, recording)
        held, self.threads = self.threads, threads or self.threads
        try:
            outcome = self._run(trial)
        finally:
            self.threads = held
        if outcome.stopped:
            raise StoppedByUserError
        return outcome

    def _recorded(self, name: str) -> list[dict[str, Any]]:
        """Return what the processes of a trial have recorded, by rank. Raise SettingsError if it made no step."""
        files = [self.recording(name) / f"rank-{rank}.json" for rank in range(self.ranks)]
        if not all(file.is_file() for file in files):
            facts = "It left its loop before the first update."
            do = "for step in run.steps(train_set), in the function that is passed to unisono.main"
            raise SettingsError(f"{self.script.name} made no step.", facts, do)
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def _survey(self) -> ScriptSurvey:
        first = self._recorded("survey")[0]
        facts = {name: first[name] for name in ("device", "convolutions", "float8_layers", "attention_calls")}
        return ScriptSurvey(**facts, optimizers=first["optimizers"], settings=self._settings("survey"))

    def _misfit(self, option: SpeedOption) -> str:
        """Return why the settings of an option do not go together with the others, or with this machine."""
        request = replace(self.request, sets=(*self.request.sets, *option.sets))
        _, problems = check_settings(self.script, self.ranks, request, self.line, report=self.report)
        return problems[0].facts if problems else ""

    def _together(self) -> SpeedRow | None:
        """Return the best option of each group that pays, without those with fewer digits; None: fewer than two."""
        best: dict[str, SpeedRow] = {}
        for row in sorted((row for row in self.rows if self._is_advised(row)), key=_ratio):
            best.setdefault(row.option.group, row)
        if len(best) < 2:
            return None
        sets = tuple(each for row in best.values() for each in row.option.sets)
        option = SpeedOption(TOGETHER, sets, "together")
        return None if self._misfit(option) else SpeedRow(option)

    def _pays(self, row: SpeedRow) -> bool:
        """Return whether an option was faster in each round than the script as it is was in any."""
        usual = [*self.base.ratios.values(), *self.again.ratios.values()]
        return row.ratio is not None and max(row.ratios.values()) < min(usual)

    def _is_advised(self, row: SpeedRow) -> bool:
        """Return whether an option is faster, with as many digits and the same promise."""
        if not self._pays(row) or row.option.fewer_digits or row.first is None or self.base.first is None:
            return False
        return row.first.promise == self.base.first.promise

    # -- the report

    def _progress(self, when: str, row: SpeedRow) -> None:
        if sys.stderr.isatty():
            print(f"{when}: {row.option.name}", file=sys.stderr, flush=True)

    def _facts(self, status: int) -> dict[str, Any]:
        return {"steps": self.steps, "ranks": self.ranks, "rounds": self.rounds}

    def _table(self) -> None:
        """Print the options that were measured, then those that fail, then those that were not tried."""
        measured = [row for row in self.rows if row.trials and not row.failure]
        width = max(len(row.option.name) for row in (self.again, *self.rows))
        if self.base.trials:
            self._say(header(width))
            for row in (self.base, self.again, *sorted(measured, key=_ratio)):
                self._say(row.line(self.base, width, pays=self._pays(row)))
        for row in self.rows:
            if row.failure:
                self._say(f"{row.option.name:{width}}  fails: {row.failure}")
        for row in self.rows:
            if row.why_not:
                self._say(f"{row.option.name:{width}}  not tried: {row.why_not}")

    def _end(self) -> int:
        facts: dict[str, Any] = {"as_it_is": self.base.as_json(self.base, pays=False)}
        facts["again"] = list(self.again.ratios.values())
        facts["options"] = [row.as_json(self.base, pays=self._pays(row)) for row in self.rows]
        if self.base.failure:
            self._say(f"\nThe script fails as it is: {self.base.failure}")
            return self._leave(1, **facts, message=self.base.failure)
        advised = min((row for row in self.rows if self._is_advised(row)), key=_ratio, default=None)
        made = len(self.base.first.seconds) if self.base.first is not None else 0
        steps = plural(max(made - WARM_UP, 1), "step")  # the script may have fewer steps than were asked for
        self._say(
            f"\nMedians of {plural(self.rounds, 'round')} of {steps}, on {plural(self.ranks, 'process', 'processes')}."
        )
        for row in self.rows:
            if row.option.name == TOGETHER:
                self._say(f"{TOGETHER}: {', '.join(row.option.sets)}.")
            if row.first is not None and self.base.first is not None and row.first.promise != self.base.first.promise:
                self._say(f"{row.option.name} lowers the promise to {row.first.promise}: {row.first.reason}.")
            if self._pays(row) and row.option.fewer_digits:
                self._say(f"{row.option.name} computes with fewer digits: compare the losses of longer runs first.")
        if advised is None:
            self._say("No option with as many digits and the same promise was clearly faster.")
            return self._leave(0, **facts, next=str(self.run_line))
        line = self.run_line.setting(*advised.option.sets)
        changes = advised.bits(self.base)
        self._say(f"{advised.option.name} was clearly faster: {advised.ratio:.2f} of the step time, {changes}.")
        self._say(f"  Next: {line}")
        return self._leave(0, **facts, next=str(line))


def _ratio(row: SpeedRow) -> float:
    return row.ratio if row.ratio is not None else float("inf")


def _threads(row: SpeedRow, usual: int) -> int:
    """Return the number of threads of each process, which OpenMP reads when it is loaded."""
    found = [each.partition("=")[2] for each in row.option.sets if each.startswith("threads=")]
    return int(found[0]) if found else usual
