"""`unisono.main(main, Settings)`: what a training script calls. The way into a run, and out of it again.

The same file runs as `python entrypoint.py`, under `unisono run` and under torchrun: this function reads the command
line, checks everything, joins the other processes, finds the checkpoint of a resume, and hands the script its Run.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from unisono.checkpoint import manifest
from unisono.checkpoint.load import Checkpoint, localize, metadata_of, newest, open_checkpoint
from unisono.checkpoint.storage import prepare_storage
from unisono.cli.request.autoresume import job_mark, resumed_request
from unisono.cli.request.device_checks import problems_here
from unisono.cli.request.launcher_flags import without_local_rank
from unisono.cli.request.run_dir import (
    choose_run_dir,
    lock_run_dir,
    newest_run,
    not_writable,
    problems_of_run_dir,
    write,
)
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.start_message import print_start
from unisono.cli.request.target import problems_of_train, recipes
from unisono.config import (
    ENVIRONMENT,
    CommandLine,
    LoadedSettings,
    Settings,
    flatten,
    gather,
    provenance_lines,
    result_settings,
)
from unisono.config.conflicts import problems_on_mixed_devices
from unisono.config.mesh_shape import fill, layout, wanted
from unisono.config.validate import examine
from unisono.data.rng import seed_everything
from unisono.distributed.existing_group import take_over
from unisono.distributed.init import device_kind
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World, in_a_kernel, variables
from unisono.errors import Problem, RunStopped, SettingsError, UnisonoError, UnreachableHostError, WorldError
from unisono.launcher import failure_record
from unisono.monitor import console, summary
from unisono.monitor.status_thread import StatusThread
from unisono.parallel.compiler_determinism import name_recompile_limit
from unisono.plan.rng_keys import SCRIPT, mix
from unisono.train import lifecycle
from unisono.train.context import Inspection, RunContext, build_context
from unisono.train.guarantees.promise import result as result_of
from unisono.train.guarantees.run_identity import agree, compare, describe_environment
from unisono.train.guarantees.user_errors import explain_dtensor_errors
from unisono.train.loop import choose_loop
from unisono.train.run import Run

S = TypeVar("S", bound=Settings)


def main(train: Callable[[Run[S]], None], settings: type[S] = Settings) -> None:  # type: ignore[assignment]
    """Run `train(run)` with the settings that the command line gives, and leave the run directory complete.

    train     the script's own function: models, optimizer, the loop
    settings  its class of settings (a frozen dataclass that inherits from unisono.Settings)

    Ends the process with status 2 for a wrong request, with 1 where the launcher's variables make no sense, and lets
    other errors go up, as any script would. After Ctrl-C or SIGTERM it returns once the state is saved.
    """
    if in_a_kernel():
        true = "It reads the command line, which is the kernel's here."
        do = "unisono.launch(main, Settings(steps=100), ranks=2) (docs/start/notebooks.md)"
        raise SettingsError("unisono.main was called in a notebook.", true, do)
    try:
        world = take_over(World.current())
    except WorldError as error:  # nothing of ours has been at work: no traceback tells more
        if failure_record.path() is not None:  # our launcher says it
            raise
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    try:
        with console.broken_pipe_safe():
            _main(train, settings, world)
        if "torch.distributed.fsdp" in sys.modules:
            gc.collect()  # shards hold their group in cycles; one that lives until the interpreter ends may abort it
        if world.dry:
            sys.exit()  # what the script does with a run's results is not to be done before there are any
    except UnisonoError as error:
        if (
            isinstance(error, UnreachableHostError) and world.launcher != "unisono"
        ):  # the same for all processes of a host
            if world.local_rank == 0:
                print(error, file=sys.stderr)
            sys.exit(error.exit_status)
        if world.launcher == "unisono" or error.exit_status != 2:
            raise  # the launcher says it, last; or Python does, below its traceback
        if world.is_main:
            print(f"{error}", file=sys.stderr)
        sys.exit(error.exit_status)


def _main(train: Callable[[Run[S]], None], cls: type[S], world: World) -> None:
    script = Path(sys.argv[0])
    request = RunRequest.parse(without_local_rank(sys.argv[1:], world), cls, script.name)
    line = StartRequest(script, request, world).line()
    request = resumed_request(request, script.stem, line, restarts=world.restarts)
    asked = StartRequest(script, request, world)
    with chdir(world.folder):  # the script may be elsewhere by now
        loaded = asked.settings(cls, train)
    torch.set_num_threads(loaded.settings.threads)
    if world.dry and request.describe is not None:
        return  # only the settings are to be checked
    if world.dry:
        from unisono.train.diagnostics.dry_run import dry_run

        with _own_arguments(asked.request):
            dry_run(train, loaded.settings, world)
        return
    divided = loaded.settings.parallel.shard != 1
    with StatusThread(loaded.settings.watchdog, world), join(world, divided=divided) as group, ExitStack() as kept:
        shown, path, resumes = _on_main(group, lambda: (*asked.run_dir(kept), request.resume))
        run_dir = Path(path)  # absolute, because the script may change its folder; people see what they typed
        request = replace(asked.request, run_dir=Path(shown), resume=resumes)
        asked = replace(asked, request=request)
        facts = describe_environment(group.device)
        differences = agree(group, facts)
        if group.mixed and (problems := problems_on_mixed_devices(flatten(loaded.settings), asked.line())):
            raise SettingsError.of(problems)
        kinds = group.all_gather_object(device_kind(group.device))
        if group.mixed:  # whoever speaks for all now or later
            facts["device"] = " and ".join(sorted(set(group.all_gather_object(facts["device"]))))
        parallel = loaded.settings.parallel
        axes = fill(wanted(parallel), group.size)
        assert axes is not None, "checked with the settings"
        identity = {**result_settings(loaded.settings), **{name: facts[name] for name in ENVIRONMENT}}
        identity["layout"] = layout(parallel, axes)
        console.start(group.rank if world.number is None else world.number, world.size)
        if not world.joins:  # who joins later finds all that
            where = _on_main(group, lambda: asked.save_in(loaded.settings.checkpoint.dir, run_dir, kept))
            if world.local_rank == 0:
                manifest.record_storage(run_dir, where)  # each host has a run directory, if they share none
        resumes = request.resume and not world.joins  # who joins later is told by the others
        found = _on_main(group, lambda: asked.resume_from(run_dir, identity)) if resumes else None
        resumed = open_checkpoint(localize(Path(found), run_dir)) if found else None
        if not world.joins:
            _on_main(group, lambda: asked.write_down(run_dir, loaded, {**facts, "differences": differences}))
        color = world.terminal and not variables(("NO_COLOR",))
        loop = choose_loop(loaded.settings, group)
        context = build_context(
            loaded.settings,
            loop,
            world=world,
            run_dir=run_dir,
            output=sys.stdout,
            identity=identity,
            resumed=resumed,
            changes=_changes(resumed, identity, request),
            differences=differences,
            accepted=request.accept_change,
            color=color,
            inspection=_inspection(request.trace, group.rank) if request.trace else None,
        )
        context.on_lead = partial(asked.lead, run_dir, kept, patience=HANDED_ON_SECONDS)
        run: Run[S] = Run(context, loop)
        print_start(context, request, resumed, kinds, fewer=loaded.sources["virtual_ranks"] == "default")
        with _signals(context), _own_arguments(request), _planted(request.faults, context):
            _train(train, run, asked, color)


def _train(train: Callable[[Run[S]], None], run: Run[S], asked: StartRequest, color: bool) -> None:
    context = run.context
    seed_everything(mix(run.settings.seed, SCRIPT))  # for what a script draws before its loop: the same everywhere
    try:
        with explain_dtensor_errors(run.settings.parallel), name_recompile_limit():
            train(run)
        lifecycle.finish(context)
    except RunStopped:
        pass
    except Exception as error:
        for failed in context.hooks.failed:
            failed(error)
        raise
    finally:
        lifecycle.close(context)
        console.stop()
    if context.waits:  # it was to join the others, and they were done before
        return
    result = result_of(context)
    ended = summary.read_result(run.dir) if lifecycle.was_finished_before(context) else None
    if ended is not None:  # it was over already: nothing was computed, so nothing is written
        result = ended
        steps_done = context.progress.steps_done
        more = asked.line().flag("--resume").setting(f"steps={2 * steps_done}")
        console.print_line(f"This run was finished before, after {steps_done} steps. To go on: {more}")
    context.collective.run("the run's end", lambda: _leave_result(context, result, new=ended is None))
    if context.group.rank == 0:  # another one than before, if the main process has died
        if not asked.request.json:
            plain = not (sys.stdout.encoding or "").lower().startswith("utf")
            lines = summary.closing_lines(
                result,
                run.dir,
                shown=asked.request.run_dir,
                again=str(asked.line().flag("--resume")),
                color=color,
                ascii_only=plain,
            )
            print("\n".join(["", *lines]), flush=True)
        elif context.world.launcher != "unisono":
            print(json.dumps(result), flush=True)


def _leave_result(context: RunContext, result: dict[str, Any], *, new: bool) -> None:
    if context.group.rank == 0 and new:
        write(context.run_dir / "result.json", json.dumps(result, indent=1) + "\n")


@dataclass(frozen=True)
class StartRequest:
    """What was asked for, and the decisions about it that one process takes for all."""

    script: Path
    request: RunRequest
    world: World

    def line(self) -> CommandLine:
        """The command line that asked for this, whoever started the process."""
        if self.world.launcher in ("srun", "mpirun"):
            return self.request.line(self.world.launcher, "-n", str(self.world.size), "python", str(self.script))
        if self.world.launcher != "unisono":
            line = self.request.line("python", str(self.script))
            all_here = 1 < self.world.size == self.world.local_size
            return line.in_processes(self.world.size) if all_here else line
        ranks = ["--ranks", str(self.world.size)] if self.world.size > 1 else []
        ranks += ["--cpu-ranks", str(self.world.cpu_ranks)] if self.world.cpu_ranks else []
        target = next((name for name, path in recipes().items() if path == self.script), str(self.script))
        return self.request.line("unisono", "run", target, *ranks)

    def settings(self, cls: type[S], train: Callable[[Run[S]], None]) -> LoadedSettings[S]:
        """The settings. Raises SettingsError with everything that is wrong with the request, or with `train`."""
        request, stem = self.request, self.script.stem
        line = CommandLine(tuple(shlex.split(request.typed))) if request.typed else self.line()
        gathered = gather(
            cls,
            file=request.settings_file,
            sets=request.sets,
            earlier=request.earlier(request.run_dir or newest_run(stem)),
            line=line,
        )
        loaded, problems = examine(gathered, self.world.size)
        if loaded is not None and not problems:
            problems += problems_here(loaded.settings, self.world.size, line)
        if self.world.launcher == "python":  # others have several processes, and one of them will look
            problems += problems_of_run_dir(stem, request.run_dir, resume=request.resume, line=line)
        problems += request.problems_of_accepted((), line) + request.problems_of_faults(line)
        problems += problems_of_train(self.script, train)
        if problems or loaded is None:
            raise SettingsError.of(problems)
        return loaded

    def run_dir(self, kept: ExitStack) -> tuple[str, str]:
        """The run directory as people call it, and its absolute path. It is ours until `kept` is closed."""
        path, request = self.request.run_dir, self.request
        if self.world.launcher != "unisono":  # our launcher chose it, and holds it
            with chdir(self.world.folder):
                path = choose_run_dir(self.script.stem, path, resume=request.resume, line=self.line())
                kept.enter_context(lock_run_dir(path, self.line()))
        assert path is not None
        return str(path), str(Path(self.world.folder, path))

    def write_down(self, run_dir: Path, loaded: LoadedSettings[Any], facts: dict[str, Any]) -> None:
        """What is computed here, and on what. Raises SettingsError where that cannot be written, as on a full disk."""
        started: dict[str, Any] = {"started": time.strftime("%Y-%m-%d %H:%M:%S%z"), "command": str(self.line())}
        started |= {"script": str(Path(self.world.folder, self.script).resolve()), "arguments": list(self.request.own)}
        started |= {"folder": self.world.folder, **job_mark(self.request)}
        try:
            write(run_dir / "settings.toml", provenance_lines(loaded.settings, loaded.sources))
            write(run_dir / "environment.json", json.dumps({**started, **facts}, indent=1) + "\n")
        except OSError as error:
            shown = self.request.run_dir or run_dir
            raise SettingsError.of([not_writable(shown, error.strerror or str(error), self.line())]) from None

    def save_in(self, where: str | None, run_dir: Path, kept: ExitStack) -> str | None:
        """Where checkpoints are kept from now on, as text; None: in the run directory. This process writes them.
        Raises SettingsError."""
        if where is not None and "://" not in where:
            where = str(Path(self.world.folder, where))
        prepare_storage(run_dir, where, resume=self.request.resume)
        self.lead(run_dir, kept)
        return manifest.storage_history(run_dir)[0]

    def lead(self, run_dir: Path, kept: ExitStack, *, patience: float = 0.0) -> None:
        """This process writes the checkpoints from now on: their folder, where it is not in the run directory, is ours
        until `kept` is closed. Raises SettingsError where another run has it, and keeps it for so many seconds."""
        where = manifest.storage_history(run_dir)[0]
        if where is None or "://" in where:
            return
        Path(where).mkdir(parents=True, exist_ok=True)
        try:
            kept.enter_context(lock_run_dir(Path(where), self.line(), patience=patience))
        except SettingsError as error:
            another = self.line().setting("checkpoint.dir=" + shlex.quote(f"{where}-2"))
            raise SettingsError(f"checkpoint.dir = {where}", error.problems[0].true, str(another)) from None

    def resume_from(self, run_dir: Path, identity: dict[str, Any]) -> str | None:
        """The checkpoint to go on from; None: there is none yet. Raises SettingsError if it does not fit."""
        path = newest(run_dir, console.print_line)
        before = metadata_of(path)["identity"] if path is not None else {}
        fields = {*before, *identity, "length"} - {*TOLD}
        problems = self.request.problems_of_accepted(fields, self.line())
        known = {name: value for name, value in before.items() if name not in CHANGING}
        if path is not None:
            now = {name: value for name, value in identity.items() if name not in CHANGING}
            problems += compare(known, now, list(self.request.accept_change), str(self.line()))
        if problems:
            raise SettingsError.of(problems)
        if path is None:
            console.print_line(f"There is no checkpoint in {self.request.run_dir} yet: starting at step 0.")
        return str(path) if path is not None else None


def _changes(resumed: Checkpoint | None, identity: dict[str, Any], request: RunRequest) -> list[dict[str, Any]]:
    """The changes of the mathematics that this resume accepts, as the promise will tell them. Another layout need not
    be accepted: it is another way to the same, to rounding."""
    if resumed is None:
        return []
    before = resumed.about["identity"]
    return [
        {"step": resumed.steps, "field": name, "from": before.get(name), "to": identity.get(name)}
        for name in (*request.accept_change, "layout")
        if name not in KNOWN_LATER and before.get(name) != identity.get(name)
    ]


HANDED_ON_SECONDS = 5.0
"""A process that is dying lets go of its locks within a moment."""

KNOWN_LATER = ("length", "ties", "own exchange")
"""Parts of a run's identity that follow from its data, its model and its script: the run compares them."""

