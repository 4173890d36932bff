"""unisono slurm: write the batch script of a run for Slurm, and submit it."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from unisono.cli.clusters.slurm_flags import JobFlags
from unisono.cli.request.request_checks import checked, mentions_unisono
from unisono.cli.request.run_dir import newest_run
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.target import recipes
from unisono.clusters.slurm.batch_script import INDEX, BatchScript, with_index
from unisono.clusters.slurm.job_request import JobRequest
from unisono.clusters.slurm.submission import submit
from unisono.config import CommandLine
from unisono.errors import SettingsError

FILE = Group("Batch script", sort_key=4)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """The flags about the file.

    Parameters
    ----------
    write
        The batch script; by default NAME.sbatch in the working directory, for train.py train.sbatch.
    overwrite
        Replace an existing file with other content.
    submit
        Submit the batch script with sbatch.
    """

    write: Annotated[Path | None, Parameter(metavar="FILE", show_default=False, group=FILE)] = None
    overwrite: Annotated[bool, Parameter(show_default=False, group=FILE)] = False
    submit: Annotated[bool, Parameter(show_default=False, group=FILE)] = False

    def words(self) -> list[str]:
        """Return the flags that are not the default."""
        found = ["--write", str(self.write)] if self.write is not None else []
        return found + ["--overwrite"] * self.overwrite + ["--submit"] * self.submit


def slurm(
    target: str,
    /,
    *,
    job: JobFlags = JobFlags(),  # noqa: B008  (frozen)
    file: FileFlags = FileFlags(),
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Write a batch script that trains on nodes of a Slurm cluster, and submit it with --submit.

    The job saves before its time limit, and is queued again after that, after the failure of a node and after a
    preemption. It continues its run, with the bits of an undisturbed one.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    """
    command = ("unisono", "slurm", target, *job.words())
    line = request.line(*command, *file.words())
    asked = job.job(Path(target).stem)
    if problems := asked.problems(line):
        raise SettingsError.of(problems)
    request = _with_run_dir(request, asked, line)
    note = _checked(target, asked, request, line)
    program = [sys.executable, *(["-m", "unisono", "run", target] if target in recipes() else [target])]
    path = file.write if file.write is not None else Path(f"{asked.name}.sbatch")
    text = BatchScript(
        request=asked,
        folder=Path.cwd(),
        program=program,
        flags=_flags(request),
        own=request.own,
        run_dir=str(request.run_dir or ""),
        typed=str(request.line(*command)),
        file=shlex.quote(str(path)),
    ).text()
    _write(path, text, line, overwrite=file.overwrite)
    number = submit(path) if file.submit else None
    if note:
        print(note, file=sys.stderr)
    if request.json:
        print(json.dumps({"path": str(path), "job": number}))
    elif number is not None:
        print(f"Submitted job {number}: {path}. Next: squeue --job {number}")
    else:
        print(f"Written: {path}. Next: sbatch {shlex.quote(str(path))}")
    return 0


def _with_run_dir(request: RunRequest, asked: JobRequest, line: CommandLine) -> RunRequest:
    """Return the request with the run directory that the batch script names; None for one after the job.

    Raises:
        SettingsError: for --resume of an array without --run-dir.
    """
    path = request.run_dir
    if path is None and request.resume and asked.array:
        fact = "Each job of an array has a run directory of its own."
        raise SettingsError("--resume of an array needs --run-dir.", fact, str(line.flag("--run-dir", "runs/NAME-%a")))
    if path is None and request.resume:
        path = newest_run(asked.name)
    if path is not None and asked.array and INDEX not in str(path):
        path = path.with_name(f"{path.name}-{INDEX}")
    return replace(request, run_dir=path)


def _checked(target: str, asked: JobRequest, request: RunRequest, line: CommandLine) -> str:
    """Check the run; in an array, its first job. Return a note; "" if there is none.

    Raises:
        SettingsError: with everything that is wrong.
    """
    index = asked.first_index
    first = replace(
        request,
        sets=tuple(with_index(each, index) for each in request.sets),
        own=tuple(with_index(each, index) for each in request.own),
        settings_file=Path(with_index(str(request.settings_file), index)) if request.settings_file else None,
        run_dir=Path(with_index(str(request.run_dir), index)) if request.run_dir else None,
        autoresume=False,
        json=False,
    )
    script, *_, report = checked(target, asked.ranks, first, line)
    if report is None and not mentions_unisono(script):
        fact = "Each task would train alone, because the script does not use this library."
        raise SettingsError(f"{script} does not call unisono.main.", fact, "docs/start/from-ddp.md has the changes")
    if report is None:
        return f"{script} did not reach unisono.main here, so its own settings are not checked."
    if asked.requeue and not report.defaults.get("checkpoint.every") and not _saves(first):
        again = line.without("--submit").flag("--overwrite").setting("checkpoint.every=500")
        return f"Without checkpoints, a failure of a node loses the steps since the start.\n  Next: {again}"
    return ""


def _saves(request: RunRequest) -> bool:
    """Return whether the command line or a settings file may set checkpoint.every."""
    given = any(each.partition("=")[0].strip() == "checkpoint.every" for each in request.sets)
    return given or request.settings_file is not None or request.resume


def _flags(request: RunRequest) -> list[list[str]]:
    """Return the flags of the run, without those that the batch script has itself."""
    flags = [["--set", each] for each in request.sets]
    flags += [["--settings", str(request.settings_file)]] if request.settings_file is not None else []
    return flags + [["--accept-change", each] for each in request.accept_change]


def _write(path: Path, text: str, line: CommandLine, *, overwrite: bool) -> None:
    """Write the file. Raises SettingsError if that fails, or if another one is there."""
    try:
        if path.exists() and not overwrite and path.read_text(encoding="utf-8") != text:
            fact = "It differs from what would be written, perhaps because it was edited."
            do = f"{line.flag('--overwrite')}, or: {line.flag('--write', str(path.with_name(f'my_{path.name}')))}"
            raise SettingsError(f"{path} exists.", fact, do)
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        do = str(line.flag("--write", f"{Path.home() / path.name}"))
        raise SettingsError(f"Cannot write {path}.", f"{reason}.", do) from None
