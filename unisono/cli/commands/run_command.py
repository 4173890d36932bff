"""unisono run: train a recipe or a script, in as many processes as asked."""

from __future__ import annotations

import json
import runpy
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.checkpoint import manifest
from unisono.cli.request.autoresume import resumed_request
from unisono.cli.request.other_libraries import hint, never_joined, pointer
from unisono.cli.request.request_checks import checked
from unisono.cli.request.restarts import RankRange, run_with_restarts
from unisono.cli.request.run_dir import choose_run_dir, discard_run_dir, lock_run_dir, newest_run
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.cli.request.target import script_of
from unisono.config import (
    CommandLine,
)
from unisono.environment import World
from unisono.errors import SettingsError, UnisonoError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome


def run(
    target: str,
    /,
    *,
    ranks: Annotated[str, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = "1",
    cpu_ranks: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=WHERE)] = 0,
    no_dry_run: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Train a recipe or a script.

    Everything that is wrong with the request is told before any process starts. What comes after `--` is the script's.

    Parameters
    ----------
    target
        A recipe's name, or the path to a script.
    ranks
        How many processes. The result is the same for any number. If one dies, the others go on, and another is
        started in its place. With MIN:MAX (2:4) all begin again from the newest checkpoint if fewer than MIN are left.
        On accelerators they do so at every death, unless MIN:MAX is said.
    cpu_ranks
        So many of these processes compute on the CPU, beside those on accelerators: the servers, if there are any,
        and the last ones.
    no_dry_run
        Do not go through the script to its loop, before the start, to see whether its model can be divided as asked.
    """
    world = World.current()
    if world.foreign and world.size > 1:
        return _one_of(world, target, ranks, cpu_ranks, request)
    flags = ["--ranks", ranks] if ranks != "1" else []
    flags += ["--cpu-ranks", str(cpu_ranks)] if cpu_ranks else []
    flags += ["--no-dry-run"] if no_dry_run else []
    typed = request.line("unisono", "run", target, *flags)
    request = resumed_request(request, Path(target).stem, typed, restarts=world.restarts)
    line = request.line("unisono", "run", target, *flags)
    asked = numbers(ranks, cpu_ranks, line)
    count = asked.usual
    script, threads, unsure, serves, _ = checked(target, count, request, line, cpu_ranks=cpu_ranks, inspect=False)
    asked = asked._replace(on_cpu=(0, cpu_ranks) if serves else (count - cpu_ranks, count))
    if unsure and not no_dry_run and not _fits(script, threads, asked, request, line):
        print(f"Stopped before its start: nothing to save.\n  Next: {line}", file=sys.stderr)
        if request.json:
            print(json.dumps({"stopped": True, "exit_status": 0}), flush=True)
        return 0
    is_new = request.run_dir is None or not request.run_dir.exists()
    run_dir = choose_run_dir(script.stem, request.run_dir, resume=request.resume, line=line)
    started = time.time()
    with lock_run_dir(run_dir, line):
        before = _mark(run_dir)
        outcome = run_with_restarts(script, replace(request, typed=str(line)), run_dir, asked, threads=threads)
        joined = _mark(run_dir) != before
    if not joined and outcome.exit_status == 2 and is_new and not request.resume:
        discard_run_dir(run_dir)  # the script's own settings were wrong: nothing was computed
    elif not joined and not outcome.stopped:
        _say_why_alone(script, count, line, outcome)
    if outcome.stopped and (outcome.early or outcome.exit_status):  # else the run itself has said how to go on
        print("\n" * outcome.in_line, end="", flush=True)
        print(_how_to_go_on(run_dir, line, killed=not outcome.early), file=sys.stderr)
        outcome = outcome._replace(in_line=False)
    if request.json:
        print("\n" * outcome.in_line + json.dumps(_told(outcome, run_dir, started)), flush=True)
    return outcome.exit_status


def _say_why_alone(script: Path, count: int, line: CommandLine, outcome: RunOutcome) -> None:
    """Say what to do about a script that ended before it called `unisono.main`, or without it. Raises SettingsError if
    several processes have run it to its end, each alone."""
    if outcome.failure is None and count > 1:
        raise never_joined(script, count, line)
    if told := hint(script, line, outcome):
        print(f"\n{told}", file=sys.stderr, flush=True)


def _one_of(world: World, target: str, ranks: str, cpu_ranks: int, request: RunRequest) -> int:
    """srun or torchrun has started this command so many times: then each is one of the processes."""
    flags = ["--ranks", ranks] if ranks != "1" else []
    line = request.line("unisono", "run", target, *flags, *(["--cpu-ranks", str(cpu_ranks)] if cpu_ranks else []))
    if cpu_ranks:
        true = f"{world.launcher} has started the processes, and each takes the accelerator that it sees."
        do = f"{line.without('--cpu-ranks')} (hide accelerators from those for the CPU: CUDA_VISIBLE_DEVICES=)"
        raise SettingsError(str(line), true, do)
    if ranks not in ("1", str(world.size)):
        true = f"{world.launcher} has started {world.size} of this command, and each is a process of the run."
        do = f"{line.without('--ranks')} (srun -n {ranks}, or torchrun --nproc-per-node {ranks}, starts so many)"
        raise SettingsError(str(line), true, do)
    script = script_of(target, line)
    sys.argv = [str(script), *request.arguments(request.run_dir)]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except UnisonoError as error:
        traceback.print_exception(error)  # with the script's line, as plain python would
        return error.exit_status
    told = pointer(script, line) if world.is_main and "unisono.entrypoint" not in sys.modules else None
    if told is not None:
        print(f"\n{told}", file=sys.stderr, flush=True)
    return 0


def _fits(script: Path, threads: int, ranks: RankRange, request: RunRequest, line: CommandLine) -> bool:
    """Can the script's model be laid over so many processes as is asked? False: somebody said stop meanwhile.

    Raises SettingsError if it cannot. What else goes wrong there, the run will come to as well, and tell.
    """
    earlier = (request.run_dir or newest_run(script.stem)) if request.resume else None
    arguments = replace(request, typed=str(line)).arguments(earlier or Path(script.stem))
    outcome = local_launch.dry_run(script, arguments, ranks=ranks.usual, threads=threads, on_cpu=ranks.on_cpu)
    failure = outcome.failure
    if failure is not None and failure.record is not None and failure.exit_status == 2 and failure.record.problems:
        raise SettingsError.of(failure.record.problems)
    if failure is not None and failure.signal == signal.SIGALRM:
        waited = f"{script.name} took more than {local_launch.DRY_SECONDS} s to come to its loop"
        print(f"Its model was not looked at before the start: {waited}. The run will do that.", file=sys.stderr)
    return not outcome.stopped


def numbers(ranks: str, cpu_ranks: int, line: CommandLine) -> RankRange:
    """What `--ranks N` or `--ranks MIN:MAX` asks for, and `--cpu-ranks N`."""
    least, colon, most = ranks.partition(":")
    try:
        found = (int(least), int(most)) if colon else (1, int(ranks))
    except ValueError:
        true = f"--ranks takes a whole number, which {ranks!r} is not"
        true += "." if not colon else "; or two of them with a colon in between."
        raise SettingsError(str(line), true, str(line.flag("--ranks", "2"))) from None
    if colon and not 1 <= found[0] <= found[1]:
        true = "The first number is the fewest processes, at least 1, and the second the usual number of them."
        raise SettingsError(str(line), true, str(line.flag("--ranks", f"1:{max(1, *found)}")))
    if not 0 <= cpu_ranks <= max(1, found[1]):
        true = f"It is how many of --ranks {found[1]} compute on the CPU, 0 to {found[1]}."
        more = line.flag("--ranks", str(cpu_ranks + 1)) if cpu_ranks > 0 else line.flag("--cpu-ranks", "1")
        raise SettingsError(f"--cpu-ranks {cpu_ranks}", true, str(more))
    return RankRange(*found, elastic=bool(colon))


def _mark(run_dir: Path) -> tuple[int, int] | None:
    """Another one once `unisono.main` has begun: it writes this file anew."""
    try:
        about = (run_dir / "settings.toml").stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def _how_to_go_on(run_dir: Path, line: CommandLine, *, killed: bool) -> str:
    """A run was stopped that could not tell itself what is saved of it, and what to type."""
    saved, elsewhere = manifest.checkpoints(run_dir), manifest.storage_history(run_dir)[0]
    if not saved and elsewhere is not None:
        again = line.flag("--run-dir", str(run_dir)).flag("--resume")
        return f"Stopped; what is saved is in {elsewhere}.\n  Next: {again}"
    if not saved:
        what = "Killed before anything was saved." if killed else "Stopped before its first step: nothing to save."
        return f"{what}\n  Next: {line}"
    newest = saved[0][1].name
    what = f"Killed before all was saved; {newest} is." if killed else f"Stopped outside its loop; {newest} is saved."
    return f"{what}\n  Next: {line.flag('--run-dir', str(run_dir)).flag('--resume')}"


def _told(outcome: RunOutcome, run_dir: Path, started: float) -> dict[str, Any]:
    """How it ended, for programs: the run's own result, or the error."""
    if outcome.failure is not None:
        record = outcome.failure.record
        return {
            "error": {
                "exit_status": outcome.exit_status,
                "rank": outcome.failure.rank,
                "signal": outcome.failure.signal or None,
                "type": record.kind if record else None,
                "message": record.message if record else str(outcome.failure),
                "traceback": record.traceback if record else None,
                "problems": [problem._asdict() for problem in record.problems] if record else [],
                "run_dir": str(run_dir),
                "log": str(outcome.failure.log),
            }
        }
    result = run_dir / "result.json"
    if result.exists() and result.stat().st_mtime >= started:
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content
    return {"stopped": outcome.stopped, "exit_status": outcome.exit_status, "run_dir": str(run_dir)}