TOLD = ("layout", "ties")
"""Parts that need not be accepted when they change: the promise tells of it."""

CHANGING = (*KNOWN_LATER, "layout")
"""Parts of a run's identity that are compared elsewhere."""


INSPECTIONS = {
    "evidence": "unisono.train.diagnostics.dump:dump_run",
    "replay": "unisono.train.diagnostics.replay_step:replay_run",
    "audit": "unisono.train.diagnostics.audited_run:audit_run",
}
"""What a command watches in a run, by the first word of its flag --trace. For `unisono check` there is none."""


def _inspection(request: str, rank: int) -> Inspection:
    """Build the inspection that the flag --trace requests."""
    kind, _, words = request.partition(":")
    module, name = INSPECTIONS.get(kind, "unisono.train.diagnostics.trace:trace_run").split(":")
    build: Callable[[str, int], Inspection] = getattr(importlib.import_module(module), name)
    return build(words if kind in INSPECTIONS else request, rank)


def _on_main(group: ProcessGroup, decide: Callable[[], Any]) -> Any:
    """What the main process decides, on every process; its error is raised on all of them."""
    decided: Any = None
    error: UnisonoError | None = None
    if group.is_main:
        try:
            decided = decide()
        except UnisonoError as caught:
            error = caught
    told = group.broadcast_object(
        {"value": decided, "problems": error.problems if error else [], "kind": type(error).__name__}
    )
    if told["problems"]:
        from unisono import errors

        kind: type[UnisonoError] = getattr(errors, told["kind"])
        raise kind.of([Problem(*p) for p in told["problems"]])
    return told["value"]


