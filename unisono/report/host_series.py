"""Read the samples of a host (`timeline/host-NAME.jsonl`) as curves, in bounded memory.

Each sample becomes numbers by chart and name: ("cpu", "host"), ("resident", "rank 3"). When there are more than
2 * MOST rows, neighbors are merged to their mean, so a run of weeks needs no more memory than one of an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.machine.sample_file import valid_sample
from unisono.report.rank_series import NAN, Floats

MOST = 300
"""Rows that a host keeps at least, once it has so many samples."""

LINES = 8
"""Curves of a chart; of more processes, devices or counters, the least, the mean and the greatest value are drawn."""
HOSTS = 6
"""Hosts that have charts of their own; of more, the mean and the extremes are drawn."""

CHARTS = {
    "cpu": ("Processors of the host", "share"),
    "cores": ("Cores in use by each process", "cores"),
    "memory": ("Memory of the host", "bytes"),
    "resident": ("Resident memory of each process", "bytes"),
    "utilization": ("Utilization of accelerators", "share"),
    "device memory": ("Memory of accelerators", "bytes"),
    "watts": ("Power", "watts"),
    "celsius": ("Temperature", "celsius"),
    "network": ("Network", "bytes/s"),
    "disk": ("Disks", "bytes/s"),
}
"""The title and the unit of every chart, in the order of the page."""

Curve = tuple[str, str]
"""A chart and the name of a curve in it."""


@dataclass(slots=True)
class Row:
    """The mean of some samples: their number, the time of the last one, and the numbers."""

    count: int
    time: float
    numbers: dict[Curve, float]


class HostSeries:
    """The samples of a host.

    Args:
        path: The file of the samples.

    Attributes:
        rows: In the order of time. After the clock was set back, they have the greatest time before.
        facts: What the sampler wrote at its last start: cores, memory, devices.
        latest: The last sample, as it is in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.latest: dict[str, Any] = {}
        self._at = 0
        self._merge = 1  # samples in a row

    @property
    def name(self) -> str:
        """The name of the host."""
        return str(self.facts.get("host") or self.path.stem.removeprefix("host-"))

    def read(self) -> bool:
        """Read what is new. Return whether there was anything."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return False
        whole = data.rfind(b"\n") + 1
        self._at += whole
        for line in data[:whole].splitlines():
            sample = valid_sample(line)
            if sample is None:
                continue
            if "start" in sample:
                self.facts = sample["start"]
            else:
                self.latest = sample
                self._add(float(sample["t"]), dict(numbers_of(sample, self.facts)))
        return whole > 0

    def _add(self, time: float, numbers: dict[Curve, float]) -> None:
        last = self.rows[-1] if self.rows else None
        time = time if last is None else max(time, last.time)  # the clock may be set back
        if last is not None and last.count < self._merge:
            self.rows[-1] = _merged(last, Row(1, time, numbers))
            return
        self.rows.append(Row(1, time, numbers))
        if len(self.rows) > 2 * MOST:
            pairs = zip(self.rows[::2], [*self.rows[1::2], None], strict=False)
            self.rows = [_merged(one, other) if other is not None else one for one, other in pairs]
            self._merge *= 2

    def curves(self, times: Floats) -> dict[str, dict[str, Floats]]:
        """Return the values at these times by chart and name."""
        found: dict[str, dict[str, Floats]] = {}
        own = np.array([row.time for row in self.rows])
        names = dict.fromkeys(curve for row in self.rows for curve in row.numbers)
        for chart, name in sorted(names, key=_by_rank):
            values = np.array([row.numbers.get((chart, name), NAN) for row in self.rows])
            found.setdefault(chart, {})[name] = np.interp(times, own, values, NAN, NAN)
        return found


def host_charts(hosts: Iterable[HostSeries], began: float, most: int) -> dict[str, Any]:
    """Return the charts of all hosts.

    Args:
        hosts: The hosts.
        began: The time that is zero, in seconds since 1970.
        most: Number of points of a curve, at most.

    Returns:
        By the name of the host, or "N hosts" if there are more than `HOSTS`: `facts`, `time` (seconds since `began`)
        and `charts` (id, title, unit, and curves {name: values}).
    """
    known = {series.name: series for series in hosts if series.rows}
    if len(known) <= HOSTS:
        return {name: _charts(series.facts, series.rows, began, most, series.curves) for name, series in known.items()}
    rows = sorted((row for series in known.values() for row in series.rows), key=lambda row: row.time)
    facts = {"cores": sum(series.facts.get("cores", 0) for series in known.values())}

    def over_all(times: Floats) -> dict[str, dict[str, Floats]]:
        return _extremes([series.curves(times) for series in known.values()])

    return {f"{len(known)} hosts": _charts(facts, rows, began, most, over_all)}


def _charts(
    facts: Mapping[str, Any],
    rows: Sequence[Row],
    began: float,
    most: int,
    curves_at: Callable[[Floats], dict[str, dict[str, Floats]]],
) -> dict[str, Any]:
    times = np.array([row.time for row in rows])
    if len(times) > most:
        times = np.linspace(times[0], times[-1], most)
    curves = curves_at(times)
    return {
        "facts": facts,
        "time": [round(float(t) - began, 3) for t in times],
        "charts": [
            {"id": chart, "title": title, "unit": unit, "curves": _few(curves[chart])}
            for chart, (title, unit) in CHARTS.items()
            if chart in curves
        ],
    }


def _extremes(hosts: Sequence[Mapping[str, Mapping[str, Floats]]]) -> dict[str, dict[str, Floats]]:
    """Return the mean and an extreme of equal curves of many hosts; all ranks are equal, and so are all devices."""
    groups: dict[Curve, list[Floats]] = {}
    for host in hosts:
        for chart, curves in host.items():
            for name, values in curves.items():
                groups.setdefault((chart, name.rstrip("-0123456789").removesuffix(" of rank")), []).append(values)
    found: dict[str, dict[str, Floats]] = {}
    for (chart, name), all_values in groups.items():
        spread = _spread(all_values)
        worst = "least" if name == "available" else "greatest"
        found.setdefault(chart, {})[f"{name.strip()}, {worst}"] = spread[worst]
        found[chart][f"{name.strip()}, mean"] = spread["mean"]
    return found


def numbers_of(sample: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[Curve, float]]:
    """Yield the numbers of a sample that are drawn. Values of unexpected types are left out."""
    for chart, name, value in _values(sample, facts):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (chart, name), float(value)


def _values(sample: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    cores, memory, cgroup = _part(sample, "cores"), _part(sample, "memory"), _part(sample, "cgroup")
    yield "cpu", "busy", sample.get("cpu")
    for name in ("iowait", "steal", "throttled"):
        if cores.get(name):
            yield "cpu", name, cores[name]
    yield "cpu", "tasks that wait for a core", _part(sample, "pressure").get("cpu")
    yield "celsius", "processor", cores.get("celsius")
    yield "memory", "available", memory.get("available")
    yield "memory", "swap in use", memory.get("swap") or None
    yield "memory", "in use in the control group", cgroup.get("memory")
    yield "memory", "limit of the control group", _part(facts, "cgroup").get("memory")
    for rank, process in _part(sample, "processes").items():
        if isinstance(process, Mapping):
            workers = _part(process, "workers")
            yield "cores", f"rank {rank}", process.get("cpu")
            yield "resident", f"rank {rank}", process.get("resident")
            yield "resident", f"workers of rank {rank}", workers.get("resident") or None
    devices = sample.get("devices")
    for place, device in enumerate(devices if isinstance(devices, list) else []):
        if isinstance(device, Mapping):
            name = f"device {device.get('index', place)}"
            yield "utilization", name, device.get("utilization")
            yield "device memory", name, device.get("memory")
            yield "watts", name, device.get("watts")
            yield "celsius", name, device.get("celsius")
    for counter, energy in _part(sample, "energy").items():
        if isinstance(energy, Mapping) and not str(counter).startswith("nvml"):  # a device, which is there already
            yield "watts", str(counter), energy.get("watts")
    yield from _sums("network", _part(sample, "network"), ("sent", "received"))
    yield from _sums("disk", _part(sample, "disk"), ("read", "written"))


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = content.get(name)
    return part if isinstance(part, Mapping) else {}


def _sums(chart: str, parts: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yield the sum over all interfaces or disks. The loopback interface counts only if it is the only one."""
    known = {part: rates for part, rates in parts.items() if isinstance(rates, Mapping)}
    known = {part: rates for part, rates in known.items() if part != "lo"} or known
    for name in names:
        found = [rates[name] for rates in known.values() if isinstance(rates.get(name), (int, float))]
        if found:
            yield chart, name, sum(found)


