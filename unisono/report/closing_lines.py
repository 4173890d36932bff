"""The last lines of a run: where the time went, what slowed it down, and the facts of result.json.

They are made from the files of a run directory, so also after a crash, or later on another machine:

    where the time went  2:05 min in 200 steps
      backward  61.4 s   49%  ████████████████████████████████
      forward   31.2 s   25%  ████████████████▎
      data      32.4 s   26%  ████████████████▉
    Training waits for data in 26% of its time.
      Next: --set loader.workers=2 (saves about 25% of the time)
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.config import size
from unisono.config.wording import wrapped
from unisono.report.findings.evidence import Finding

WIDTH = 80
"""Greatest width of the lines. Only a path, or the command of an advice, may be longer."""

_BAR = 32

FINDINGS = 3
"""Causes that are shown; the report has all of them."""


def time_shares(
    seconds: Mapping[str, float],
    total: float | None = None,
    *,
    steps: int | None = None,
    color: bool = False,
    ascii_only: bool = False,
    width: int = WIDTH,
) -> str:
    """Return a table of phases with seconds, share of the total, and a bar, longest first.

    Args:
        seconds: Seconds by phase.
        total: Seconds that are 100 %; None: the sum. If it is above the sum, the rest is shown as "unwatched".
        steps: Number of steps for the first line.
        color: Use colors.
        ascii_only: Draw without block characters, for a stream whose encoding has none.
        width: Width of the lines.
    """
    spent = {phase: s for phase, s in seconds.items() if s > 0}
    total = sum(spent.values()) if total is None else total
    if total <= 0:
        return "where the time went: nowhere yet"
    if total - sum(spent.values()) > 0.005 * total:
        spent["unwatched"] = total - sum(spent.values())
    head = _clock(total) + (f" in {_steps(steps)}" if steps is not None else "")
    lines = [_bold("where the time went", color) + f"  {head}"]
    times = {phase: _clock(s) for phase, s in spent.items()}
    name_width, time_width = max(map(len, spent)), max(map(len, times.values()))
    longest = max(spent.values())
    room = max(4, min(_BAR, width - name_width - time_width - 12))
    for phase, s in sorted(spent.items(), key=lambda item: -item[1]):
        share = f"{s / total:4.0%}" if s / total >= 0.005 else " <1%"
        bar = _bar(s / longest * room, ascii_only)
        if color:
            bar = f"\x1b[{_colors.get(phase, '34')}m{bar}\x1b[0m"
        lines.append(f"  {phase:<{name_width}}  {times[phase]:>{time_width}}  {share}  {bar}".rstrip())
    return "\n".join(lines)


def closing_lines(
    result: Mapping[str, Any],
    run_dir: Path | str,
    *,
    findings: Sequence[Finding] = (),
    shown: Path | str | None = None,
    report: bool = False,
    again: str = "the same command with --resume",
    color: bool = False,
    ascii_only: bool = False,
    width: int = WIDTH,
) -> list[str]:
    """Return the lines at the end of a run: times, what slows it down, run directory, promise, fingerprint.

    Args:
        result: The content of result.json, of which every key may be missing.
        run_dir: The run directory.
        findings: What slows the run down.
        shown: The run directory as it is printed, by default `run_dir`.
        report: It has a report.
        again: The command that resumes a stopped run.
        color: Use colors.
        ascii_only: Draw without block characters.
        width: Width of the lines.
    """
    phases: Mapping[str, float] = result.get("phases") or {}
    lines: list[str] = []
    if sum(phases.values()) > 0:
        steps = None if result.get("steps") is None else result["steps"] - result.get("resumed_at", 0)
        lines += time_shares(phases, steps=steps, color=color, ascii_only=ascii_only, width=width).split("\n")
        for finding in findings[:FINDINGS]:
            lines += lines_of(finding, width=width)
        if len(findings) > FINDINGS:
            lines.append(f"{len(findings) - FINDINGS} more: unisono report {shown or run_dir} --text")
        lines.append("")
    facts = {"run": str(shown or run_dir)}
    facts |= {"report": str(Path(shown or run_dir) / "report.html")} if report else {}
    facts |= _facts(result)
    indent = max(map(len, facts))
    for name, value in facts.items():
        # a path may have spaces, and is copied as it is
        whole = name in ("run", "report")
        first, *rest = [value] if whole else textwrap.wrap(value, width - indent - 2, break_on_hyphens=False)
        lines += [f"{_bold(f'{name:<{indent}}', color)}  {first}", *(f"{'':{indent}}  {more}" for more in rest)]
    if result.get("stopped"):
        room = width if width < WIDTH else 0  # one line where it fits, and in a pipe
        lines += wrapped(f"This run was stopped before its end. Next: {again}", room).split("\n")
    return lines


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what result.json states about the run, by the name that is printed before it."""
    facts: dict[str, str] = {}
    if (steps := result.get("steps")) is not None:
        loss = f", loss {result['loss']:.4f}" if isinstance(result.get("loss"), float) else ""
        speed = result.get("samples_per_second")
        facts["result"] = _steps(steps) + loss + (f", {speed:,.0f} samples/s" if speed else "") + _ranks(result)
    if sent := result.get("bytes_per_step"):
        plain = result.get("bytes_uncompressed")
        ratio = f", {sent / plain:.1%} of the uncompressed size" if plain else ""
        content = "between sites per step and site" if result.get("sites") else "of gradients per step and process"
        facts["sent"] = f"{size(sent)} {content}{ratio}"
        if plain and sent > plain:
            facts["sent"] += ": fewer groups send less (compress.groups)"
    if isinstance(energy := result.get("energy"), dict):
        facts["energy"] = _energy(energy)
    if late := result.get("late_mean"):
        facts["late"] = f"gradients by {late:.1f} updates on average, {result.get('late_most')} at most"
    if promise := result.get("promise"):
        facts["promise"] = f"{promise}: {result['reason']}" if result.get("reason") else str(promise)
    if result.get("weights_sha256"):
        facts["fingerprint"] = str(result["weights_sha256"])
    return facts


