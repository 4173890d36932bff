"""unisono audit-log: print joins, losses, refusals and stops of a run, and whether this record is whole."""

from __future__ import annotations

import json as json_
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.request.run_audit import SEAL
from unisono.errors import SettingsError
from unisono.monitor.stream_text import visible
from unisono.security.audit_trail import NAME, Trail, read_trail

HIDDEN = ("n", "t", "event", "before")


def audit_log(run: Path, /, *, json: Annotated[bool, Parameter(negative=(), show_default=False)] = False) -> int:
    """Print the joins, losses, refusals and stops of a run, and whether lines were changed or removed.

    Each line holds the hash of the one before. The exit status is 1 if a line does not fit.

    Parameters
    ----------
    run
        The run directory.
    json
        Print the entries and the flaws as JSON.
    """
    path = run / NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        facts = f"{path}: {error.strerror}. Only runs that `unisono run` or `unisono.launch` started have one."
        raise SettingsError(f"There is no audit log in {run}.", facts, "ls runs") from None
    seal = _seal(run)
    trail = read_trail(content, seal)
    if json:
        flaws = [flaw._asdict() for flaw in trail.flaws]
        print(json_.dumps({"entries": trail.entries, "flaws": flaws, "sealed": seal}))
        return 1 if trail.flaws else 0
    for entry in trail.entries:
        print(_shown(entry))
    if trail.flaws:
        print("The audit log was changed.", file=sys.stderr)
        for flaw in trail.flaws:
            print(f"  Line {flaw.line} {flaw.what}.", file=sys.stderr)
        print(f"  Next: compare {path} with a copy of it.", file=sys.stderr)
        return 1
    print(_whole(trail, seal))
    return 0


def _seal(run: Path) -> dict[str, Any] | None:
    """Return what result.json states about the log; None if it states nothing."""
    try:
        found = json_.loads((run / "result.json").read_bytes())[SEAL]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _shown(entry: Mapping[str, Any] | None) -> str:
    """Return an entry on a line: its time, its event and its facts."""
    if entry is None:
        return "????-??-?? ??:??:??  no entry"
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(entry["t"])))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        when = "????-??-?? ??:??:??"
    known = {name: value for name, value in entry.items() if name not in HIDDEN and value not in ("", None)}
    facts = ", ".join(f"{name} {value}" for name, value in known.items())
    return visible(f"{when}  {entry['event']:<8}  {facts}".rstrip())


def _whole(trail: Trail, seal: Mapping[str, Any] | None) -> str:
    """Return what is known about a log whose chain is whole."""
    count = len(trail.entries)
    text = f"{count} lines, and each follows the one before."
    if seal is None:
        return f"{text} No result.json states how many there are, so lines that were cut off at the end do not show."
    if seal.get("lines") == count:
        return f"{text} result.json states this number and the hash of the last one, so none is cut off."
    after = f"the first {seal.get('lines')}"
    return f"{text} result.json states {after}. Lines that were cut off after these do not show."
