"""unisono profile: show what the operators and phases of profiled steps cost (profile.steps)."""

from __future__ import annotations

import json as json_
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from unisono.cli.request.run_dir import RUNS
from unisono.config import CommandLine, size
from unisono.errors import SettingsError
from unisono.monitor import timeline
from unisono.profiles.memory_use import MemoryUse, memory_use
from unisono.profiles.merged_trace import MergedRanks, merge
from unisono.profiles.operator_costs import OperatorCost, operator_costs, phase_times, step_times, waiting_time
from unisono.profiles.profile_folder import KEY, DamagedTraceError, ProfileFolder, read_trace
from unisono.profiles.profiled_steps import ProfiledSteps, parse_steps

VIEWER = "https://ui.perfetto.dev"
MEMORY_VIEWER = "https://docs.pytorch.org/memory_viz"
NAME_WIDTH = 44
"""Characters of an operator's name."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of a timeline that have the last step."""


class RankReport(NamedTuple):
    """The profile of a rank.

    Attributes:
        facts: The facts about its recording.
        steps: Milliseconds of each step.
        operators: The costs of all operators, the largest first.
        phases: Milliseconds in each phase.
        waited: Milliseconds of them that the rank waited for messages of others.
        memory: The memory of the CPU, if it was recorded.
        snapshot: The history of allocations on an accelerator, if it was recorded.
    """

    facts: Mapping[str, Any]
    steps: Mapping[int, float]
    operators: list[OperatorCost]
    phases: Mapping[str, float]
    waited: float
    memory: MemoryUse | None
    snapshot: Path | None


