"""Read a time limit as sbatch reads it.

https://slurm.schedmd.com/sbatch.html#OPT_time
"""

from __future__ import annotations

import re

FORMS = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?:(?P<hours>\d+):(?=\d+:))?(?P<minutes>\d+)(?::(?P<seconds>\d+))?)"
)
UNLIMITED = ("infinite", "unlimited")


def seconds_of(limit: str) -> float | None:
    """Return the seconds of a time limit; None if sbatch does not accept it.

    Args:
        limit: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or
            DAYS-HOURS:MINUTES:SECONDS; 0 and "infinite" for no limit.
    """
    if limit.lower() in UNLIMITED:
        return float("inf")
    found = FORMS.fullmatch(limit)
    if found is None:
        return None
    part = {name: int(value or 0) for name, value in found.groupdict().items()}
    minutes = 60 * (24 * part["days"] + part["day_hours"] + part["hours"]) + part["day_minutes"] + part["minutes"]
    return float(60 * minutes + part["day_seconds"] + part["seconds"]) or float("inf")
