"""The learning-rate range test of `unisono plan --lr`: one run with growing rates, and a rate that follows from it.

rates       the run with growing rates (train/lr_range/rate_sweep.py)
setting N   two updates with another value of a setting, to see whether the optimizer's rate follows it
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.cli.compare.trial_runner import Trial, TrialRunner
from unisono.cli.planning.rate_page import RateReport, has_peak, write_rate_page
from unisono.cli.speedup.speed_trials import QUIET, UNCHECKED
from unisono.config import CommandLine, Settings, entries_of
from unisono.errors import SettingsError
from unisono.launcher.supervisor import RunOutcome
from unisono.train.lr_range.rate_curve import RateCurve

STILL = ("noise_scale_every=0", "plan.auto=false")
"""Settings of the runs: nothing is measured besides the loss."""

RATE_NAME = re.compile(r"(^|[._])(lr|learning_rate)($|_)")
MOST_TRIED = 3
"""The most settings that are tried."""


class StoppedTestError(Exception):
    """The user stopped a run of the test."""


@dataclass(kw_only=True)
class RateTrial(TrialRunner):
    """The runs of one range test.

    Args:
        ranks: The number of processes.
        first: The first rate.
        last: The last rate.
        page: The file for the plot.
        run_line: The command that trains.
    """

    ranks: int
    first: float
    last: float
    page: Path
    run_line: CommandLine

    def run(self) -> int:
        """Run the test, print what was found, and return the exit status."""
        try:
            outcome = self._sweep("rates", self.steps, ())
            found = self._record("rates")
            if found is None:
                return self._failed(outcome)
            curve = RateCurve.of(found["points"], self.steps)
            place = curve.suggested(peak=has_peak(found["given"]))
            setting = self._setting(found["given"], curve.rates[place]) if place is not None else None
        except (StoppedTestError, KeyboardInterrupt):
            return self._stopped()
        line, search = self._lines(curve, setting)
        report = RateReport(self.script.stem, curve, found, self.steps, self.first, self.last, line, search)
        for text in report.lines():
            self._say(text)
        self.page.parent.mkdir(parents=True, exist_ok=True)
        write_rate_page(self.page, report)
        self._say(f"Plot: {self.page}")
        next_ = str(line) if line is not None else report.again(self.line)
        if next_:
            self._say(f"  Next: {next_}")
        return self._leave(
            0 if place is not None else 1,
            **report.as_json(),
            setting=setting[0] if setting is not None else None,
            value=setting[1] if setting is not None else None,
            search=str(search) if search is not None else "",
            page=str(self.page),
            next=next_,
        )

    def _lines(
        self, curve: RateCurve, setting: tuple[str, float, float] | None
    ) -> tuple[CommandLine | None, CommandLine | None]:
        """Return the commands that train with the suggested rate, and that search up to the rate of the lowest loss."""
        if setting is None or curve.lowest is None or curve.steepest is None:
            return None, None
        name, value, scale = setting
        between = f"{name}=log({curve.rates[curve.steepest] * scale:.3g},{curve.rates[curve.lowest] * scale:.3g})"
        words = self.run_line.without("--set", self._typed(name)).words
        tune = CommandLine((words[0], "tune", *words[2:])).flag("--search", between)
        return self.run_line.setting(f"{name}={value:.3g}"), tune

    def _typed(self, name: str) -> str:
        """Return the --set of a setting, as it was typed; one that is in no command, if it was not."""
        typed = [each for each in self.request.sets if each.partition("=")[0].strip() == name]
        return typed[-1] if typed else f"{name}="

    def _facts(self, status: int) -> dict[str, Any]:
        return {"ranks": self.ranks, "steps": self.steps, "from": self.first, "to": self.last}

    def _sweep(self, name: str, count: int, sets: tuple[str, ...]) -> RunOutcome:
        sets = (f"steps={count + 1}", "epochs=none", *sets)  # the loss after an update is that of the next step
        recording = f"rates:{self.first!r}:{self.last!r}:{count}:{{folder}}"
        outcome = self._run(Trial(name, self.ranks, (*QUIET, *UNCHECKED, *STILL, *sets), {}, recording))
        if outcome.stopped:
            raise StoppedTestError
        return outcome

    def _record(self, name: str) -> dict[str, Any] | None:
        """Return what a run has recorded; None: it failed before its first update, or for another reason."""
        file = self.recording(name) / "rank-0.json"
        found: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        if found is not None and not found["given"]:
            facts = "No update of its loop stepped an optimizer with a learning rate."
            do = "step.update(optimizer), with an optimizer of torch.optim"
            raise SettingsError(f"{self.script.name} has no learning rate to test.", facts, do)
        return found

    def _failed(self, outcome: RunOutcome) -> int:
        """Report a run without a record, and return the exit status."""
        record = outcome.failure.record if outcome.failure is not None else None
        if record is not None and record.exit_status == 2 and record.problems:
            raise SettingsError.of(list(record.problems))
        if outcome.failure is None:
            facts = "It left its loop before the first update."
            do = "for step in run.steps(train_set), in the function that is passed to unisono.main"
            raise SettingsError(f"{self.script.name} made no step.", facts, do)
        return self._leave(1, message=self._baseline_fails(outcome, self.ranks))

    # -- the setting

    def _setting(self, given: Mapping[str, float], rate: float) -> tuple[str, float, float] | None:
        """Return the setting that the optimizer's rate follows, its value for a rate, and value over rate.

        None: there is no such setting.
        """
        settings = self._settings("rates")
        scaled = settings.get("precision") == "fp16"  # its first updates may be skipped, until the loss scale fits
        more = ("precision=fp32",) if scaled else ()
        for number, (name, value) in enumerate(_candidates(settings, given)):
            if number == MOST_TRIED:
                break
            outcome = self._sweep(f"setting {number}", 2, (f"{name}={2 * value!r}", *more))
            other = self._record(f"setting {number}") if not outcome.exit_status else None
            if other is not None and math.isclose(peak(other["given"]), 2 * peak(given), rel_tol=1e-9):
                return name, rate * value / peak(given), value / peak(given)
        return None


def peak(given: Mapping[str, float]) -> float:
    """Return the rate that the script gave its first parameter group. A one-cycle schedule begins below it."""
    return given.get("max_lr", given["lr"])


def _candidates(settings: Mapping[str, Any], given: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the script's own settings that may be the learning rate, with their values: by name, then by value."""
    every_run = {entry.name for entry in entries_of(Settings)}
    numbers = {
        name: float(value)
        for name, value in settings.items()
        if name not in every_run and isinstance(value, float) and value > 0
    }
    named = [name for name in numbers if RATE_NAME.search(name)]
    equal = [name for name, value in numbers.items() if value in (peak(given), given["lr"])]
    for name in dict.fromkeys([*(each for each in named if each in equal), *named, *equal]):
        yield name, numbers[name]
