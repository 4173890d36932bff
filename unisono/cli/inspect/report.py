"""unisono report: show what a run did and where its time went, as a page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from unisono.cli.inspect.named_run import open_runs
from unisono.config import CommandLine
from unisono.errors import SettingsError

if TYPE_CHECKING:
    from unisono.report.run_files import RunFiles

OUT = Path("report.html")
"""Where the comparison of several runs goes."""


def report(
    *runs: Path,
    out: Annotated[Path | None, Parameter(metavar="FILE", show_default=False)] = None,
    text: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flops: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Write the report of a run as one HTML file: curves, time by phase, ranks, machines, events, settings, logs.

    A run writes it at its end, to report.html in its directory. This command also works while a run makes progress,
    and after a crash. Several runs are compared in one page.

    Parameters
    ----------
    runs
        A run directory, or several.
    out
        The file to write. By default report.html in the run directory; for several runs, in the working directory.
    text
        Print what slowed the run down, with the evidence, and write no file.
    flops
        First count the floating-point operations of a sample, by computing a part of the first step once more.
        The result is kept in the run directory.
    json
        Print the numbers of the page as JSON, and write no file.
    """
    opened = open_runs(runs, "unisono", "report")
    if text and json:
        error = "--text cannot be combined with --json."
        raise SettingsError(
            error, "Each is another form.", shlex.join(["unisono", "report", *map(str, runs), "--json"])
        )
    if flops:
        from unisono.cli.compare.flops_of_run import count_flops_of_run

        for run in runs:
            count_flops_of_run(run, CommandLine(("unisono", "report", str(run))))
    if text:
        return _print_text(opened)
    from unisono.report.report_data import report_data
    from unisono.report.report_page import json_of, run_page, write_page
    from unisono.report.run_comparison import comparison, comparison_page

    if json:
        print(json_of(report_data(opened[0]) if len(opened) == 1 else comparison(opened)))
        return 0
    path = out or (runs[0] / OUT if len(runs) == 1 else OUT)
    try:
        write_page(path, run_page(opened[0]) if len(opened) == 1 else comparison_page(opened))
    except OSError as error:
        line = shlex.join(["unisono", "report", *map(str, runs), "--out", "FILE"])
        raise SettingsError(f"Cannot write {path}.", f"{error.strerror or error}.", line) from None
    print(path)
    return 0


def _print_text(opened: Sequence[RunFiles]) -> int:
    """Print the report of each run as text."""
    from unisono.report.text_report import text_report

    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    for number, files in enumerate(opened):
        print("\n" * bool(number) + "\n".join(text_report(files, ascii_only=plain)))
    return 0