def _merged(one: Row, other: Row) -> Row:
    count = one.count + other.count
    numbers = dict(one.numbers)
    for curve, value in other.numbers.items():
        before = numbers.get(curve)
        numbers[curve] = value if before is None else (before * one.count + value * other.count) / count
    return Row(count, other.time, numbers)


def _by_rank(curve: Curve) -> tuple[str, int, str]:
    """Order the curves of a chart: rank 2 before rank 10."""
    chart, name = curve
    number = name.rpartition(" ")[2]
    return chart, int(number) if number.isdecimal() else -1, name


def _few(curves: Mapping[str, Floats]) -> dict[str, list[float | None]]:
    """Return the curves of a chart; of many, the least, the mean and the greatest value."""
    shown = curves if len(curves) <= LINES else _spread(list(curves.values()))
    return {name: [None if np.isnan(v) else float(f"{v:.4g}") for v in values] for name, values in shown.items()}


def _spread(curves: Sequence[Floats]) -> dict[str, Floats]:
    stacked = np.stack(curves)
    known = ~np.isnan(stacked)
    some = known.any(0)
    return {
        "greatest": np.where(some, np.where(known, stacked, -np.inf).max(0), NAN),
        "mean": np.where(some, np.where(known, stacked, 0.0).sum(0) / np.maximum(known.sum(0), 1), NAN),
        "least": np.where(some, np.where(known, stacked, np.inf).min(0), NAN),
    }
