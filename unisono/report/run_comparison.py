"""Compare runs: their curves in one page, and what differs between their settings, environments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.report.report_data import report_data
from unisono.report.report_page import fitting, page_of
from unisono.report.run_files import RunFiles
from unisono.report.step_buckets import BUCKETS

SHOWN = ("name", "path", "state", "total", "result", "steps", "time", "values", "phases", "wait", "rate")
"""Parts of a run's data in a comparison."""

PASSING = {"seconds", "samples_per_second", "phases", "started", "command", "asked", "job"}
"""Facts that differ between any two runs; the page shows them elsewhere."""


def comparison(runs: Sequence[RunFiles], *, most: int = BUCKETS) -> dict[str, Any]:
    """Return the numbers of several runs.

    Keys: `runs` (parts of `report_data` of each, `seconds` of each phase over all ranks and steps, and `rank_steps`, by
    which they are divided for a mean), `differences` ({settings, environment, result: [name, [value of each run]]};
    null: it has none), and `fingerprints`, the number of different ones.
    """
    found, details = [], []
    labels = _labels(runs)
    for files, label in zip(runs, labels, strict=True):
        data = report_data(files, most=most)
        shown = {name: data[name] for name in SHOWN if name in data} | {"name": label}
        table = data.get("table", [])
        seconds: dict[str, float] = {}
        for row in table:
            for phase, spent in row["seconds"].items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
        found.append({**shown, "seconds": seconds, "rank_steps": sum(row["steps"] for row in table)})
        settings = {name: value for name, value, _ in data["settings"]}
        details.append({"settings": settings, "environment": data["environment"], "result": data["result"]})
    return {
        "runs": found,
        "differences": {part: _differences([each[part] for each in details]) for part in details[0]},
        "fingerprints": len({run["result"].get("weights_sha256") for run in found} - {None}),
    }


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Return the page of several runs."""
    title = " and ".join(files.name for files in runs)
    return fitting(lambda most: page_of(title, {"kind": "compare", "content": comparison(runs, most=most)}))


def _labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return a name for each run: that of its folder, or its path, if several folders have one name."""
    names = [files.name for files in runs]
    return names if len(set(names)) == len(names) else [str(files.path) for files in runs]


def _differences(parts: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    names = dict.fromkeys(name for part in parts for name in part)
    rows = [[name, [part.get(name) for part in parts]] for name in names if name not in PASSING]
    return [row for row in rows if any(value != row[1][0] for value in row[1])]
