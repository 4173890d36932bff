"""The ranks of a run at this moment, as rows: steps, speed, waiting, memory. The terminal view draws them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unisono.machine.sample_file import read_samples
from unisono.phases import PHASES
from unisono.report.run_files import RunFiles

RECENT_SECONDS = 10.0
"""Speed and waiting are those of the steps that ended within this time before the newest one."""

TAIL_BYTES = 16 << 10


class RankNow(NamedTuple):
    """A rank at this moment; None: unknown.

    Attributes:
        rank: The rank.
        host: The name of its host.
        step: The last step that is in its timeline.
        phase: The phase that took the most of the recent time.
        steps_per_second: Of recent steps.
        wait: The share of recent time in which it waited for messages.
        resident: Bytes of memory.
        cores: Cores in use.
        device: Utilization (share of the time), memory in bytes and temperature in degrees Celsius of its accelerator.
    """

    rank: int
    host: str
    step: int | None
    phase: str
    steps_per_second: float | None
    wait: float | None
    resident: float | None
    cores: float | None
    device: Mapping[str, Any]


def ranks_now(files: RunFiles) -> list[RankNow]:
    """Return the ranks of a run, which was read."""
    newest = _newest_samples(files)
    return [_row(files, rank, newest) for rank in files.ranks]


def samples_per_second(files: RunFiles) -> float | None:
    """Return the samples in a second of recent steps, over all processes; None: unknown."""
    for series in files.ranks.values():
        recent = _recent(series.rows)
        samples = [row.samples for row in recent if row.samples == row.samples]
        seconds = sum(sum(row.seconds) for row in recent)
        if samples and seconds:
            return sum(samples) / seconds
    return None


def _row(files: RunFiles, rank: int, newest: Mapping[str, Mapping[str, Any]]) -> RankNow:
    series = files.ranks[rank]
    start: Mapping[str, Any] = next((event for event in reversed(series.events) if event.get("event") == "start"), {})
    host = str(start.get("host", ""))
    sample = newest.get(host, {})
    process = (sample.get("processes") or {}).get(str(rank), {})
    recent = _recent(series.rows)
    spent = [sum(column) for column in zip(*(row.seconds for row in recent), strict=True)]
    total = sum(spent)
    return RankNow(
        rank,
        host,
        series.rows[-1].last if series.rows else None,
        PHASES[spent.index(max(spent))] if total else "",
        sum(row.steps for row in recent) / total if total else None,
        sum(row.wait for row in recent) / total if total else None,
        process.get("resident"),
        process.get("cpu"),
        _device_of(str(start.get("device", "")), sample),
    )


def _recent(rows: list[Any]) -> list[Any]:
    """Return the rows of the last seconds."""
    return [row for row in rows[-400:] if row.time >= rows[-1].time - RECENT_SECONDS]


def _newest_samples(files: RunFiles) -> dict[str, Mapping[str, Any]]:
    """Return the newest sample of each host."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in (files.path / "timeline").glob("host-*.jsonl"):
        try:
            samples = [line for line in read_samples(path, last_bytes=TAIL_BYTES) if "start" not in line]
        except OSError:
            continue
        samples = [sample for sample in samples if "end" not in sample]
        if samples:
            found[path.stem.removeprefix("host-")] = samples[-1]
    return found


def _device_of(device: str, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is known of an accelerator like cuda:1."""
    kind, _, index = device.partition(":")
    devices = sample.get("devices") or ()
    if kind in ("", "cpu"):
        return {}
    return next((each for each in devices if str(each.get("index")) == (index or "0")), {})
