"""The ranks of a run at this moment, as rows: steps, speed, waiting, memory. The terminal view draws them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from unisono.phases import PHASES
from unisono.report.host_series import Curve, HostSeries, numbers_of
from unisono.report.rank_series import present
from unisono.report.run_files import RunFiles

RECENT_SECONDS = 10.0
"""Speed and waiting are those of the steps that ended within this time before the newest one."""

DEVICE = {"utilization": "utilization", "memory": "device memory", "celsius": "celsius"}
"""What is shown of an accelerator, and the chart of the host's samples that has it."""

Numbers = Mapping[Curve, float]


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
    device: Mapping[str, float]


def ranks_now(files: RunFiles) -> list[RankNow]:
    """Return the ranks of a run, which was read, without those that have left it."""
    newest = {series.name: _newest(series) for series in files.host_series.values()}
    return [_row(files, rank, newest) for rank in present(files.ranks) or files.ranks]


def seconds_since_step(files: RunFiles) -> float | None:
    """Return the seconds since the newest step of any rank ended, by this host's clock; None: there is no step yet."""
    ends = [series.rows[-1].time for series in files.ranks.values() if series.rows]
    return max(0.0, time.time() - max(ends)) if ends else None


def samples_per_second(files: RunFiles) -> float | None:
    """Return the samples in a second of recent steps, over all processes; None: unknown."""
    for series in files.ranks.values():
        recent = _recent(series.rows)
        samples = [row.samples for row in recent if row.samples == row.samples]
        seconds = sum(sum(row.seconds) for row in recent)
        if samples and seconds:
            return sum(samples) / seconds
    return None


def _row(files: RunFiles, rank: int, newest: Mapping[str, Numbers]) -> RankNow:
    series = files.ranks[rank]
    host = str(series.start.get("host", ""))
    sample = newest.get(host, {})
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
        sample.get(("resident", f"rank {rank}")),
        sample.get(("cores", f"rank {rank}")),
        _device_of(str(series.start.get("device", "")), sample),
    )


def _recent(rows: list[Any]) -> list[Any]:
    """Return the rows of the last seconds. Rows with a later time are older: the clock was set back."""
    return [row for row in rows[-400:] if 0 <= rows[-1].time - row.time <= RECENT_SECONDS]


def _newest(series: HostSeries) -> Numbers:
    """Return the numbers of a host's newest sample. The last line of a run that has ended has none."""
    numbers = dict(numbers_of(series.latest, series.facts))
    return numbers or next((row.numbers for row in reversed(series.rows) if row.numbers), {})


def _device_of(device: str, sample: Numbers) -> Mapping[str, float]:
    """Return what is known of an accelerator like cuda:1."""
    kind, _, index = device.partition(":")
    if kind in ("", "cpu"):
        return {}
    found = {name: sample.get((chart, f"device {index or 0}")) for name, chart in DEVICE.items()}
    return {name: value for name, value in found.items() if value is not None}
