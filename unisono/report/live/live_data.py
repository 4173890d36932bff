"""What the live page shows: the numbers of a run, of several runs to compare, or the list of the runs in a folder.

However many browsers ask, the numbers are made once a second at most, and less often if that takes long, because
training may need the same processors.
"""

from __future__ import annotations

import gzip
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unisono.report.live.run_list import RunList
from unisono.report.report_data import report_data
from unisono.report.report_page import fitting, json_of
from unisono.report.run_comparison import comparison
from unisono.report.run_files import RunFiles, is_run

LEAST_SECONDS = 1.0
"""Time between two looks at the files."""

SHARE = 0.05
"""Share of the time that is spent in making numbers, at most."""

MOST_RUNS = 12
"""Runs in a comparison."""


class Answer(NamedTuple):
    """The data of a page: its version, a title, and JSON as text and compressed."""

    version: str
    title: str
    text: str
    packed: bytes


class LiveView:
    """The data of one page, for any number of viewers.

    Args:
        read: Reads what is new in the files. Returns a mark that changes with them.
        make: Returns the page's title, kind and content, with so many points of a curve at most.
        back: The address of the list of runs; None: there is none.
        now: Returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        make: Callable[[int], tuple[str, str, Any]],
        back: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._make, self._back, self._now = read, make, back, now
        self._lock = threading.Lock()
        self._due = 0.0
        self._mark: Any = None
        self._answer: Answer | None = None
        self._id, self._number = secrets.token_hex(4), 0

    def answer(self) -> Answer:
        """Return the newest data."""
        with self._lock:
            began = self._now()
            if self._answer is None or began >= self._due:
                self._refresh()
                ended = self._now()
                self._due = ended + max(LEAST_SECONDS, (ended - began) / SHARE)
            assert self._answer is not None
            return self._answer

    def _refresh(self) -> None:
        mark = self._read()
        if self._answer is not None and mark == self._mark:
            return
        self._mark = mark
        self._number += 1
        version = f"{self._id}-{self._number}"
        title = ""

        def text(most: int) -> str:
            nonlocal title
            title, kind, content = self._make(most)
            return json_of({"kind": kind, "version": version, "back": self._back, "content": content})

        encoded = fitting(text)
        self._answer = Answer(version, title, encoded, gzip.compress(encoded.encode(), 3))


class LiveData:
    """The views of a run directory, or of a folder of them.

    Args:
        path: The run directory, or the folder.
        back: The address of the list of runs.
    """

    def __init__(self, path: Path, back: str) -> None:
        self._path, self._back = path, back
        self._views: dict[tuple[str, ...], LiveView] = {}
        self._lock = threading.Lock()
        self._list = None if is_run(path) else RunList(path)

    def view(self, names: Sequence[str]) -> LiveView | None:
        """Return the page of these runs of the folder, or the main page; None: there is no such run."""
        key = tuple(dict.fromkeys(names))
        if self._list is None:
            key = ()
        elif len(key) > MOST_RUNS or not all(self._list.has(name) for name in key):
            return None
        with self._lock:
            if key not in self._views:
                self._views[key] = self._build(key)
            return self._views[key]

    def _build(self, names: tuple[str, ...]) -> LiveView:
        if self._list is not None and not names:
            return LiveView(self._list.read, lambda most: ("Runs", "list", self._list_content()))
        runs = [RunFiles(self._path / name) for name in names] or [RunFiles(self._path)]
        back = self._back if self._list is not None else None

        def make(most: int) -> tuple[str, str, Any]:
            if len(runs) == 1:
                return runs[0].name, "run", report_data(runs[0], most=most)
            return "Comparison", "compare", comparison(runs, most=most)

        return LiveView(_reader(runs), make, back)

    def _list_content(self) -> dict[str, Any]:
        assert self._list is not None
        return self._list.content()


def _reader(runs: Sequence[RunFiles]) -> Callable[[], Any]:
    """Return a function that reads what is new in these runs, and returns a mark that changes with them."""
    news = 0

    def read() -> tuple[Any, ...]:
        nonlocal news
        changed = [run.read() for run in runs]
        news += any(changed)
        return (news, *((run.state, run.changed) for run in runs))

    return read
