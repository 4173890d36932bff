"""The report of `unisono scale`: a table, findings, JSON, and a page with the curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.cli.scaling_curve.curve import PARTS, SHOWN, ScalingCurve
from unisono.config import CommandLine, plural
from unisono.report.report_page import page_of, write_page

TITLES = {"strong": "Strong scaling: the same batch", "weak": "Weak scaling: the same batch for each process"}

REMEDIES = {
    "compute": "Processes share cores, caches and memory bandwidth: fewer processes with more threads may be as fast.",
    "uneven": "Virtual ranks are not divided evenly, or a process is slower: choose a number of processes that divides "
    "virtual_ranks.",
    "data": "--set loader.workers=2 loads batches in other processes.",
    "exchange": "A larger batch has fewer messages for each sample; `unisono bench` measures the links.",
    "update": "Each process updates all parameters: --set parallel.shard=N divides them among N processes.",
    "other": "",
}
"""Advice for each part of a step to which efficiency is lost."""


@dataclass(frozen=True)
class CurveReport:
    """Scaling curves as text and as JSON.

    Args:
        name: The name of the script.
        curves: The curves.
        cores: The cores that processes may use; 0: they compute on GPUs.
        threads: The threads of each process.
        notes: Sentences about numbers of processes that could not be measured.
        line: The command that trains with the number of processes that is quickest.
    """

    name: str
    curves: Sequence[ScalingCurve]
    cores: int
    threads: int
    notes: Sequence[str]
    line: CommandLine

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        for curve in self.curves:
            yield from _table(curve)
            yield ""
        yield from self.findings()

    def findings(self) -> Iterator[str]:
        """Yield what was found, in sentences."""
        for curve in self.curves:
            last = curve.points[-1]
            part = curve.main_loss(last)
            if len(curve.points) < 2 or part is None:
                continue
            kind, share = curve.kind.capitalize(), f"{100 * curve.lost(last)[part]:.0f}%"
            text = f"{kind}: {last.processes} processes lose most to {PARTS[part]}, {share} of their time."
            yield f"{text} {REMEDIES[part]}".rstrip()
        largest = max(point.processes for curve in self.curves for point in curve.points)
        if self.cores and largest * self.threads > self.cores:
            threads, cores = plural(self.threads, "thread"), plural(self.cores, "core")
            yield f"{largest} processes of {threads} share {cores}, so the curve is that of this machine."
        yield from self.notes

    def as_json(self) -> dict[str, Any]:
        """Return the report for --json."""
        return {**{curve.kind: curve.as_json() for curve in self.curves}, "cores": self.cores, "threads": self.threads}


def _table(curve: ScalingCurve) -> Iterator[str]:
    batch = plural(curve.reference.samples, "sample")
    first = plural(curve.reference.processes, "process", "processes")
    yield f"{TITLES[curve.kind]} ({batch} a step{'' if curve.kind == 'strong' else f' of {first}'})"
    yield f"{'processes':>9}  {'ms a step':>10}  {'samples/s':>10}  {'speed-up':>8}  {'efficiency':>10}  lost to"
    for point in curve.points:
        shares = [f"{name} {100 * share:.0f}%" for name, share in curve.lost(point).items() if share >= SHOWN]
        yield (
            f"{point.processes:>9}  {1000 * point.seconds:>10.4g}  {point.rate:>10.4g}  {curve.speed_up(point):>8.2f}  "
            f"{100 * curve.efficiency(point):>9.0f}%  {', '.join(shares)}"
        ).rstrip()


def write_scaling_page(path: Path, report: CurveReport) -> None:
    """Write the page with the curves."""
    content = {
        "name": report.name,
        "curves": [
            {"kind": curve.kind, "title": TITLES[curve.kind], "points": curve.as_json()} for curve in report.curves
        ],
        "parts": PARTS,
        "findings": list(report.findings()),
        "line": str(report.line),
    }
    write_page(path, page_of(f"Scaling of {report.name}", {"kind": "scaling", "content": content}))
