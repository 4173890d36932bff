"""Where the time went, and the lines at the end of a run.

Reads the files of a run directory and nothing else, so it tells the same after a crash, or years later elsewhere:

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
"""Columns that every line fits; only a path or the advice's command is never cut."""

_BAR = 32
_TAIL_BYTES = 1 << 20  # some thousand steps of a timeline: enough to see who waits for whom

LARGE = {"data": 0.2, "exchange": 0.3, "checkpoint": 0.15, "evaluate": 0.3}
"""From this share on, a phase is worth a sentence."""


class Bottleneck(NamedTuple):
    """What took more of the time than it should, in a sentence, and what to try."""

    phase: str
    said: str
    do: str

    def __str__(self) -> str:
        return f"{self.said} Next: {self.do}"


def time_shares(
    seconds: Mapping[str, float],
    total: float | None = None,
    *,
    steps: int | None = None,
    color: bool = False,
    ascii_only: bool = False,
) -> str:
    """A table of phases: seconds, share of the total, bar; the longest first.

    total       seconds that are 100 %; None: the sum. Where it is more than the sum, the rest is shown as "unwatched"
    steps       said in the head line
    ascii_only  for a stream whose encoding has no block characters
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
"""A phase that took less is not worth anybody's time, whatever its share: advice from a short run is mostly noise."""


def bottleneck(seconds: Mapping[str, float], *, workers: int = 0, but: Collection[str] = ()) -> Bottleneck | None:
    """The phase that is most above what it should take, in words, with what to try; None when all is well.

    workers  the run's loader.workers: those who have some need other advice than to take some
    but      phases that are as they should be, however long they take
    """
    total = sum(seconds.values())
    looked_at = {phase: limit for phase, limit in LARGE.items() if phase not in but}
    over = {phase: seconds.get(phase, 0.0) / total / limit for phase, limit in looked_at.items()} if total > 0 else {}
    worst = max(over, key=lambda phase: over[phase], default=None)
    if worst is None or over[worst] < 1 or seconds[worst] < WORTH_SECONDS:
        return None
    share = f"{seconds[worst] / total:.0%} of the time."
    match worst:
        case "data":
            try_this = "--set loader.workers=2" if workers == 0 else "a cheaper data set, or fewer workers than cores"
            return Bottleneck(worst, f"Waiting for data took {share}", try_this)
        case "exchange":
            return Bottleneck(
                worst,
                f"Exchanging gradients, and waiting for each other, took {share}",
                "a larger --set batch, or fewer --ranks",
            )
        case "checkpoint":
            return Bottleneck(worst, f"Saving checkpoints took {share}", "save less often: --set checkpoint.every=N")
        case _:
            return Bottleneck(worst, f"Evaluating took {share}", "evaluate less often, or on fewer samples")


class Straggler(NamedTuple):
    """A process that the others wait for: it spends much less of its time in the exchange than they do."""

    rank: int
    share: float  # of its own time, in the exchange
    others: float  # the median of the others


