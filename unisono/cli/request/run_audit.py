"""The audit log of a run: begin it, end it, and state its length in the result."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.cli.request.run_dir import write
from unisono.security.audit_trail import NAME, AuditTrail, Record, take_reason

SEAL = "audit"
"""The entry of result.json with the number of lines and the hash of the last one."""


@contextmanager
def audited(run_dir: Path, say: Callable[[str], None]) -> Iterator[Record]:
    """Record the events of a run during a block, and state afterward in its result how many there are.

    Args:
        run_dir: the run directory, which this process has locked.
        say: prints a line for the user if the log cannot be written.
    """
    trail = AuditTrail(run_dir / NAME, say)
    take_reason(run_dir)  # of a stop that came too late for an earlier start

    def record(event: str, **facts: Any) -> None:
        trail(event, **facts, **(take_reason(run_dir) if event == "stop" else {}))

    record("begin", user=_user(), host=socket.gethostname(), pid=os.getpid())
    try:
        yield record
    except BaseException as error:
        record("end", reason=type(error).__name__)
        raise
    else:
        record("end")
    finally:
        _state(run_dir, trail.seal)


def _user() -> str:
    """Return the name of the user, or the number if it has no name."""
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.geteuid())


def _state(run_dir: Path, seal: dict[str, Any]) -> None:
    """Write the seal into result.json, if there is one. The file keeps its time."""
    path = run_dir / "result.json"
    with suppress(OSError, ValueError, RecursionError):
        about, result = path.stat(), json.loads(path.read_bytes())
        if isinstance(result, dict):
            write(path, json.dumps({**result, SEAL: seal}, indent=1) + "\n")
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
