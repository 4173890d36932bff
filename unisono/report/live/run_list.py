"""The runs in a folder: their state, progress and last loss, from the ends of their timelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.monitor.timeline import as_number
from unisono.monitor.timeline import read as read_timeline
from unisono.monitor.valid_lines import is_valid
from unisono.report.run_files import RunFiles, is_run

TAIL_BYTES = 8 << 10
"""Bytes at the end of a timeline that are read: some dozens of steps."""


class RunList:
    """The run directories in a folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Any, dict[str, Any]]] = {}  # by name: a mark that changes with the run, its row

    def has(self, name: str) -> bool:
        """Return whether a name is that of a run in the folder."""
        return name not in ("", ".", "..") and "/" not in name and "\0" not in name and is_run(self._folder / name)

    def read(self) -> Any:
        """Read what is new. Return a mark that changes with the runs."""
        found = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.is_dir() and is_run(path):
                run = RunFiles(path)
                mark = (run.state, run.changed)
                known = self._known.get(path.name)
                found[path.name] = known if known is not None and known[0] == mark else (mark, row_of(run))
        self._known = found
        return {name: mark for name, (mark, _) in found.items()}

    def content(self) -> dict[str, Any]:
        """Return `folder` and `runs`, the newest first."""
        rows = sorted((row for _, row in self._known.values()), key=lambda row: -row["changed"])
        return {"folder": str(self._folder), "runs": rows}


def row_of(run: RunFiles) -> dict[str, Any]:
    """Return the row of a run: name, state, steps done, total (None: unknown), loss, time of the last change."""
    result, steps, loss, total = run.result, 0, None, None
    for path in (run.path / "timeline").glob("rank-*.jsonl"):
        try:
            lines = [entry for entry in read_timeline(path, last_bytes=TAIL_BYTES) if is_valid(entry)]
            first = next(filter(is_valid, read_timeline(path)), {})
        except (OSError, OverflowError, RecursionError):
            continue
        last = [entry for entry in lines if "seconds" in entry]
        total = total or first.get("total")
        if last and last[-1]["step"] >= steps:
            steps, loss = last[-1]["step"] + 1, as_number(last[-1].get("loss"))
    setting = run.settings.get("steps")
    if total is None and setting is not None and setting.value.isdecimal():
        total = int(setting.value)
    return {
        "name": run.path.name,
        "state": run.state,
        "steps": result.get("steps", steps),
        "total": total,
        "loss": result.get("loss", loss),
        "changed": run.changed,
    }