def straggler(exchange_shares: Mapping[int, float]) -> Straggler | None:
    """The process that the others wait for, from the share of its time that each spends in the exchange.

    Waiting counts as exchange. So the one that hardly waits, while everybody else does, is the slow one; it must be
    0.15 of the time apart for us to say so.
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
    """The lines at the end of a run: where the time went, the bottleneck, run directory, promise, fingerprint.

    `shown` is what the run directory is called, if not by the path that it is read from; `again` is what to type to go
    on with a run that was stopped.

    `result` is what `result.json` holds; every name may be missing. Its `phases`, seconds per phase, come from the
    clock; without them the timeline of rank 0 is read.
    """
    run_dir = Path(run_dir)
    phases = result.get("phases") or seconds_of(run_dir)
    lines: list[str] = []
    if sum(phases.values()) > 0:
        steps = None if result.get("steps") is None else result["steps"] - result.get("resumed_at", 0)
        lines += time_shares(phases, steps=steps, color=color, ascii_only=ascii_only).split("\n")
        served = result.get("servers", 0)  # processes, the first ones, whose time is spent waiting for the others
        if found := bottleneck(phases, workers=_workers(run_dir), but=("exchange",) if served else ()):
            lines += _wrapped(found)
        shares = {rank: share for rank, share in exchange_shares(run_dir).items() if rank >= served}
        if result.get("ranks") != 1 and (slow := straggler(shares)):
            lines.append(
                f"Rank {slow.rank} is the one they wait for: {slow.share:.0%} of its time in the exchange, "
                f"the others {slow.others:.0%}."
            )
        lines.append("")
    facts = {"run": str(shown or run_dir)}
    if (steps := result.get("steps")) is not None:
        loss = f", loss {result['loss']:.4f}" if isinstance(result.get("loss"), float) else ""
        speed = result.get("samples_per_second")
        facts["result"] = _steps(steps) + loss + (f", {speed:,.0f} samples/s" if speed else "") + _who(result)
    if sent := result.get("bytes_per_step"):
        plain = result.get("bytes_uncompressed")
        beside = f", {sent / plain:.1%} of what it would be uncompressed" if plain else ""
        what = "between sites a step, by each of them" if result.get("sites") else "of gradients a step, by a process"
        facts["sent"] = f"{size(sent)} {what}{beside}"
        if plain and sent > plain:
            facts["sent"] += ": fewer nodes send less (compress.groups)"
    if late := result.get("late_mean"):
        facts["late"] = f"gradients by {late:.1f} updates in the mean, {result.get('late_most')} at most"
    if promise := result.get("promise"):
        facts["promise"] = f"{promise}: {result['reason']}" if result.get("reason") else str(promise)
    if result.get("weights_sha256"):
        facts["fingerprint"] = str(result["weights_sha256"])
    width = max(map(len, facts))
    for name, value in facts.items():
        # a path may have spaces, and is copied as it is
        first, *rest = [value] if name == "run" else textwrap.wrap(value, WIDTH - width - 2, break_on_hyphens=False)
        lines += [f"{_bold(f'{name:<{width}}', color)}  {first}", *(f"{'':{width}}  {more}" for more in rest)]
    if result.get("stopped"):
        lines.append(f"This run was stopped before its end. Next: {again}")
    return lines


def read_directory(run_dir: Path | str, *, color: bool = False, ascii_only: bool = False) -> list[str]:
    """The same lines from the files alone; a run that crashed has no result.json, so its last step is told instead."""
    run_dir = Path(run_dir)
    result = read_result(run_dir)
    if result is None:
        lines = closing_lines({"steps": steps_done(run_dir)}, run_dir, color=color, ascii_only=ascii_only)
        return [*lines, "This run has not ended by itself. Next: the same command with --resume"]
    return closing_lines(result, run_dir, color=color, ascii_only=ascii_only)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """What result.json says, or None where there is none that can be read."""
    try:
        result = json.loads((run_dir / "result.json").read_bytes())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def seconds_of(run_dir: Path, rank: int = 0, *, last_bytes: int | None = None) -> dict[str, float]:
    """Seconds per phase that a process's timeline adds up to, steps that were done again included; {} without one."""
    seconds: dict[str, float] = {}
    try:
        for entry in timeline.read(run_dir / "timeline" / f"rank-{rank}.jsonl", last_bytes=last_bytes):
            for phase, s in entry.get("seconds", {}).items():
                seconds[phase] = seconds.get(phase, 0.0) + s
    except OSError:
        return {}
    return seconds


def exchange_shares(run_dir: Path) -> dict[int, float]:
    """By rank, the share of its recent time that a process spent in the exchange, waiting for others included."""
    shares: dict[int, float] = {}
    for path in (run_dir / "timeline").glob("rank-*.jsonl"):
        rank = path.stem.removeprefix("rank-")
        seconds = seconds_of(run_dir, int(rank), last_bytes=_TAIL_BYTES) if rank.isdecimal() else {}
        if (total := sum(seconds.values())) > 0:
            shares[int(rank)] = seconds.get("exchange", 0.0) / total
    return shares


def steps_done(run_dir: Path) -> int | None:
    """Steps that rank 0's timeline knows to be done, the last one written included; None without any."""
    try:
        entries = list(timeline.read(run_dir / "timeline" / "rank-0.jsonl", last_bytes=_TAIL_BYTES))
    except OSError:
        return None
    return next((entry["step"] + 1 for entry in reversed(entries) if "step" in entry), None)


def _workers(run_dir: Path) -> int:
    try:
        values = tomllib.loads((run_dir / "settings.toml").read_text())
        return int(values["loader"]["workers"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _who(result: Mapping[str, Any]) -> str:
    ranks, virtual = result.get("ranks"), result.get("virtual_ranks")
    if not ranks or not virtual:
        return ""
    return f", {ranks} rank{'s' * (ranks != 1)} ({virtual} virtual)"


def _wrapped(found: Bottleneck) -> Sequence[str]:
    one = str(found)
    return [one] if len(one) <= WIDTH else [found.said, f"  Next: {found.do}"]


def _bar(length: float, ascii_only: bool) -> str:
    if ascii_only:
        return "#" * round(length)
    eighths = round(length * 8)
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def _clock(seconds: float) -> str:
    """0.8 ms, 12.3 s, 4:05, 1:00:05."""
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