def _planted(faults: tuple[str, ...], context: RunContext) -> AbstractContextManager[None]:
    """Return a block in which faults are injected, if any are (unisono doctor --rehearse, and tests)."""
    if not faults:
        return nullcontext()
    from unisono.testing.fault_spec import planted

    number = context.world.number
    return planted(faults, context.group.rank if number is None else number, context.run_dir / "faults")


@contextmanager
def _own_arguments(request: RunRequest) -> Iterator[None]:
    """The script sees its own arguments only, what came after `--`: its argparse would not know ours."""
    ours = sys.argv
    sys.argv = [*ours[:1], *request.own]
    try:
        yield
    finally:
        sys.argv = ours


@contextmanager
def _signals(context: RunContext) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the run to save and leave after the step under way; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def heard(number: int, frame: FrameType | None) -> None:
        for s, handler in before.items():
            signal.signal(s, handler)
        is_main = context.group.rank == 0 and not context.waits
        if is_main and context.world.launcher != "unisono":  # which has said it
            words = "Stopping: the current step is finished and saved. A second Ctrl-C kills all processes.\n"
            with suppress(OSError):  # not print: what it was called into may be printing itself
                os.write(2, ("\n" * context.world.terminal + words).encode())
        lifecycle.leave(context)

    for s in (signal.SIGINT, signal.SIGTERM):
        before[s] = signal.signal(s, heard)
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
