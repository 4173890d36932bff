"""Count the floating-point operations of an earlier run's model, in a process of its own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from unisono.cli.compare.repeated_runs import reason_of
from unisono.cli.compare.rerun import earlier
from unisono.config import CommandLine
from unisono.errors import SettingsError
from unisono.security.file_modes import write_text

FILE = "flops.json"
"""The file in the run directory that keeps the counts."""


def count_flops_of_run(run_dir: Path, line: CommandLine) -> dict[str, Any]:
    """Return the operations of a sample and the peak of the device (train/recording/flop_count.py). They are kept.

    Args:
        run_dir: the run directory.
        line: the typed command, for messages.

    Raises:
        SettingsError: the run cannot be repeated on one process.
    """
    again = earlier(run_dir, None, line)
    with tempfile.TemporaryDirectory(prefix="unisono-flops-") as folder:
        found = Path(folder) / FILE
        outcome = again.run(Path(folder) / "run", ranks=1, checkpoint=None, trace=f"flops:{found}")
        if not found.is_file():
            reason = reason_of(outcome)[0] if outcome.failure is not None else "Its loop has no step."
            raise SettingsError(f"Cannot count the operations of {run_dir}.", reason, f"unisono report {run_dir}")
        counts: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    part = run_dir / f"{FILE}.part"
    write_text(part, json.dumps(counts, indent=1) + "\n")
    part.replace(run_dir / FILE)
    return counts
