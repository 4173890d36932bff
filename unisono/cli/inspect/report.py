"""unisono report: show what a run did and where its time went, as a page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.inspect.named_run import open_runs
from unisono.errors import SettingsError

OUT = Path("report.html")
"""Where the comparison of several runs goes."""


def report(
    *runs: Path,
    out: Annotated[Path | None, Parameter(metavar="FILE", show_default=False)] = None,
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
    json
        Print the numbers of the page as JSON, and write no file.
    """
    opened = open_runs(runs, "unisono", "report")
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
