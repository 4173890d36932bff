"""Complete the request of a resumed run: its directory after a restart, and the arguments of its script.

torchrun and Slurm count restarts, which shows that a run has been restarted. Other managers (Kubernetes, systemd, a
shell loop) repeat the same command each time; it contains --autoresume. With --run-dir, that directory is resumed.
Without, Slurm keeps the job id when a job is requeued. Every run records its job id and its request, because a job may
have several runs.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unisono import environment
from unisono.cli.request.run_dir import RUNS, arguments_in, arguments_not_stored, newest_run, script_in
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine
from unisono.errors import SettingsError
from unisono.security.masking import is_masked


def resumed_request(request: RunRequest, script: Path, line: CommandLine, *, restarts: int = 0) -> RunRequest:
    """Return the request, with --resume if there is a run to resume, and with the script's arguments of that run.

    Args:
        request: the flags of the run.
        script: the script, or the name of the recipe.
        line: the typed command, for messages.
        restarts: the number of restarts that the job manager has counted.

    Raises:
        SettingsError: for --autoresume without --run-dir; or the run does not store the arguments of its script.
    """
    path, stem = request.run_dir, script.stem
    if request.autoresume and path is None:
        facts = "The default run directory has the time of its start in its name, so a restart would not find it."
        raise SettingsError("--autoresume needs --run-dir.", facts, str(line.flag("--run-dir", f"runs/{stem}")))
    plain = replace(request, autoresume=False)
    if request.resume:
        return with_arguments(plain, request.run_dir or newest_run(stem), script, line)
    if not (request.autoresume or restarts):
        return plain
    if path is None:
        path = newest_run(stem) if environment.job() is None else _of_this_job(plain, stem)
    if path is None or not path.is_dir():
        return replace(plain, accept_change=()) if request.autoresume else plain  # there is no run yet to differ from
    return with_arguments(replace(plain, run_dir=path, resume=True), path, script, line)


def with_arguments(request: RunRequest, run_dir: Path | None, script: Path, line: CommandLine) -> RunRequest:
    """Return the request with the arguments that the script had in the run to resume, if it names no others.

    Args:
        request: the flags of the run.
        run_dir: the run to resume; None if there is none.
        script: the script, or the name of the recipe.
        line: the typed command, for messages.

    Raises:
        SettingsError: they contain a secret, which the run does not store.
    """
    if request.own or request.no_arguments or run_dir is None:
        return request
    before, own = script_in(run_dir), arguments_in(run_dir)
    if before is not None and before.stem not in (script.stem, script.resolve().stem) and before.is_file():
        return request  # another script; a renamed one is gone
    if is_masked(own):
        raise arguments_not_stored(run_dir, f"{line} -- {shlex.join(own)} (with the secret)")
    return replace(request, own=own)


def job_mark(request: RunRequest) -> dict[str, str | None]:
    """Return the job id and the request, as a run records them."""
    plain = replace(request, run_dir=None, resume=False, autoresume=False, accept_change=(), json=False)
    return {"job": environment.job(), "asked": str(plain.line())}


def _of_this_job(request: RunRequest, stem: str) -> Path | None:
    """Return the newest run that this job started with the same request."""
    sought, found = job_mark(request), list[Path]()
    for path in RUNS.glob(f"{stem}-*"):
        with suppress(OSError, ValueError):
            about = json.loads((path / "environment.json").read_text(encoding="utf-8"))
            if isinstance(about, dict) and {name: about.get(name) for name in sought} == sought:
                found.append(path)
    return max(found, key=lambda path: (path / "environment.json").stat().st_mtime, default=None)