def profile(
    folder: Path,
    /,
    *,
    rows: Annotated[int, Parameter(metavar="N")] = 10,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Show what operators and phases cost in the steps that a run has profiled, and where the trace is.

    The steps are those of the setting profile.steps. The command works while the run trains, and later.

    Parameters
    ----------
    folder
        A run directory.
    rows
        Number of operators to show for each rank.
    json
        Print all numbers as JSON.
    """
    if not folder.is_dir():
        do = f"unisono profile {shlex.quote(_newest_profile(folder))}"
        raise SettingsError(f"There is no folder {folder}.", "The argument is a run directory.", do)
    files = ProfileFolder(folder)
    if not files.ranks():
        return _nothing(folder, files, json=json)
    merged, trouble = _merge(files)
    reports: dict[int, RankReport] = {}
    damaged = dict(merged.damaged)
    for rank in merged.ranks:
        try:
            reports[rank] = _report(files, rank)
        except DamagedTraceError as error:
            damaged[rank] = str(error)
    problems = [
        f"The trace of rank {rank} is damaged: {reason}. ({files.rank(rank)})" for rank, reason in damaged.items()
    ]
    problems += trouble + [_about_missing(files, rank, host) for rank, host in _missing(files).items()]
    if json:
        found = {str(rank): _as_json(report) for rank, report in reports.items()}
        print(json_.dumps({"trace": str(files.trace) if merged.ranks else None, "ranks": found, "problems": problems}))
    else:
        print("\n".join(_lines(files, reports, max(rows, 0), problems)))
    return 0 if reports else 1


def _merge(files: ProfileFolder) -> tuple[MergedRanks, list[str]]:
    """Merge the traces, if that is not done yet. Return the ranks, and what went wrong."""
    try:
        return merge(files), []
    except (OSError, DamagedTraceError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        return MergedRanks(list(files.ranks()), {}), [f"The traces cannot be merged into {files.trace}: {reason}."]


def _report(files: ProfileFolder, rank: int) -> RankReport:
    trace = read_trace(files.rank(rank))
    snapshot = files.memory(rank)
    return RankReport(
        trace[KEY],
        step_times(trace),
        operator_costs(trace),
        phase_times(trace),
        waiting_time(trace),
        memory_use(trace),
        snapshot if snapshot.exists() else None,
    )


def _as_json(report: RankReport) -> dict[str, Any]:
    return {
        **report.facts,
        "step_ms": {str(step): round(ms, 3) for step, ms in report.steps.items()},
        "phase_ms": {name: round(ms, 3) for name, ms in report.phases.items()},
        "waiting_ms": round(report.waited, 3),
        "operators": [
            {**cost._asdict(), "cpu_us": round(cost.cpu_us, 3), "device_us": round(cost.device_us, 3)}
            for cost in report.operators
        ],
        **({"memory": _memory_as_json(report.memory)} if report.memory is not None else {}),
        **({"snapshot": str(report.snapshot)} if report.snapshot is not None else {}),
    }


def _memory_as_json(use: MemoryUse) -> dict[str, Any]:
    return {
        "peak_bytes": use.peak,
        "peak_ms": round(use.at_ms, 3),
        "peak_step": use.step,
        "holders": [holder._asdict() for holder in use.holders],
        "course": [[round(ms, 3), count] for ms, count in use.course],
    }


# -- a run without traces


def _nothing(folder: Path, files: ProfileFolder, *, json: bool) -> int:
    """Say why there is no profile: its steps are to come, or it was not asked for."""
    settings, steps = _settings_of(folder)
    done = _steps_done(folder)
    if settings is None:
        do = f"unisono profile {shlex.quote(_newest_profile(folder))}"
        raise SettingsError(f"There is no run in {folder}.", "It has no settings.toml.", do)
    if steps is None:
        facts = f"The run has done {done} steps without profile.steps."
        raise SettingsError(f"{folder} has no profile.", facts, _resume(folder, done))
    if (folder / "result.json").exists() or done >= steps.end:
        facts = f"profile.steps names {steps}, and the run has done {done} steps."
        raise SettingsError(f"{folder} has no profile.", facts, _resume(folder, done))
    state = f"writing {', '.join(f'rank {rank}' for rank in files.unfinished())}" if files.unfinished() else "waiting"
    if json:
        print(json_.dumps({"trace": None, "ranks": {}, "problems": [], "state": state, "steps_done": done}))
    else:
        print(f"There is no profile yet: {steps} will be recorded, and the run has done {done} steps.")
    return 0


def _resume(folder: Path, done: int) -> str:
    """Return the command that resumes a run and profiles some of its next steps."""
    try:
        words = shlex.split(json_.loads((folder / "environment.json").read_text(encoding="utf-8"))["command"])
    except (OSError, ValueError, KeyError):
        words = ["unisono", "run", "SCRIPT"]
    more = [f"steps={2 * done}"] if (folder / "result.json").exists() else []
    line = CommandLine(tuple(words)).flag("--run-dir", str(folder)).flag("--resume")
    return str(line.setting(f"profile.steps={done + 1}:{done + 4}", *more))


def _settings_of(folder: Path) -> tuple[Mapping[str, Any] | None, ProfiledSteps | None]:
    """Return the settings of a run, None without them, and the steps that it profiles."""
    try:
        settings = tomllib.loads((folder / "settings.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None
    return settings, parse_steps(settings.get("profile", {}).get("steps", ""))


def _steps_done(folder: Path) -> int:
    """Return the number of steps that a run has done, by the ends of its timelines."""
    done = 0
    for path in (folder / "timeline").glob("rank-*.jsonl"):
        for entry in timeline.read(path, last_bytes=TAIL_BYTES):
            if "seconds" in entry:
                done = max(done, int(entry["step"]) + 1)
    return done


def _newest_profile(folder: Path) -> str:
    """Return the newest run directory with a profile in this folder or in runs/; an example if there is none."""
    there = [
        path for parent in (folder, folder / RUNS, RUNS) for path in parent.glob("*") if ProfileFolder(path).ranks()
    ]
    newest = max(there, key=lambda path: path.stat().st_mtime, default=None)
    return str(newest) if newest is not None else "runs/NAME-TIME"


def _missing(files: ProfileFolder) -> dict[int, str]:
    """Return the hosts of the ranks whose traces are missing although they are recorded; {} if that is not known."""
    settings, _ = _settings_of(files.path.parent)
    chosen = (settings or {}).get("profile", {}).get("ranks", "all")
    hosts = {int(rank): host for rank, host in files.host_facts().get("ranks", {}).items()}
    return {
        rank: host
        for rank, host in hosts.items()
        if rank not in files.ranks() and (chosen == "all" or str(rank) in [each.strip() for each in chosen.split(",")])
    }


def _about_missing(files: ProfileFolder, rank: int, host: str) -> str:
    if rank in files.unfinished():
        return f"The trace of rank {rank} is not complete: it is being written, or the process was killed."
    return f"There is no trace of rank {rank}, which ran on {host}. Copy it from there into {files.path} if it exists."


# -- text


def _lines(files: ProfileFolder, reports: Mapping[int, RankReport], rows: int, problems: list[str]) -> Iterator[str]:
    for rank, report in reports.items():
        yield from _lines_of_rank(rank, report, rows)
        yield ""
    yield from problems
    if not reports:
        return
    yield f"trace of all ranks   {files.trace} ({size(files.trace.stat().st_size)})"
    yield f"open it              {VIEWER} (Open trace file), or without a network chrome://tracing in Chrome"
    for rank, report in reports.items():
        if report.snapshot is not None:
            yield f"memory of rank {rank}     {report.snapshot}; open it at {MEMORY_VIEWER}"


def _lines_of_rank(rank: int, report: RankReport, rows: int) -> Iterator[str]:
    facts = report.facts
    steps = ", ".join(f"{step}: {ms:.1f} ms" for step, ms in report.steps.items())
    yield f"rank {rank} on {facts['host']}, {facts['device']}, process {facts['pid']}"
    yield f"  steps   {steps}"
    whole = sum(report.phases.values()) or 1.0
    spent = [f"{name} {ms:.1f} ms ({ms / whole:.0%})" for name, ms in report.phases.items() if ms >= 0.0005 * whole]
    yield f"  phases  {', '.join(spent)}"
    if report.waited:
        yield f"  waited  {report.waited:.1f} ms for messages of other ranks"
    yield from _operator_table(report.operators, rows)
    if report.memory is not None:
        yield from _memory_table(report.memory, rows)


def _operator_table(operators: list[OperatorCost], rows: int) -> Iterator[str]:
    on_device = any(cost.device_us for cost in operators)
    cpu = sum(cost.cpu_us for cost in operators) or 1.0
    device = sum(cost.device_us for cost in operators) or 1.0
    head = f"  {'operator':{NAME_WIDTH}} {'calls':>7} {'self CPU ms':>12} {'':>5}"
    yield head + (f" {'device ms':>12} {'':>5}" if on_device else "")
    for cost in operators[:rows]:
        line = f"  {_short(cost.name):{NAME_WIDTH}} {cost.calls:7} {cost.cpu_us / 1000:12.3f} {cost.cpu_us / cpu:5.1%}"
        yield line + (f" {cost.device_us / 1000:12.3f} {cost.device_us / device:5.1%}" if on_device else "")
    if len(operators) > rows:
        rest = operators[rows:]
        us = sum(cost.cpu_us for cost in rest)
        name = f"{len(rest)} others (--rows {len(operators)} shows all)"
        yield f"  {name:{NAME_WIDTH}} {sum(cost.calls for cost in rest):7} {us / 1000:12.3f} {us / cpu:5.1%}"


def _memory_table(use: MemoryUse, rows: int) -> Iterator[str]:
    where = f"in step {use.step}" if use.step is not None else "between two steps"
    yield f"  memory  {size(use.peak)} more than at the beginning, {where}, after {use.at_ms:.1f} ms"
    yield f"  {'in use then, by operator and phase':{NAME_WIDTH}} {'blocks':>7} {'memory':>12}"
    for holder in use.holders[:rows]:
        yield f"  {_short(holder.name):{NAME_WIDTH}} {holder.blocks:7} {size(holder.bytes):>12}"


def _short(name: str) -> str:
    name = name.removeprefix("autograd::engine::")
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."
