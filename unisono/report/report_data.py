"""The numbers behind a report, as one JSON object: what the page draws and `unisono report --json` prints."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from unisono.phases import PHASES
from unisono.report.findings.find_all import find_all
from unisono.report.host_series import host_charts
from unisono.report.rank_series import Floats, RankColumns, main_columns
from unisono.report.run_files import RunFiles
from unisono.report.step_buckets import (
    BUCKETS,
    RankBuckets,
    divide,
    rank_buckets,
    sum_buckets,
    value_buckets,
)

NAMES = 40
"""Logged names that are drawn; --json and trackers have the others."""
CELLS = 200
"""Columns of the map of ranks over time."""
TYPICAL = (0.0, 0.995)
"""Quantiles that are the ends of the map's colors, so that one long step leaves the others distinct."""
EVENTS = 400
"""Events that are shown; if there are more, rare kinds stay."""


def report_data(files: RunFiles, *, most: int = BUCKETS) -> dict[str, Any]:
    """Return the numbers of a run.

    Keys: `name`, `path`, `state`, `result`, `environment`, `settings` (name, value, source), `logs`, `events`, `total`
    (steps of the whole run, null: unknown), `hosts` (`host_charts`), `flops` (of a sample, if they were counted),
    `findings`, and, if the run has steps:

        began         when the first step began, in seconds since 1970
        steps, time   the last step of each bucket, and seconds from `began` to its end, which never decrease
        values        {name: {"last": [...]}} of loss, lr, grad_norm and log.NAME; "low" and "high" where they differ
        phases        {phase: mean seconds of a step, over all ranks}; wait: of them in waiting for messages
        ranks         fastest, median, slowest: seconds of a step without waiting; slowest_rank; longest step
        rate          samples and weight in a second; flops and utilization (share of the peak of all devices)
        table         a row for each rank: host, device, seconds by phase, waiting, own seconds of a step
        map           own seconds of each rank over time, as bytes (0: unknown, 1: fastest, 255: slowest), base64
        assignments   [step, rank, first virtual rank, last + 1]
    """
    columns = {rank: series.columns() for rank, series in files.ranks.items() if series.rows}
    data: dict[str, Any] = {
        "name": files.name,
        "path": str(files.path),
        "state": files.state,
        "result": files.result,
        "environment": files.environment,
        "settings": [[name, *setting] for name, setting in files.settings.items()],
        "logs": files.logs,
        "events": events_of(files),
        "flops": files.flops,
        "findings": [finding._asdict() for finding in find_all(files)],
    }
    began = _began(main_columns(files.ranks)) if columns else 0.0
    data["total"] = total_of(files)
    data["hosts"] = host_charts(files.host_series.values(), began, most // 2)
    if columns:
        data |= _series(files, columns, most)
    return data


def _series(files: RunFiles, columns: Mapping[int, RankColumns], most: int) -> dict[str, Any]:
    main = main_columns(files.ranks)
    buckets = divide(main, most)
    ranks = {rank: rank_buckets(each, buckets) for rank, each in columns.items()}
    began = _began(main)
    mean = _nan_mean([each.seconds for each in ranks.values()])
    own = rank_buckets(main, buckets)
    time = np.fmax.accumulate(own.time)  # the clock may be set back
    elapsed = np.diff(time, prepend=began)
    elapsed = np.where(elapsed > 0, elapsed, own.total * own.steps)
    samples = sum_buckets(main, main.samples, buckets)
    weight = sum_buckets(main, np.where(np.isnan(main.weight), main.samples, main.weight), buckets)
    speed = _rate(samples, elapsed)
    names = [name for name in main.values if name != "log.loss" or "loss" not in main.values][: NAMES + 3]
    return {
        "began": began,
        "steps": buckets.last,
        "time": numbers(time - began),
        "values": {name: _curve(*map(numbers, value_buckets(main, name, buckets))) for name in names},
        "phases": {phase: numbers(mean[:, i]) for i, phase in enumerate(PHASES) if np.nansum(mean[:, i]) > 0},
        "wait": numbers(_nan_mean([each.wait for each in ranks.values()])),
        "ranks": _rank_curves(ranks),
        "rate": {
            "samples": numbers(speed),
            **_utilization(files.flops, speed, len(columns)),
            **({"weight": numbers(_rate(weight, elapsed))} if not np.array_equal(samples, weight) else {}),
        },
        "table": [_rank_row(files, columns[rank]) for rank in columns],
        "map": _map(ranks),
        "assignments": assignments_of(files),
    }


def _utilization(counted: Mapping[str, Any], speed: Floats, ranks: int) -> dict[str, list[float | None]]:
    """Return the floating-point operations in a second, and their share of what all devices do at most."""
    try:
        flops, peak = float(counted["flops_per_sample"]) * speed, float(counted["peak"]) * ranks
    except (KeyError, TypeError, ValueError):
        return {}
    return {"flops": numbers(flops), "utilization": numbers(flops / peak)} if peak else {}


def _curve(low: list[float | None], high: list[float | None], last: list[float | None]) -> dict[str, Any]:
    return {"last": last} if low == high == last else {"last": last, "low": low, "high": high}


def _began(main: RankColumns) -> float:
    return float(main.time[0] - main.seconds[0].sum())


def total_of(files: RunFiles) -> int | None:
    """Return the number of steps of the whole run; None: unknown."""
    known = [event.get("total") for series in files.ranks.values() for event in series.events if "total" in event]
    if known and isinstance(known[-1], int):
        return known[-1]
    setting = files.settings.get("steps")
    return int(setting.value) if setting is not None and setting.value.isdecimal() else None


def _rank_curves(ranks: Mapping[int, RankBuckets]) -> dict[str, Any]:
    own = np.stack([each.own for each in ranks.values()])
    numbers_of_ranks = list(ranks)
    known = np.logical_not(np.isnan(own).all(0))
    filled = np.where(np.isnan(own), -1.0, own)
    slowest = [
        numbers_of_ranks[i] if ok else None for i, ok in zip(filled.argmax(0).tolist(), known.tolist(), strict=True)
    ]
    with np.errstate(all="ignore"):
        return {
            "fastest": numbers(np.where(known, np.nanmin(np.where(known, own, 0.0), 0), np.nan)),
            "median": numbers(np.where(known, np.nanmedian(np.where(known, own, 0.0), 0), np.nan)),
            "slowest": numbers(np.where(known, filled.max(0), np.nan)),
            "slowest_rank": slowest,
            "longest": numbers(np.nan_to_num(np.stack([each.longest for each in ranks.values()]), nan=0.0).max(0)),
        }


def _rank_row(files: RunFiles, columns: RankColumns) -> dict[str, Any]:
    steps, spent = float(columns.steps.sum()), columns.seconds.sum(0)
    started = [event for event in files.ranks[columns.rank].events if event.get("event") == "start"]
    start = started[-1] if started else {}
    others = spent[PHASES.index("checkpoint")] + spent[PHASES.index("evaluate")]
    return {
        "rank": columns.rank,
        "host": start.get("host", ""),
        "device": start.get("device", ""),
        "threads": start.get("threads"),
        "steps": int(steps),
        "seconds": {phase: _rounded(float(s)) for phase, s in zip(PHASES, spent, strict=True) if s},
        "wait": _rounded(float(columns.wait.sum())),
        "own": _rounded(max(0.0, float(spent.sum() - columns.wait.sum() - others)) / max(steps, 1)),
        "last_step": int(columns.last[-1]),
    }


def _map(ranks: Mapping[int, RankBuckets]) -> dict[str, Any]:
    own = np.stack([each.own for each in ranks.values()])
    if own.shape[1] > CELLS:
        own = np.stack([_nan_mean(list(part.T)) for part in np.array_split(own, CELLS, 1)], 1)
    known = ~np.isnan(own)
    low, high = (float(edge) for edge in np.quantile(own[known], TYPICAL))
    scaled = ((np.where(known, own, low) - low) / (high - low or 1.0)).clip(0.0, 1.0)
    return {
        "ranks": list(ranks),
        "columns": own.shape[1],
        "low": _rounded(low),
        "high": _rounded(high),
        "cells": base64.b64encode(np.where(known, 1 + (scaled * 254).round(), 0).astype(np.uint8).tobytes()).decode(),
    }


def assignments_of(files: RunFiles) -> list[list[int]]:
    """Return the virtual ranks of each process over time: [step, rank, first, last + 1], by step."""
    found = []
    for rank, series in files.ranks.items():
        for event in series.events:
            if event.get("event") == "assignment":
                found.append([int(event["step"]), rank, *map(int, event["virtual_ranks"])])
    return sorted(found)


def events_of(files: RunFiles) -> list[dict[str, Any]]:
    """Return the events of the run by time. An event that several ranks report is there once."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rank, series in files.ranks.items():
        for event in series.events:
            kind, step = _kind(event)
            if kind in ("start", "assignment", "device", ""):
                continue
            details = {name: value for name, value in event.items() if name not in ("t", "event", "step")}
            key = (kind, step, str(details.get("ranks", "")))
            if key not in found:
                found[key] = {"kind": kind, "step": step, "t": event.get("t"), "rank": rank, **details}
    events = sorted(found.values(), key=lambda event: (event["step"], event["t"] or 0.0))
    if len(events) > EVENTS:
        common = [event for event in events if event["kind"] == "checkpoint"]
        kept = {id(event) for event in common[:: max(1, -(-len(common) // (EVENTS // 2)))]}
        events = [event for event in events if event["kind"] != "checkpoint" or id(event) in kept][:EVENTS]
    return events


def _kind(event: Mapping[str, Any]) -> tuple[str, int]:
    if "event" in event:
        return str(event["event"]), int(event.get("step", 0))
    for name in ("checkpoint", "resumed_at"):
        if name in event:
            return {"resumed_at": "resume"}.get(name, name), int(event[name])
    return ("promise", int(event.get("step", 0))) if "promise" in event else ("", 0)


def _nan_mean(arrays: Iterable[Floats]) -> Floats:
    stacked = np.stack(list(arrays))
    known = ~np.isnan(stacked)
    with np.errstate(all="ignore"):
        return np.where(known, stacked, 0.0).sum(0) / known.sum(0)  # nan where nothing is known


def _rate(amount: Floats, elapsed: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.where((elapsed > 0) & (amount > 0), amount / elapsed, np.nan)


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON with five digits; None for what is not finite."""
    return [_rounded(float(value)) for value in values]


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
