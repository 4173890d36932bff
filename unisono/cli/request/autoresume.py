"""All of this has begun again, and nobody is there who types --resume: what does it go on from?

A manager that counts its starts (torchrun, Slurm) is known by that. Any other one (Kubernetes, systemd, a loop of the
shell) types the same line each time, and says --autoresume in it. With --run-dir the answer is that folder. Without,
Slurm's job has a number that stays when it is put back into the queue, and every run writes down which job it is of,
and what was asked for: a job may have several runs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unisono import environment
from unisono.cli.request.run_dir import RUNS, newest_run
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine
from unisono.errors import SettingsError


def resumed_request(request: RunRequest, stem: str, line: CommandLine, *, restarts: int = 0) -> RunRequest:
    """The request, going on with what there is of it. A run that never came so far begins.

    restarts   how often a manager has started it again, as far as it counts
    line       what was typed, for the message

    Raises SettingsError for --autoresume without a folder.
    """
    path = request.run_dir
    if request.autoresume and path is None:
        true = "A run's own folder has the time of its start in its name, so the next start would not find it."
        raise SettingsError("--autoresume", true, str(line.flag("--run-dir", f"runs/{stem}")))
    plain = replace(request, autoresume=False)
    if request.resume or not (request.autoresume or restarts):
        return plain
    if path is None:
        path = newest_run(stem) if environment.job() is None else _of_this_job(plain, stem)
    if path is None or not path.is_dir():
        return replace(plain, accept_change=()) if request.autoresume else plain  # a change of nothing yet
    return replace(plain, run_dir=path, resume=True)


def job_mark(request: RunRequest) -> dict[str, str | None]:
    """What a run writes down of its job."""
    plain = replace(request, run_dir=None, resume=False, autoresume=False, accept_change=(), json=False)
    return {"job": environment.job(), "asked": str(plain.line())}


def _of_this_job(request: RunRequest, stem: str) -> Path | None:
    """The newest run that this job has begun with the same request."""
    sought, found = job_mark(request), list[Path]()
    for path in RUNS.glob(f"{stem}-*"):
        with suppress(OSError, ValueError):
            about = json.loads((path / "environment.json").read_text(encoding="utf-8"))
            if isinstance(about, dict) and {name: about.get(name) for name in sought} == sought:
                found.append(path)
    return max(found, key=lambda path: (path / "environment.json").stat().st_mtime, default=None)
