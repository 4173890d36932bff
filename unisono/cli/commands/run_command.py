"""unisono run: train a recipe or a script in one or more processes, on one or more hosts."""

from __future__ import annotations

import json
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.checkpoint import manifest
from unisono.cli.inspect.watch import watched
from unisono.cli.request.host_flags import HostFlags
from unisono.cli.request.other_libraries import hint, never_joined, pointer
from unisono.cli.request.request_checks import checked
from unisono.cli.request.restarts import Hosts, RankRange, run_with_restarts, say_line
from unisono.cli.request.run_audit import audited
from unisono.cli.request.run_dir import choose_run_dir, discard_run_dir, lock_run_dir, newest_run
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.cli.request.target import script_of
from unisono.cli.start.autoresume import resumed_request
from unisono.cli.start.closing_report import leave_report
from unisono.cli.start.sigterm import ended_by_sigterm
from unisono.config import CommandLine, plural, size
from unisono.environment import DeviceAssignment, World
from unisono.errors import SettingsError, UnisonoError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome
from unisono.machine.control_group import memory_of_host, oom_kills
from unisono.machine.kernel_files import KernelFiles
from unisono.security.masking import remember


def run(
    target: str,
    /,
    *,
    ranks: Annotated[str, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = "1",
    cpu_ranks: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=WHERE)] = 0,
    ranks_per_device: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=WHERE)] = 1,
    no_dry_run: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False,
    watch: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False,
    several: HostFlags = HostFlags(),  # noqa: B008  (frozen)
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Train a recipe or a script.

    Arguments after `--` are passed to the script. `unisono run TARGET --help` lists its settings.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script.
    ranks
        Number of processes. The result is the same for any number. If a process dies, the other processes continue,
        and a replacement starts. With MIN:MAX (2:4) all processes restart from the newest checkpoint if fewer than
        MIN are left. On accelerators all processes restart when one dies, unless MIN:MAX is given.
    cpu_ranks
        Number of these processes that compute on the CPU: parameter servers first, otherwise the last ranks.
    ranks_per_device
        Number of processes that share an accelerator. They exchange through gloo, by the CPU's memory.
    no_dry_run
        Skip the dry run that checks, before the start, whether the model supports the requested parallel layout.
    watch
        Serve the growing report of the run, and print its address (unisono watch).
    """
    several = several.in_job(ranks)
    world = World() if several.words else World.current()
    ranks = several.ranks(ranks)
    flags = _flags(ranks, cpu_ranks, ranks_per_device, watch) + several.words
    if world.foreign and world.size > 1:
        return _run_here(world, target, ranks, flags, request)
    flags += ["--no-dry-run"] if no_dry_run else []
    typed = request.line("unisono", "run", target, *flags)
    request = resumed_request(request, Path(target), typed, restarts=world.restarts)
    line = request.line("unisono", "run", target, *flags)
    sizes = numbers(ranks, cpu_ranks, line)
    if ranks_per_device < 1:
        error = f"--ranks-per-device {ranks_per_device} is out of range."
        raise SettingsError(error, "At least one process uses an accelerator.", str(line.without("--ranks-per-device")))
    count = sizes.usual
    if several.is_agent:
        with ended_by_sigterm():
            return several.serve()
    return launched(
        target,
        sizes._replace(devices=DeviceAssignment(ranks_per_device=ranks_per_device)),
        request,
        line,
        cpu_ranks=cpu_ranks,
        no_dry_run=no_dry_run,
        watch=watch,
        places=lambda: nullcontext(several.places(count)),
    )


def launched(
    target: str,
    sizes: RankRange,
    request: RunRequest,
    line: CommandLine,
    *,
    cpu_ranks: int = 0,
    no_dry_run: bool = False,
    watch: bool = False,
    places: Callable[[], AbstractContextManager[Hosts | None]] = nullcontext,
) -> int:
    """Check a request, start its processes, and return the exit status when they have ended.

    Args:
        target: the name of a recipe, or the path of a script.
        sizes: the number of processes, and how they share devices.
        request: the flags of the run.
        line: the typed command, for messages.
        cpu_ranks: the number of processes that compute on the CPU.
        no_dry_run: whether the dry run is skipped.
        watch: whether the report is served.
        places: returns a block in which the hosts of the run are ready. Called if nothing is wrong with the request.
    """
    remember(dict(assignment.split("=", 1) for assignment in request.sets if "=" in assignment))
    count = sizes.usual
    script, threads, unsure, serves, _ = checked(target, count, request, line, cpu_ranks=cpu_ranks, inspect=False)
    on_cpu = (0, cpu_ranks) if serves else (count - cpu_ranks, count)
    sizes = sizes._replace(devices=sizes.devices._replace(first_on_cpu=on_cpu[0], end_on_cpu=on_cpu[1]))
    if unsure and not no_dry_run and not _fits(script, threads, sizes, request, line):
        return _stopped_before_the_start(line, request)
    is_new, started = request.run_dir is None or not request.run_dir.exists(), time.time()
    with ended_by_sigterm(), places() as where:
        run_dir = choose_run_dir(script.stem, request.run_dir, resume=request.resume, line=line)
        with (
            lock_run_dir(run_dir, line),
            audited(run_dir, say_line) as audit,
            watched(run_dir, audit) if watch else nullcontext(),
        ):
            before, kills = _start_mark(run_dir), oom_kills(KernelFiles())
            request_typed = replace(request, typed=str(line))
            outcome = run_with_restarts(
                script, request_typed, run_dir, sizes, threads=threads, hosts=where, audit=audit
            )
            joined = _start_mark(run_dir) != before
    _explain_end(script, count, line, run_dir, outcome, joined=joined, is_new=is_new)
    if outcome.failure is not None and outcome.failure.is_death and (killed := oom_kills(KernelFiles()) - kills) > 0:
        memory = memory_of_host(KernelFiles())
        print(_out_of_memory(killed, memory, request.plan_line(target, count, memory / count)), file=sys.stderr)
    if request.json:
        in_line = outcome.in_line and not _stopped_late(outcome)
        print("\n" * in_line + json.dumps(_json_of(outcome, run_dir, started)), flush=True)
    return outcome.final_status


def _explain_end(
    script: Path, count: int, line: CommandLine, run_dir: Path, outcome: RunOutcome, *, joined: bool, is_new: bool
) -> None:
    """Write the report of a run that failed, and print what the run itself could not."""
    if joined and outcome.failure is not None:
        leave_report(run_dir, lambda text: print(text, file=sys.stderr, flush=True), state="failed")
    if not joined and is_new and outcome.failure is not None and outcome.failure.is_wrong_request:
        discard_run_dir(run_dir)  # the processes refused the script's settings
    elif not joined and not outcome.stopped:
        _explain_unjoined(script, count, line, outcome)
    if _stopped_late(outcome):
        print("\n" * outcome.in_line, end="", flush=True)
        print(_how_to_resume(run_dir, line, killed=not outcome.early), file=sys.stderr)


def _out_of_memory(killed: int, memory: int, plan: CommandLine) -> str:
    """Return what to print after the kernel has killed processes of a run for memory."""
    facts = f"This machine, or the control group of the run, has {size(memory)}."
    return f"The system killed {plural(killed, 'process', 'processes')} for memory.\n  {facts}\n  Next: {plan}"


def _stopped_late(outcome: RunOutcome) -> bool:
    """Return whether the run was stopped when it could not say itself how to resume."""
    return outcome.stopped and bool(outcome.early or outcome.exit_status)


def _stopped_before_the_start(line: CommandLine, request: RunRequest) -> int:
    """Report that Ctrl-C ended the dry run, and return the exit status."""
    print(f"Stopped before the start: nothing to save.\n  Next: {line}", file=sys.stderr)
    if request.json:
        print(json.dumps({"stopped": True, "exit_status": 0}), flush=True)
    return 0


def _flags(ranks: str, cpu_ranks: int, ranks_per_device: int, watch: bool) -> list[str]:
    """Return the flags about processes that are not the default."""
    flags = ["--ranks", ranks] if ranks != "1" else []
    flags += ["--cpu-ranks", str(cpu_ranks)] if cpu_ranks else []
    flags += ["--ranks-per-device", str(ranks_per_device)] if ranks_per_device != 1 else []
    return flags + ["--watch"] * watch


def _explain_unjoined(script: Path, count: int, line: CommandLine, outcome: RunOutcome) -> None:
    """Print advice for a script that ended before it called `unisono.main`, or without calling it.

    Raises:
        SettingsError: if several processes ran it to its end, each by itself.
    """
    if outcome.failure is None and count > 1:
        raise never_joined(script, count, line)
    if advice := hint(script, line, outcome):
        print(f"\n{advice}", file=sys.stderr, flush=True)


def _run_here(world: World, target: str, ranks: str, flags: list[str], request: RunRequest) -> int:
    """Run the script in this process, which is one of those that srun or torchrun started."""
    line = request.line("unisono", "run", target, *flags)
    own = "each uses the accelerator that it sees"
    for flag, reason, do in (
        ("--cpu-ranks", own, "hide accelerators from those for the CPU: CUDA_VISIBLE_DEVICES="),
        ("--ranks-per-device", own, "unisono run can start the processes itself, on one host"),
        ("--watch", "only unisono run serves a page beside its own", "beside it: unisono watch RUN"),
    ):
        if flag in flags:
            error = f"{flag} cannot be combined with {world.launcher}."
            facts = f"{world.launcher} started the processes, and {reason}."
            raise SettingsError(error, facts, f"{line.without(flag)} ({do})")
    if ranks not in ("1", str(world.size)):
        error = f"--ranks {ranks} does not match the {world.size} processes of {world.launcher}."
        facts = f"{world.launcher} started this command {world.size} times, and each is a process of the run."
        do = f"{line.without('--ranks')} (srun -n {ranks}, or torchrun --nproc-per-node {ranks}, starts {ranks})"
        raise SettingsError(error, facts, do)
    script = script_of(target, line)
    sys.argv = [str(script), *request.arguments(request.run_dir)]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except UnisonoError as error:
        traceback.print_exception(error)  # with the script's line, as plain python would
        return error.exit_status
    advice = pointer(script, line) if world.is_main and "unisono.entrypoint" not in sys.modules else None
    if advice is not None:
        print(f"\n{advice}", file=sys.stderr, flush=True)
    return 0


def _fits(script: Path, threads: int, ranks: RankRange, request: RunRequest, line: CommandLine) -> bool:
    """Do a dry run of the script up to its loop; return False if the user stopped it.

    Other errors than a model that cannot be divided are left to the run itself.

    Raises:
        SettingsError: if the model cannot be divided as requested.
    """
    earlier = (request.run_dir or newest_run(script.stem)) if request.resume else None
    arguments = replace(request, typed=str(line)).arguments(earlier or Path(script.stem))
    outcome = local_launch.dry_run(script, arguments, ranks=ranks.usual, threads=threads, devices=ranks.devices)
    failure = outcome.failure
    if failure is not None and failure.record is not None and failure.exit_status == 2 and failure.record.problems:
        raise SettingsError.of(failure.record.problems)
    if failure is not None and failure.signal == signal.SIGALRM:
        waited = f"{script.name} took more than {local_launch.DRY_SECONDS} s to reach its loop"
        print(f"Skipped the dry run: {waited}. The run itself checks the model.", file=sys.stderr)
    return not outcome.stopped


def numbers(ranks: str, cpu_ranks: int, line: CommandLine) -> RankRange:
    """Parse `--ranks N` or `--ranks MIN:MAX`, and `--cpu-ranks N`. Raises SettingsError."""
    least, colon, most = ranks.partition(":")
    try:
        found = (int(least), int(most)) if colon else (1, int(ranks))
    except ValueError:
        facts = "--ranks takes a whole number" + (", or two as MIN:MAX." if colon else ".")
        do = str(line.flag("--ranks", "2"))
        raise SettingsError(f"Invalid value for --ranks: {ranks}", facts, do) from None
    if colon and not 1 <= found[0] <= found[1]:
        facts = "MIN is at least 1, and MAX is at least MIN."
        do = str(line.flag("--ranks", f"1:{max(1, *found)}"))
        raise SettingsError(f"Invalid value for --ranks: {ranks}", facts, do)
    if not 0 <= cpu_ranks <= max(1, found[1]):
        facts = f"Of {plural(found[1], 'process', 'processes')}, 0 to {found[1]} can compute on the CPU."
        more = line.flag("--ranks", str(cpu_ranks + 1)) if cpu_ranks > 0 else line.flag("--cpu-ranks", "1")
        raise SettingsError(f"--cpu-ranks {cpu_ranks} is out of range.", facts, str(more))
    return RankRange(*found, elastic=bool(colon))


def _start_mark(run_dir: Path) -> tuple[int, int] | None:
    """Return a value that changes when `unisono.main` starts a run there: it replaces settings.toml."""
    try:
        about = (run_dir / "settings.toml").stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def _how_to_resume(run_dir: Path, line: CommandLine, *, killed: bool) -> str:
    """Return what is saved and what to type, for a stopped run that could not say so itself."""
    saved, elsewhere = manifest.checkpoints(run_dir), manifest.storage_history(run_dir)[0]
    if not saved and elsewhere is not None:
        again = line.flag("--run-dir", str(run_dir)).flag("--resume")
        return f"Stopped; checkpoints are in {elsewhere}.\n  Next: {again}"
    if not saved:
        what = "Killed before anything was saved." if killed else "Stopped before the first step: nothing to save."
        return f"{what}\n  Next: {line}"
    newest = saved[0][1].name
    what = f"Killed; the newest checkpoint is {newest}." if killed else f"Stopped outside the loop; {newest} is saved."
    return f"{what}\n  Next: {line.flag('--run-dir', str(run_dir)).flag('--resume')}"


def _json_of(outcome: RunOutcome, run_dir: Path, started: float) -> dict[str, Any]:
    """Return the run's own result, or the error, for --json."""
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
