"""The report as a page: one HTML file without links to others, whose scripts and styles are in assets/.

A browser needs no network for it, and its content security policy forbids any. Everything that comes from a run (names,
settings, logs) is in one block of JSON, which the scripts show as text.
"""

from __future__ import annotations

import html
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from unisono.report.report_data import report_data
from unisono.report.run_files import RunFiles
from unisono.report.step_buckets import BUCKETS
from unisono.security.file_modes import write_text

ASSETS = Path(__file__).with_name("assets")
STYLES = ("uPlot.min.css", "page.css")
PARTS = ("format.js", "charts.js", "tables.js", "run.js", "compare.js", "list.js", "rates.js", "scaling.js", "page.js")
SCRIPTS = ("uPlot.iife.min.js", *PARTS)

LARGEST = 950_000
"""Bytes of a page. If it is larger, the curves get fewer points."""
LEAST_BUCKETS = 75

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def page_of(title: str, content: Mapping[str, Any]) -> str:
    """Return a page.

    Args:
        title: Its title.
        content: `kind` ("run", "compare", "list", "rates" or "scaling") and `content`, what such a page shows.
    """
    return page_around(title, json_of(content))


def page_around(title: str, content: str, *, live: bool = False, stops: bool = False) -> str:
    """Return a page with this JSON as its content.

    Args:
        title: Its title.
        content: The JSON.
        live: Whether it asks the server that it comes from for new data.
        stops: Whether it has a button that stops the run.
    """
    return Template(_asset("page.html")).substitute(
        policy=POLICY + "; connect-src 'self'" * live,
        title=html.escape(title.encode(errors="replace").decode()),
        style="\n".join(map(_asset, STYLES)),
        script="\n".join(map(_asset, SCRIPTS)),
        data=content.replace("<", "\\u003c"),  # nothing ends the element, or opens a comment
        live="live" if live else "",
        stops="stops" if stops else "",
    )


def run_page(files: RunFiles, **more: Any) -> str:
    """Return the page of a run, below `LARGEST` bytes. `more` replaces parts of its data."""
    return fitting(
        lambda most: page_of(files.name, {"kind": "run", "content": {**report_data(files, most=most), **more}})
    )


def fitting(page: Callable[[int], str]) -> str:
    """Return the page with as many points for each curve as `LARGEST` allows. `page` makes it with at most so many."""
    most = BUCKETS
    while True:
        text = page(most)
        if len(text) <= LARGEST or most <= LEAST_BUCKETS:
            return text
        most //= 2


def write_report(run_dir: Path, **more: Any) -> Path:
    """Write RUN/report.html, and return it.

    Raises:
        SettingsError: `run_dir` is no run directory.
        OSError: It cannot be written.
    """
    files = RunFiles(run_dir)
    files.read()
    path = run_dir / "report.html"
    write_page(path, run_page(files, **more))
    return path


def write_page(path: Path, text: str) -> None:
    """Write a page completely or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.time_ns()}")
    try:
        write_text(draft, text, errors="replace")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def json_of(content: Any) -> str:
    """Return content as JSON. Numbers that are not finite become text ("nan"), since JSON has none."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False, default=str)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(name): _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
