"""Write the report of a run at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def leave_report(run_dir: Path, note: Callable[[str], None], **more: Any) -> Path | None:
    """Write RUN/report.html, and return it; None: that failed, which is noted in a line and does not fail the run.

    Args:
        run_dir: The run directory.
        note: Prints a line.
        more: Parts of the report's data that are not in the files, such as `state="failed"`.
    """
    try:
        from unisono.report.report_page import write_report  # here, because it loads numpy

        return write_report(run_dir, **more)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        note(f"The report was not written: {type(error).__name__}: {reason}. Next: unisono report {run_dir}")
        return None
