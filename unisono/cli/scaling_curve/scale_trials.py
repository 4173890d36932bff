"""The trials of `unisono scale`: rounds in which each number of processes runs once, so that all see the same noise.

    strong N    the script as it is, on N processes
    weak N      N / n times the batch and the virtual ranks, where n is the smallest number of processes

The smallest number of processes is the same trial in both, and runs once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.cli.compare.repeated_runs import reason_of
from unisono.cli.compare.trial_runner import Trial, TrialRunner
from unisono.cli.scaling_curve.curve import Kind, ScalePoint, ScalingCurve
from unisono.cli.scaling_curve.curve_report import CurveReport, write_scaling_page
from unisono.cli.speedup.speed_trials import QUIET, UNCHECKED
from unisono.config import CommandLine, plural
from unisono.errors import SettingsError
from unisono.machine.host_load import usable_cores

Record = dict[str, Any]


class StoppedScalingError(Exception):
    """The user stopped a trial."""


@dataclass(kw_only=True)
class ScaleTrials(TrialRunner):
    """The trials of one curve, or of two.

    Args:
        counts: The numbers of processes, in ascending order.
        kinds: "strong", "weak", or both.
        rounds: The number of runs of each.
        page: The file for the plot.
        run_line: The command that trains, without a number of processes.

    Attributes:
        notes: Sentences about numbers of processes that could not be measured.
    """

    counts: Sequence[int]
    kinds: Sequence[Kind]
    rounds: int
    page: Path
    run_line: CommandLine
    notes: list[str] = field(default_factory=list)
    _runs: dict[tuple[Kind, int], list[list[Record]]] = field(default_factory=dict)
    _failed: set[tuple[Kind, int]] = field(default_factory=set)

    def run(self) -> int:
        """Run the trials, print the report, and return the exit status."""
        first: tuple[Kind, int] = ("strong", self.counts[0])
        places: list[tuple[Kind, int]] = [first, *((kind, n) for kind in self.kinds for n in self.counts[1:])]
        try:
            for number in range(self.rounds):
                turn = number % len(places)
                for place in places[turn:] + places[:turn]:
                    if place not in self._failed:
                        self._measure(place, number)
                    if place == first and first in self._failed:
                        return self._leave(1, message=self.notes[-1])
        except (StoppedScalingError, KeyboardInterrupt):
            return self._stopped()
        return self._report(first)

    def _measure(self, place: tuple[Kind, int], number: int) -> None:
        """Run a trial once, and keep what it recorded."""
        kind, count = place
        name = f"{kind} {count}"
        if sys.stderr.isatty():
            print(f"round {number + 1} of {self.rounds}: {name}", file=sys.stderr, flush=True)
        sets = (*QUIET, *UNCHECKED, *self._weak_settings(count)) if kind == "weak" else (*QUIET, *UNCHECKED)
        outcome = self._run(Trial(name, count, sets, {"PYTHONHASHSEED": "0"}, "costs:{steps}:{folder}"))
        if outcome.stopped:
            raise StoppedScalingError
        if outcome.exit_status:
            self._failed.add(place)
            self._runs.pop(place, None)
            if place == ("strong", self.counts[0]):
                self.notes.append(self._baseline_fails(outcome, count))
            else:
                what, why = plural(count, "process", "processes"), reason_of(outcome)[0].splitlines()
                self.notes.append(f"{kind.capitalize()} scaling to {what} is not possible: {(why or ['it failed'])[0]}")
            return
        self._runs.setdefault(place, []).append(self._recorded(name, count))

    def _weak_settings(self, count: int) -> tuple[str, ...]:
        """Return the settings that give each process as much work as the smallest number of processes has."""
        settings, reference = self._settings(f"strong {self.counts[0]}"), self.counts[0]
        return tuple(f"{name}={settings[name] * count // reference}" for name in ("batch", "virtual_ranks"))

    def _recorded(self, name: str, count: int) -> list[Record]:
        """Return what the processes of a trial have recorded. Raise SettingsError if a process made too few steps."""
        files = [self.recording(name) / f"rank-{rank}.json" for rank in range(count)]
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
        if len(found) < count or any(len(rank["steps"]) < self.steps for rank in found):
            made = min((len(rank["steps"]) for rank in found), default=0) if len(found) == count else 0
            facts = f"It made {plural(made, 'step')}, and {self.steps} are measured."
            do = str(self.line.setting(f"steps={self.steps}"))
            raise SettingsError(f"{self.script.name} made too few steps.", facts, do)
        return found

    def _facts(self, status: int) -> dict[str, Any]:
        return {"steps": self.steps, "rounds": self.rounds}

    def _report(self, first: tuple[Kind, int]) -> int:
        reference = ScalePoint.of(self._runs[first])
        curves = []
        for kind in self.kinds:
            more = [self._runs[kind, count] for count in self.counts[1:] if (kind, count) in self._runs]
            curves.append(ScalingCurve(kind, [reference, *map(ScalePoint.of, more)]))
        quickest = max(curves[0].points, key=lambda point: point.rate).processes
        on_cpu = self._runs[first][0][0]["device"] == "cpu"
        report = CurveReport(
            name=self.script.stem,
            curves=curves,
            cores=len(usable_cores()) if on_cpu else 0,
            threads=self._runs[first][0][0]["threads"],
            notes=self.notes,
            line=self.run_line.in_processes(quickest) if quickest > 1 else self.run_line,
        )
        for text in report.lines():
            self._say(text)
        self.page.parent.mkdir(parents=True, exist_ok=True)
        write_scaling_page(self.page, report)
        self._say(f"Plot: {self.page}")
        self._say(f"  Next: {report.line}")
        return self._leave(0, **report.as_json(), page=str(self.page), notes=self.notes, next=str(report.line))
