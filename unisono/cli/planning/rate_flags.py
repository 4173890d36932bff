"""The flags of `unisono plan --lr`, the learning-rate range test."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from unisono.cli.compare.repeated_runs import refuse_unfit
from unisono.cli.request.request_checks import checked
from unisono.cli.request.run_dir import RUNS
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError

RATES = Group("Learning rate", sort_key=0)
FIRST, LAST, COUNT = 1e-7, 10.0, 100
LEAST_COUNT = 20
"""The least number of rates. With fewer, the smoothed curve has no shape."""

OTHERS = ("--memory", "--steps", "--virtual-ranks", "--devices", "--price")
"""Flags of the plan that the range test has no use for."""


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class RateFlags:
    """The flags of the range test.

    Parameters
    ----------
    lr
        Test learning rates instead: train with rates that grow from step to step, and suggest one.
    lr_from
        The first rate, of the first parameter group. Other groups keep their proportion to it.
    lr_to
        The last rate. The test ends earlier when the loss diverges.
    lr_steps
        The number of rates. The run has one step more.
    page
        The file for the plot of --lr, a page of HTML. By default runs/NAME-lr.html.
    """

    lr: Annotated[bool, Parameter(show_default=False, group=RATES)] = False
    lr_from: Annotated[float, Parameter(metavar="RATE", group=RATES)] = FIRST
    lr_to: Annotated[float, Parameter(metavar="RATE", group=RATES)] = LAST
    lr_steps: Annotated[int, WHOLE, Parameter(metavar="N", group=RATES)] = COUNT
    page: Annotated[Path | None, Parameter(metavar="FILE", group=RATES)] = None

    @property
    def words(self) -> list[str]:
        """The flags that are not the default, as they are typed."""
        found = ["--lr"] if self.lr else []
        for name, value, usual in (
            ("--lr-from", self.lr_from, FIRST),
            ("--lr-to", self.lr_to, LAST),
            ("--lr-steps", self.lr_steps, COUNT),
        ):
            found += [name, f"{value:g}"] if value != usual else []
        return [*found, "--page", str(self.page)] if self.page is not None else found

    @property
    def given(self) -> bool:
        """Return whether any of them was typed."""
        return bool(self.words)

    def test(self, target: str, ranks: int | None, request: RunRequest, typed: CommandLine) -> int:
        """Check everything that was typed, run the test, and return the exit status.

        Args:
            target: The name of a recipe, or the path of a script.
            ranks: The number of processes; None: 1.
            request: The flags of the run.
            typed: The command with the other flags of the plan.
        """
        line = CommandLine((*typed.words[:3], *self.words, *typed.words[3:]))
        if problems := self._problems(line):
            raise SettingsError.of(problems)
        refuse_unfit(line, self.lr_steps, request)
        count = 1 if ranks is None else ranks
        script, threads, *_ = checked(target, count, request, line)
        run_line = request.line("unisono", "run", target).without("--json")
        from unisono.cli.planning.rate_trial import RateTrial

        with tempfile.TemporaryDirectory(prefix="unisono-plan-") as folder:
            return RateTrial(
                script=script,
                threads=threads,
                steps=self.lr_steps,
                request=request,
                line=line,
                folder=Path(folder),
                ranks=count,
                first=self.lr_from,
                last=self.lr_to,
                page=self.page or RUNS / f"{script.stem}-lr.html",
                run_line=run_line.in_processes(count) if count > 1 else run_line,
            ).run()

    def _problems(self, line: CommandLine) -> list[Problem]:
        """Return everything that is wrong with these flags."""
        if not self.lr:
            facts = "Without --lr, memory and time of placements are predicted."
            do = CommandLine((*line.words[:3], "--lr", *line.words[3:]))
            return [Problem(f"{self.words[0]} has no effect without --lr.", facts, str(do))]
        problems = []
        for flag in OTHERS:
            if flag in line.words:
                facts = "The range test trains on one placement, and predicts no memory and no time."
                problems.append(Problem(f"{flag} has no effect with --lr.", facts, str(line.without(flag))))
        if not (0 < self.lr_from < self.lr_to < math.inf):
            facts = "Rates grow by a factor: the first is above 0, and the last above the first."
            do = line.flag("--lr-from", f"{FIRST:g}").flag("--lr-to", f"{LAST:g}")
            error = f"--lr-from {self.lr_from:g} --lr-to {self.lr_to:g} is no range of rates."
            problems.append(Problem(error, facts, str(do)))
        if self.lr_steps < LEAST_COUNT:
            facts = f"The curve is smoothed, and has no shape with fewer than {LEAST_COUNT} rates."
            do = line.flag("--lr-steps", str(COUNT))
            problems.append(Problem(f"--lr-steps {self.lr_steps} is out of range.", facts, str(do)))
        if self.page is not None and not self.page.parent.is_dir():
            facts = f"There is no folder {self.page.parent}."
            problems.append(Problem(f"Cannot write {self.page}.", facts, str(line.without("--page"))))
        return problems
