"""The files of a run directory, as far as the report needs them. Each may be missing, damaged or half written."""

from __future__ import annotations

import gc
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from unisono.config.toml_file import flat_items
from unisono.errors import Problem, SettingsError
from unisono.json_forms import Form, fits, is_count, is_size, parse
from unisono.machine.sample_file import valid_sample
from unisono.report.host_series import HostSeries
from unisono.report.rank_series import RankSeries
from unisono.report.result_file import read_result

LOG_BYTES = 16 << 10
"""Bytes at the end of a log that are read, if there are few logs."""
LOGS_BYTES = 160 << 10
"""Bytes of all logs together."""
LOG_LINES, LINE_CHARACTERS = 40, 400

HOST_BYTES = 4 << 20
"""Size of a host's samples from which on only evenly chosen ones are read: some 7000."""

COUNTS: Mapping[str, Form] = {
    **dict.fromkeys(("batch", "virtual_ranks", "micro_batch"), lambda value: value == "none" or is_size(value)),
    **dict.fromkeys(("loader.workers", "checkpoint.every"), is_count),
    **dict.fromkeys(("parallel.shard", "parallel.pipeline"), lambda value: value == -1 or is_size(value)),
}
"""Settings from which findings compute."""

FRESH_SECONDS = 30.0
"""A run without result.json has ended without one if its timelines, samples of hosts and settings are all older."""


class Setting(NamedTuple):
    """A setting of a run: its value as text, and its source ("default", "script", "--set", ...)."""

    value: str
    source: str


class RunFiles:
    """The files of a run.

    Args:
        path: The run directory.

    Raises:
        SettingsError: it is no run directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_run(path):
            raise SettingsError.of([no_run(path)])
        self.ranks: dict[int, RankSeries] = {}
        self.host_series: dict[str, HostSeries] = {}

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    def read(self) -> bool:
        """Read what is new in the timelines and the samples of hosts. Return whether there was anything."""
        for file in (self.path / "timeline").glob("rank-*.jsonl"):
            number = file.stem.removeprefix("rank-")
            if number.isdecimal() and int(number) not in self.ranks:
                self.ranks[int(number)] = RankSeries(file, int(number))
        self.ranks = dict(sorted(self.ranks.items()))
        for file in sorted((self.path / "timeline").glob("host-*.jsonl")):
            if file.name not in self.host_series:
                self.host_series[file.name] = HostSeries(file)
        with _without_collections():
            news = [rank.read() for rank in self.ranks.values()]
            news += [host.read() for host in self.host_series.values()]
        return any(news)

    @property
    def result(self) -> dict[str, Any]:
        """The content of result.json; {}: there is none yet."""
        return read_result(self.path) or {}

    @property
    def flops(self) -> dict[str, Any]:
        """The operations of a sample (train/recording/flop_count.py); {}: they were not counted."""
        return _json(self.path / "flops.json")

    @property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json."""
        return _json(self.path / "environment.json")

    @property
    def settings(self) -> dict[str, Setting]:
        """The settings by name, each with its source."""
        try:
            text = (self.path / "settings.toml").read_text(encoding="utf-8")
            values = dict(flat_items(tomllib.loads(text)))
        except (OSError, ValueError, RecursionError):
            return {}
        if not fits(values, COUNTS):
            return {}
        sources = {}
        for line in text.splitlines():
            name, separator, rest = line.partition(" = ")
            if separator:
                sources[name.strip()] = rest.rpartition("# ")[2].strip()
        return {name: Setting(_shown(value), sources.get(name, "")) for name, value in values.items()}

    @property
    def logs(self) -> dict[str, list[str]]:
        """The last lines of every log, by its file name. The more logs, the fewer lines."""
        found = {}
        files = sorted((self.path / "log").glob("*.log"), key=lambda file: (len(file.name), file.name))
        most = min(LOG_BYTES, LOGS_BYTES // max(1, len(files)))
        for file in files:
            try:
                with file.open("rb") as log:
                    log.seek(max(0, os.fstat(log.fileno()).st_size - most))
                    data = log.read()
            except OSError:
                continue
            lines = data.decode(errors="replace").splitlines()[-LOG_LINES:]
            found[file.stem] = [line[:LINE_CHARACTERS] for line in lines]
        return found

    @property
    def hosts(self) -> dict[str, list[dict[str, Any]]]:
        """The samples of every host, by its name (`timeline/host-NAME.jsonl`); of many samples, evenly chosen ones."""
        found = {}
        for file in sorted((self.path / "timeline").glob("host-*.jsonl")):
            try:
                lines = file.read_bytes().splitlines()
            except OSError:
                continue
            stride = -(-file.stat().st_size // HOST_BYTES)
            chosen = [line for i, line in enumerate(lines) if i % stride == 0 or b'"start":' in line]
            samples = [sample for line in chosen if (sample := valid_sample(line)) is not None]
            found[file.stem.removeprefix("host-")] = samples
        return found

    @property
    def changed(self) -> float:
        """When a file that the report shows was written last, in seconds since 1970; logs only with another file."""
        names = ("result.json", "settings.toml", "environment.json")
        series = (self.path / "timeline").glob("*.jsonl")
        return max(map(_modified, (*(self.path / name for name in names), *series)), default=0.0)

    @property
    def state(self) -> str:
        """One of "finished", "stopped" (before its end), "running" and "ended without a result"."""
        newest = max(map(_modified, (self.path / "timeline").glob("rank-*.jsonl")), default=0.0)
        result = self.result
        if result and _modified(self.path / "result.json") >= newest - FRESH_SECONDS:
            return "stopped" if result.get("stopped") else "finished"
        # A step may take minutes, and so may the time before the first one. Hosts are sampled meanwhile.
        samples = (self.path / "timeline").glob("host-*.jsonl")
        newest = max(newest, *map(_modified, (self.path / "settings.toml", *samples)))
        return "running" if time.time() - newest < FRESH_SECONDS else "ended without a result"


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause Python's garbage collector, which would look at millions of rows and find nothing: half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory."""
    return (path / "timeline").is_dir() or (path / "settings.toml").is_file()


def no_run(path: Path) -> Problem:
    """Return the problem that a path is no run directory."""
    if not path.exists():
        return Problem(f"There is no run {path}.", "The folder does not exist.", "ls runs")
    if path.is_dir():
        runs = sorted((folder for folder in path.iterdir() if folder.is_dir() and is_run(folder)), key=_modified)
        if runs:
            return Problem(f"{path} is not a run directory.", f"It contains {len(runs)} of them.", f"{runs[-1]}")
    return Problem(f"{path} is not a run directory.", "It has neither settings.toml nor timeline/.", "ls runs")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _json(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_bytes()) or {}
    except OSError:
        return {}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