def _energy(energy: Mapping[str, Any]) -> str:
    """Return the energy of a run, as in "0.0117 kWh, 4.2 J/sample (rapl:package-0)"."""
    whole = f"{energy['kwh']:.3g} kWh" if energy["kwh"] >= 0.01 else f"{energy['joules']:,.0f} J"
    each = f", {energy['joules_per_sample']:.3g} J/sample" if "joules_per_sample" in energy else ""
    return f"{whole}{each} ({energy['source']})"


def lines_of(finding: Finding, *, evidence: bool = False, width: int = WIDTH) -> list[str]:
    """Return a finding as text: what it is, with `evidence` its numbers, what to type, and the expected gain."""
    lines = wrapped(finding.fact, width).split("\n")
    if evidence:
        lines += ["  " + line for sentence in finding.evidence for line in textwrap.wrap(sentence, width - 2)]
    gain = [f"saves about {finding.gain:.0%} of the time"] if finding.gain is not None else []
    other = ["changes the result"] if finding.changes_result else []
    notes = f" ({', '.join([*gain, *other])})" if gain or other else ""
    first, *rest = textwrap.wrap(f"Next: {finding.advice}{notes}", width - 2, break_on_hyphens=False)
    return [*lines, f"  {first}", *(f"    {line}" for line in rest)]


def _steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _ranks(result: Mapping[str, Any]) -> str:
    ranks, virtual = result.get("ranks"), result.get("virtual_ranks")
    if not ranks or not virtual:
        return ""
    return f", {ranks} rank{'s' * (ranks != 1)} ({virtual} virtual)"


def _bar(length: float, ascii_only: bool) -> str:
    if ascii_only:
        return "#" * round(length)
    eighths = round(length * 8)
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def _clock(seconds: float) -> str:
    """Return a duration as 0.8 ms, 12.3 s, 4:05 min or 1:00 h."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02} h"


def _bold(text: str, color: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if color else text


_colors = {"data": "33", "exchange": "36", "backward": "34", "forward": "34", "update": "34"}
