"""Summarize a run: the time spent in each phase, the bottleneck, and the facts of result.json.

It reads only files of a run directory, so it also works after a crash, or later on another machine:

    where the time went  2:05 min in 200 steps
      backward  61.4 s   49%  ████████████████████████████████
      forward   31.2 s   25%  ████████████████▎
      data      32.4 s   26%  ████████████████▉
    Waiting for data took 26% of the time. Next: --set loader.workers=2
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unisono.config import size
from unisono.monitor import timeline

WIDTH = 80
"""Width of the lines. Only a path, or the command of an advice, may be longer."""

_BAR = 32
_TAIL_BYTES = 1 << 20  # some thousand steps of a timeline, enough to find a straggler

LARGE = {"data": 0.2, "exchange": 0.3, "checkpoint": 0.15, "evaluate": 0.3}
"""Share of the time from which on a phase is reported as the bottleneck."""


class Bottleneck(NamedTuple):
    """A phase that takes too much of the time: a sentence about it, and an advice."""

    phase: str
    fact: str
    advice: str

    def __str__(self) -> str:
        return f"{self.fact} Next: {self.advice}"


def time_shares(
    seconds: Mapping[str, float],
    total: float | None = None,
    *,
    steps: int | None = None,
    color: bool = False,
    ascii_only: bool = False,
) -> str:
    """Return a table of phases with seconds, share of the total, and a bar, longest first.

    Args:
        seconds: Seconds by phase.
        total: Seconds that are 100 %; None: the sum. If it is above the sum, the rest is shown as "unwatched".
        steps: Number of steps for the first line.
        color: Use colors.
        ascii_only: Draw without block characters, for a stream whose encoding has none.
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
    for phase, s in sorted(spent.items(), key=lambda item: -item[1]):
        share = f"{s / total:4.0%}" if s / total >= 0.005 else " <1%"
        bar = _bar(s / longest * _BAR, ascii_only)
        if color:
            bar = f"\x1b[{_colors.get(phase, '34')}m{bar}\x1b[0m"
        lines.append(f"  {phase:<{name_width}}  {times[phase]:>{time_width}}  {share}  {bar}".rstrip())
    return "\n".join(lines)


WORTH_SECONDS = 3.0
"""Shortest time of a phase that is reported. Shares in a short run are mostly noise."""


def bottleneck(seconds: Mapping[str, float], *, workers: int = 0, exclude: Collection[str] = ()) -> Bottleneck | None:
    """Return the phase that exceeds its expected share the most, or None.

    Args:
        seconds: Seconds by phase.
        workers: The setting loader.workers, on which the advice depends.
        exclude: Phases that are not reported.
    """
    total = sum(seconds.values())
    limits = {phase: limit for phase, limit in LARGE.items() if phase not in exclude}
    over = {phase: seconds.get(phase, 0.0) / total / limit for phase, limit in limits.items()} if total > 0 else {}
    worst = max(over, key=lambda phase: over[phase], default=None)
    if worst is None or over[worst] < 1 or seconds[worst] < WORTH_SECONDS:
        return None
    share = f"{seconds[worst] / total:.0%} of the time."
    match worst:
        case "data":
            advice = "--set loader.workers=2" if workers == 0 else "a cheaper data set, or fewer workers than cores"
            return Bottleneck(worst, f"Waiting for data took {share}", advice)
        case "exchange":
            return Bottleneck(
                worst,
                f"Exchanging gradients, and waiting for other processes, took {share}",
                "a larger --set batch, or fewer --ranks",
            )
        case "checkpoint":
            return Bottleneck(worst, f"Saving checkpoints took {share}", "save less often: --set checkpoint.every=N")
        case _:
            return Bottleneck(worst, f"Evaluating took {share}", "evaluate less often, or on fewer samples")


class Straggler(NamedTuple):
    """A slow process, for which the others wait in the exchange."""

    rank: int
    share: float  # of its own time, in the exchange
    others: float  # the median of the others


