"""unisono logs: print the logs of all ranks of a run, merged by time."""

from __future__ import annotations

import heapq
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.logs.error_filter import ErrorFilter
from unisono.cli.logs.log_lines import LogLine, LogReader
from unisono.cli.request.run_dir import RUNS, is_in_use
from unisono.config import plural
from unisono.errors import SettingsError

POLL_SECONDS = 0.2
"""Time between two looks at the logs."""


def logs(
    folder: Path,
    /,
    *,
    rank: Annotated[tuple[int, ...], Parameter(negative=(), metavar="N", show_default=False)] = (),
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative=(), show_default=False)] = False,
    errors: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Print the logs of all ranks of a run, merged by time.

    Parameters
    ----------
    folder
        A run directory.
    rank
        Only this rank. Repeat it for several ranks.
    follow
        Print new lines until the run ends, or until Ctrl-C.
    errors
        Only errors: records of level ERROR and above, whole tracebacks, and the last lines of processes that died.
    json
        Print each line as a JSON object.
    """
    merged = MergedLogs(folder, rank, errors=errors)
    if not merged.open_new():
        raise _no_logs(folder)
    if missing := set(rank) - set(merged.known()):
        raise _no_such_rank(folder, min(missing), merged.known())
    count = 0
    try:
        for line in merged.follow() if follow else merged.all_lines():
            print(line.as_json() if json else line.shown())
            count += 1
            if getattr(sys.stdout, "reader_is_gone", False):
                break
    except KeyboardInterrupt:
        return 0
    if errors and not count and not json:
        print(f"No errors in {plural(len(merged.known()), 'log')}.", file=sys.stderr)
    return 0


class MergedLogs:
    """The logs of a run.

    Args:
        folder: The run directory.
        ranks: The ranks to read; (): all.
        errors: Choose errors only.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], *, errors: bool) -> None:
        self._folder, self._ranks, self._errors = folder, ranks, errors
        self._readers: dict[int, LogReader] = {}
        self._filters: dict[int, ErrorFilter] = {}

    def known(self) -> list[int]:
        """Return the ranks whose logs are open."""
        return sorted(self._readers)

    def open_new(self) -> bool:
        """Open the logs that are new: those of processes that have joined. Return whether the run has any log."""
        paths = logs_in(self._folder)
        for rank, path in paths.items():
            if rank not in self._readers and (not self._ranks or rank in self._ranks):
                self._readers[rank], self._filters[rank] = LogReader(path, rank), ErrorFilter()
        return bool(paths)

    def all_lines(self, *, last: bool = True) -> Iterator[LogLine]:
        """Yield all lines until now."""
        streams = [self._chosen(rank, reader.new_lines(last=last)) for rank, reader in sorted(self._readers.items())]
        return heapq.merge(*streams, key=attrgetter("order"))

    def follow(self) -> Iterator[LogLine]:
        """Yield all lines, and then new ones until the run has ended."""
        while True:
            running = is_in_use(self._folder)  # before the last look
            self.open_new()
            yield from self.all_lines(last=not running)
            sys.stdout.flush()
            if not running or getattr(sys.stdout, "reader_is_gone", False):
                return
            time.sleep(POLL_SECONDS)

    def _chosen(self, rank: int, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        for line in lines:
            if self._errors:
                yield from self._filters[rank].add(line)
            else:
                yield line


def logs_in(folder: Path) -> dict[int, Path]:
    """Return the logs of a run directory by rank."""
    found = {path.stem.removeprefix("rank-"): path for path in (folder / "log").glob("rank-*.log")}
    return {int(rank): path for rank, path in found.items() if rank.isdecimal()}


def _no_logs(folder: Path) -> SettingsError:
    newest = max(
        (path for parent in (folder, folder / RUNS, RUNS) for path in parent.glob("*") if logs_in(path)),
        key=lambda path: path.stat().st_mtime,
        default=None,
    )
    do = f"unisono logs {shlex.quote(str(newest)) if newest is not None else 'runs/NAME-TIME'}"
    if not folder.is_dir():
        return SettingsError(f"There is no folder {folder}.", "The argument is a run directory.", do)
    if (folder / "settings.toml").exists():
        facts = "Another launcher has started this run and has its output. Warnings and logging would be here."
        return SettingsError(f"There are no logs in {folder}.", facts, do)
    return SettingsError(f"{folder} is not a run directory.", "It has no log/rank-N.log.", do)


def _no_such_rank(folder: Path, rank: int, known: Sequence[int]) -> SettingsError:
    there = list(logs_in(folder))
    facts = f"There are logs of the ranks {', '.join(map(str, sorted(there)))}."
    do = f"unisono logs {shlex.quote(str(folder))} --rank {min(there, key=lambda other: abs(other - rank))}"
    return SettingsError(f"Rank {rank} has no log in {folder}.", facts, do)
