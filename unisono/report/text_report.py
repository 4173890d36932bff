"""The report as text, from files alone: the last lines of the run, with all that slows it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.phases import PHASES
from unisono.report.closing_lines import closing_lines, lines_of
from unisono.report.findings.evidence import LEAST_GAIN, LEAST_SECONDS
from unisono.report.findings.find_all import find_all
from unisono.report.rank_series import RankSeries
from unisono.report.run_files import RunFiles


def text_report(files: RunFiles, *, color: bool = False, ascii_only: bool = False) -> list[str]:
    """Return the lines of the report of a run, which may have crashed or be under way."""
    result = files.result
    over = files.state in ("finished", "stopped")
    facts: Mapping[str, Any] = result if over else _facts_so_far(files)
    lines = closing_lines(facts, files.path, color=color, ascii_only=ascii_only)
    findings = find_all(files)
    for finding in findings:
        lines += ["", *lines_of(finding, evidence=True)]
    if not findings and any(series.rows for series in files.ranks.values()):
        lines += ["", f"No advice that would save {LEAST_GAIN:.0%} of the time, and {LEAST_SECONDS:g} s."]
    if not over:
        again = "This run is under way." if files.state == "running" else "This run did not finish."
        lines += ["", again + ("" if files.state == "running" else " Next: the same command with --resume")]
    return lines


def _facts_so_far(files: RunFiles) -> dict[str, Any]:
    """Return what result.json would say, as far as the timelines have it."""
    series = [each for each in files.ranks.values() if each.rows]
    if not series:
        return {}
    main = max(series, key=lambda each: (each.rows[-1].last, -each.rank))
    values = main.rows[-1].values
    return {
        "steps": main.rows[-1].last + 1,
        "phases": seconds_of(main),
        **({"loss": values["loss"][2]} if "loss" in values else {}),
    }


def seconds_of(series: RankSeries) -> dict[str, float]:
    """Return the seconds of a rank in each phase. Steps that were computed again count once."""
    totals = (sum(row.seconds[i] for row in series.rows) for i in range(len(PHASES)))
    return {phase: seconds for phase, seconds in zip(PHASES, totals, strict=True) if seconds}