def straggler(exchange_shares: Mapping[int, float]) -> Straggler | None:
    """Return the process for which the others wait, or None.

    Waiting counts as exchange, so the straggler is the process that waits least. Its share must be 0.15 below the
    median of the others.

    Args:
        exchange_shares: By rank, the share of its time that a process spends in the exchange.
    """
    if len(exchange_shares) < 2:
        return None
    rank = min(exchange_shares, key=lambda r: exchange_shares[r])
    others = sorted(share for r, share in exchange_shares.items() if r != rank)
    median = others[len(others) // 2]
    return Straggler(rank, exchange_shares[rank], median) if median - exchange_shares[rank] >= 0.15 else None


def closing_lines(
    result: Mapping[str, Any],
    run_dir: Path | str,
    *,
    shown: Path | str | None = None,
    again: str = "the same command with --resume",
    color: bool = False,
    ascii_only: bool = False,
) -> list[str]:
    """Return the lines at the end of a run: times, bottleneck, run directory, promise, fingerprint.

    Args:
        result: The content of result.json, of which every key may be missing. Without `phases` (seconds by phase), the
            timeline of rank 0 is read.
        run_dir: The run directory.
        shown: The run directory as it is printed, by default `run_dir`.
        again: The command that resumes a stopped run.
        color: Use colors.
        ascii_only: Draw without block characters.
    """
    run_dir = Path(run_dir)
    phases = result.get("phases") or seconds_of(run_dir)
    lines: list[str] = []
    if sum(phases.values()) > 0:
        steps = None if result.get("steps") is None else result["steps"] - result.get("resumed_at", 0)
        lines += time_shares(phases, steps=steps, color=color, ascii_only=ascii_only).split("\n")
        servers = result.get("servers", 0)  # the first ranks, which spend their time in waiting for the workers
        if found := bottleneck(phases, workers=_workers(run_dir), exclude=("exchange",) if servers else ()):
            lines += _wrapped(found)
        shares = {rank: share for rank, share in exchange_shares(run_dir).items() if rank >= servers}
        if result.get("ranks") != 1 and (slow := straggler(shares)):
            lines.append(
                f"Rank {slow.rank} is a straggler: it spends {slow.share:.0%} of its time in the exchange, "
                f"the others {slow.others:.0%}."
            )
        lines.append("")
    facts = {"run": str(shown or run_dir), **_facts(result)}
    width = max(map(len, facts))
    for name, value in facts.items():
        # a path may have spaces, and is copied as it is
        first, *rest = [value] if name == "run" else textwrap.wrap(value, WIDTH - width - 2, break_on_hyphens=False)
        lines += [f"{_bold(f'{name:<{width}}', color)}  {first}", *(f"{'':{width}}  {more}" for more in rest)]
    if result.get("stopped"):
        lines.append(f"This run was stopped before its end. Next: {again}")
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


def read_directory(run_dir: Path | str, *, color: bool = False, ascii_only: bool = False) -> list[str]:
    """Return the closing lines from files alone. A run that crashed has no result.json; its last step is shown."""
    run_dir = Path(run_dir)
    result = read_result(run_dir)
    if result is None:
        lines = closing_lines({"steps": steps_done(run_dir)}, run_dir, color=color, ascii_only=ascii_only)
        return [*lines, "This run did not finish. Next: the same command with --resume"]
    return closing_lines(result, run_dir, color=color, ascii_only=ascii_only)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of result.json, or None if it cannot be read."""
    try:
        result = json.loads((run_dir / "result.json").read_bytes())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def seconds_of(run_dir: Path, rank: int = 0, *, last_bytes: int | None = None) -> dict[str, float]:
    """Return the seconds by phase in the timeline of a rank, repeated steps included; {} without a timeline."""
    seconds: dict[str, float] = {}
    try:
        for entry in timeline.read(run_dir / "timeline" / f"rank-{rank}.jsonl", last_bytes=last_bytes):
            for phase, s in entry.get("seconds", {}).items():
                seconds[phase] = seconds.get(phase, 0.0) + s
    except OSError:
        return {}
    return seconds


def exchange_shares(run_dir: Path) -> dict[int, float]:
    """Return, by rank, the share of recent time that was spent in the exchange, waiting included."""
    shares: dict[int, float] = {}
    for path in (run_dir / "timeline").glob("rank-*.jsonl"):
        rank = path.stem.removeprefix("rank-")
        seconds = seconds_of(run_dir, int(rank), last_bytes=_TAIL_BYTES) if rank.isdecimal() else {}
        if (total := sum(seconds.values())) > 0:
            shares[int(rank)] = seconds.get("exchange", 0.0) / total
    return shares


def steps_done(run_dir: Path) -> int | None:
    """Return the number of steps done according to the timeline of rank 0, or None."""
    try:
        entries = list(timeline.read(run_dir / "timeline" / "rank-0.jsonl", last_bytes=_TAIL_BYTES))
    except OSError:
        return None
    return next((entry["step"] + 1 for entry in reversed(entries) if "seconds" in entry), None)


def _workers(run_dir: Path) -> int:
    try:
        values = tomllib.loads((run_dir / "settings.toml").read_text())
        return int(values["loader"]["workers"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _ranks(result: Mapping[str, Any]) -> str:
    ranks, virtual = result.get("ranks"), result.get("virtual_ranks")
    if not ranks or not virtual:
        return ""
    return f", {ranks} rank{'s' * (ranks != 1)} ({virtual} virtual)"


def _wrapped(found: Bottleneck) -> Sequence[str]:
    line = str(found)
    return [line] if len(line) <= WIDTH else [found.fact, f"  Next: {found.advice}"]


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
