"""The report of a learning-rate range test: lines of text, JSON, and a page with the curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config import CommandLine, plural
from unisono.report.report_page import page_of, write_page
from unisono.train.lr_range.rate_curve import DIVERGED, LEAST_POINTS, RateCurve

SHOWN_ROWS = 20

ENDS = {
    "diverged": f"the smoothed loss was above {DIVERGED:g} times its minimum, or not finite",
    "not finite": "the loss or a gradient was not finite",
    "the script left its loop": "the script left its loop",
}
"""Why a test ended before its last rate."""


@dataclass(frozen=True)
class RateReport:
    """A range test as text and as JSON.

    Args:
        name: The name of the script.
        curve: The curve.
        found: What the run has recorded.
        count: The number of rates that were asked for.
        first: The first rate.
        last: The last rate.
        line: The command that trains with the suggested rate; None: no setting has it.
        search: The command that searches between the two rates; None: no setting has them.
    """

    name: str
    curve: RateCurve
    found: Mapping[str, Any]
    count: int
    first: float
    last: float
    line: CommandLine | None
    search: CommandLine | None

    @property
    def suggestion(self) -> float | None:
        """The suggested rate; None: the loss does not fall."""
        place = self.curve.suggested(peak=has_peak(self.found["given"]))
        return self.curve.rates[place] if place is not None else None

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        yield from self._table()
        yield from self.findings()

    def findings(self) -> Iterator[str]:
        """Yield what was found, in sentences."""
        curve, lowest, steepest = self.curve, self.curve.lowest, self.curve.steepest
        if steepest is not None and lowest is not None:
            falls, low = f"{curve.rates[steepest]:.3g}", f"{curve.rates[lowest]:.3g}"
            if has_peak(self.found["given"]):
                yield f"Suggested peak of the one-cycle schedule: {low}, where the loss is lowest."
                yield f"The loss falls most steeply at {falls}, a rate for training without a warm-up."
            else:
                yield f"Suggested learning rate: {falls}, where the loss falls most steeply."
                yield f"The loss is lowest at {low}. The best rate may be as high, with a warm-up."
        elif len(curve.losses) < LEAST_POINTS:
            yield f"No rate is suggested: {plural(len(curve.losses), 'loss', 'losses')} cannot form a curve."
        else:
            yield f"No rate is suggested: the loss falls at no rate from {self.first:g} to {self.last:g}."
        tried, ended = len(self.found["points"]), self.found["ended"]
        if ended in ENDS:
            yield f"The test ended after {tried} of {self.count} updates: {ENDS[ended]}."
        elif steepest is not None:
            yield f"The loss did not diverge up to {self.last:g}."
        names, groups = self.found["optimizers"], self.found["groups"]
        if groups > 1:
            subject = plural(groups, "parameter group")
            yield f"Rates are those of the first of {subject} ({', '.join(names)}). The others keep their proportion."
        if steepest is not None and self.line is None:
            yield "No setting of the script was found that changes its learning rate."
        if self.search is not None:
            yield f"To search between these two: {self.search}"

    def again(self, line: CommandLine) -> str:
        """Return the command for another range, if no rate is suggested; "" if one is."""
        if self.curve.steepest is not None:
            return ""
        if self.found["ended"] in ENDS:
            return str(line.flag("--lr-from", f"{self.first / 1000:g}"))
        return str(line.flag("--lr-to", f"{self.last * 1000:g}"))

    def _table(self) -> Iterator[str]:
        curve, values = self.curve, self.curve.smoothed
        lowest, steepest = curve.lowest, curve.steepest
        stride = math.ceil(len(values) / SHOWN_ROWS) or 1
        yield f"{'rate':>10}  {'loss':>10}  {'smoothed':>10}"
        for i, (rate, loss, value) in enumerate(zip(curve.rates, curve.losses, values, strict=True)):
            mark = "  steepest descent" * (i == steepest) + "  lowest" * (i == lowest)
            if mark or i % stride == 0 or i == len(values) - 1:
                yield f"{rate:>10.3g}  {loss:>10.4g}  {value:>10.4g}{mark}"

    def as_json(self) -> dict[str, Any]:
        """Return the report for --json."""
        return {
            "suggestion": self.suggestion,
            **self.curve.as_json(),
            "start": self.found["start"],
            "ended": self.found["ended"],
            "optimizers": self.found["optimizers"],
            "groups": self.found["groups"],
        }


def has_peak(given: Mapping[str, float]) -> bool:
    """Return whether a schedule of the script has a peak, such as torch's OneCycleLR."""
    return "max_lr" in given


def write_rate_page(path: Path, report: RateReport) -> None:
    """Write the page with the curve of a range test."""
    content = {
        **report.as_json(),
        "name": report.name,
        "findings": list(report.findings()),
        "line": str(report.line) if report.line is not None else None,
    }
    write_page(path, page_of(f"Learning rates of {report.name}", {"kind": "rates", "content": content}))
