"""`unisono.main(main, Settings)`, the function that a training script calls.

The same script runs with plain python, `unisono run` and torchrun. This function parses the command line, validates the
settings, joins the process group, opens the checkpoint of a resume, calls the script's function with a Run, and writes
the result.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, chdir, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from unisono.checkpoint import manifest
from unisono.checkpoint.load import localize, open_checkpoint
from unisono.cli.request.launcher_flags import without_local_rank
from unisono.cli.request.run_dir import ARGUMENTS, write
from unisono.cli.request.run_options import RunRequest
from unisono.cli.start.autoresume import resumed_request
from unisono.cli.start.closing_report import leave_report
from unisono.cli.start.start_message import ProcessPlace, print_start
from unisono.cli.start.start_request import StartRequest, accepted_changes
from unisono.config import (
    ENVIRONMENT,
    Settings,
    flatten,
    result_settings,
)
from unisono.config.conflicts import problems_on_mixed_devices, problems_on_shared_devices
from unisono.config.mesh_shape import fill, layout, wanted
from unisono.data.rng import seed_everything
from unisono.distributed.existing_group import take_over
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World, in_a_kernel, remember_secrets, wants_color
from unisono.errors import Problem, RunStopped, SettingsError, UnisonoError, UnreachableHostError, WorldError
from unisono.launcher import failure_record, rank_logging
from unisono.monitor import console
from unisono.monitor.status_thread import StatusThread
from unisono.parallel.compiler_determinism import name_recompile_limit
from unisono.parallel.speed.attention_backend import name_missing_backend
from unisono.plan.rng_keys import SCRIPT, mix
from unisono.prediction.batch_inference import ScriptPredict
from unisono.report.closing_lines import WIDTH, closing_lines
from unisono.report.findings.evidence import Finding
from unisono.report.findings.find_all import find_all
from unisono.report.result_file import read_result
from unisono.report.run_files import RunFiles
from unisono.security.file_modes import make_closed
from unisono.security.masking import mask_words
from unisono.train import lifecycle
from unisono.train.context import Inspection, RunContext, build_context
from unisono.train.diagnostics.out_of_memory import explain_out_of_memory
from unisono.train.guarantees.deterministic_kernels import name_unrepeatable_operator
from unisono.train.guarantees.run_identity import RUN, agree, describe_environment
from unisono.train.guarantees.user_errors import explain_dtensor_errors
from unisono.train.loop import choose_loop
from unisono.train.run import Run
from unisono.train.state.run_result import result as result_of

S = TypeVar("S", bound=Settings)


def main(
    train: Callable[[Run[S]], None],
    settings: type[S] = Settings,  # type: ignore[assignment]
    *,
    predict: ScriptPredict | None = None,
) -> None:
    """Call `train(run)` with the settings of the command line, and write the results to the run directory.

    After Ctrl-C or SIGTERM, it returns when the state is saved.

    Args:
        train: the script's function, which builds models and optimizers, and runs the loop.
        settings: the settings class, a frozen dataclass that inherits from unisono.Settings.
        predict: for `unisono predict`: predict(settings, model, path) -> unisono.Prediction.

    Raises:
        SystemExit: with status 2 for a wrong request, and 1 if the launcher's environment variables are inconsistent.
        Exception: any exception of `train`.
    """
    remember_secrets()
    if in_a_kernel():
        facts = "unisono.main reads the command line, which belongs to the kernel here."
        do = "unisono.launch(main, Settings(steps=100), ranks=2) (docs/start/notebooks.md)"
        raise SettingsError("unisono.main was called in a notebook.", facts, do)
    try:
        world = take_over(World.current())
    except WorldError as error:  # a traceback would not add anything
        if failure_record.path() is not None:  # our launcher reports it
            raise
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    try:
        with console.broken_pipe_safe():
            require_class(settings)
            _main(train, settings, world, predict)
        if "torch.distributed.fsdp" in sys.modules:
            gc.collect()  # shards refer to their group in cycles, and a group that outlives the interpreter may abort
        if world.dry:
            sys.exit()  # code of the script after unisono.main may need results
    except UnisonoError as error:
        if isinstance(error, UnreachableHostError) and world.launcher != "unisono":
            if world.local_rank == 0:  # the message is the same for all processes of a host
                print(error, file=sys.stderr)
            sys.exit(error.exit_status)
        if world.launcher == "unisono" or error.exit_status != 2:
            raise  # the launcher prints the message last, or Python does after the traceback
        if world.is_main:
            print(f"{error}", file=sys.stderr)
        sys.exit(error.exit_status)


def require_class(settings: object) -> None:
    """Raise SettingsError if `settings` is not a subclass of unisono.Settings."""
    if not (isinstance(settings, type) and issubclass(settings, Settings)):
        found = (
            f"class {settings.__name__}" if isinstance(settings, type) else f"an object of {type(settings).__name__}"
        )
        raise SettingsError(
            "unisono.main needs a class of settings.",
            f"The second argument must be a subclass of unisono.Settings; it is {found}.",
            "unisono.main(main, Settings), with the defaults in the class: batch: int = 64.",
        )


def _main(train: Callable[[Run[S]], None], cls: type[S], world: World, predict: ScriptPredict | None) -> None:
    script = Path(sys.argv[0])
    request = RunRequest.parse(without_local_rank(sys.argv[1:], world), cls, script.name)
    line = StartRequest(script, request, world).line()
    with chdir(world.folder):  # the script may have changed it
        request = resumed_request(request, script, line, restarts=world.restarts)
        start = StartRequest(script, request, world)
        loaded = start.settings(cls, train)
    torch.set_num_threads(loaded.settings.threads)
    if world.dry and request.describe is not None:
        return  # only the settings are checked
    if world.dry or request.trace.startswith(FAKE):
        _run_dry(train, loaded.settings, world, start.request)
        return
    settings = loaded.settings
    joining = join(world, divided=settings.parallel.shard != 1, backend=settings.backend, secure=settings.secure)
    watch = StatusThread(settings.watchdog, world, encrypted=settings.secure.transport == "tls")
    with watch, joining as group, ExitStack() as kept:
        # Other hosts may not have the run directory, and with it the arguments of the script.
        shown, path, resumes, own = _on_main(group, lambda: (*start.run_dir(kept), request.resume, request.own))
        run_dir = Path(path)  # absolute, because the script may change its working directory
        request = replace(start.request, run_dir=Path(shown), resume=resumes, own=tuple(own))
        start = replace(start, request=request)
        facts = describe_environment(group.device)
        facts["differences"] = differences = agree(group, facts)
        problems = problems_on_mixed_devices(flatten(loaded.settings), start.line()) if group.mixed else []
        if group.staged and not group.mixed:
            problems = problems_on_shared_devices(flatten(loaded.settings), start.line())
        if problems:
            raise SettingsError.of(problems)
        places = ProcessPlace.of_all(group, world.host)
        if group.mixed:  # the main process may change
            facts["device"] = " and ".join(sorted(set(group.all_gather_object(facts["device"]))))
        axes = fill(wanted(settings.parallel), group.size)
        assert axes is not None, "checked with the settings"
        identity = {**result_settings(loaded.settings), **{name: facts[name] for name in ENVIRONMENT}}
        identity |= {"layout": layout(settings.parallel, axes), ARGUMENTS: mask_words(request.own)}
        _start_output(group.rank if world.number is None else world.number, world, run_dir)
        if not world.joins:  # a replacement finds all of this
            where = _on_main(group, lambda: start.save_in(loaded.settings.checkpoint.dir, run_dir, kept))
            if world.local_rank == 0:
                manifest.record_storage(run_dir, where)
        resumed, accept = None, start.accept(loaded.settings.secure.trust)
        if not world.joins:  # a replacement gets its state from its peers
            found, identity[RUN] = _on_main(group, lambda: start.begin(run_dir, identity, accept))
            resumed = open_checkpoint(localize(Path(found), run_dir, accept)) if found else None
            _on_main(group, lambda: start.write_files(run_dir, loaded, identity[RUN], facts))
        start.share(run_dir, loaded.settings.secure.share, kept)
        loop = choose_loop(loaded.settings, group)
        context = build_context(
            loaded.settings,
            loop,
            world=world,
            run_dir=run_dir,
            output=sys.stdout,
            identity=identity,
            resumed=resumed,
            changes=accepted_changes(resumed, identity, request),
            differences=differences,
            accepted=request.accept_change,
            color=wants_color(world.terminal),
            inspection=_inspection(request.trace, group.rank, predict) if request.trace else None,
        )
        context.on_lead = partial(start.lead, run_dir, kept, patience=LOCK_SECONDS)
        run: Run[S] = Run(context, loop)
        print_start(context, request, resumed, places, fewer=loaded.sources["virtual_ranks"] == "default")
        with _signals(context), _own_arguments(request), _inject(request.faults, context):
            _train(train, run, start)


def _run_dry(train: Callable[[Run[S]], None], settings: S, world: World, request: RunRequest) -> None:
    """Execute the script up to its loop, or with a step of fake tensors (`unisono plan`)."""
    with _own_arguments(request):
        if world.dry:
            from unisono.train.diagnostics.dry_run import dry_run

            dry_run(train, settings, world)
        else:
            from unisono.train.costs.fake_step import count_fake_step

            count_fake_step(train, settings, world, Path(request.trace.removeprefix(FAKE)))


def _start_output(rank: int, world: World, run_dir: Path) -> None:
    """Print messages, records and warnings as this rank from now on."""
    make_closed(run_dir)  # hosts without a shared file system have one each
    console.start(rank, world.size)
    rank_logging.start(rank, run_dir / "log" / f"rank-{rank}.log", launched=world.launcher == "unisono")


def _train(train: Callable[[Run[S]], None], run: Run[S], start: StartRequest) -> None:
    context = run.context
    seed_everything(mix(run.settings.seed, SCRIPT))  # random numbers before the loop are the same on all processes
    try:
        with (
            explain_out_of_memory(context, start.plan_line),
            explain_dtensor_errors(run.settings.parallel),
            name_recompile_limit(),
            name_unrepeatable_operator(),
            name_missing_backend(run.settings.speed.attention),
        ):
            train(run)
        lifecycle.finish(context)
    except RunStopped:
        pass
    except Exception as error:
        for end in context.hooks.ended:
            end(error)
        if context.world.launcher != "unisono":  # which writes it to the log itself
            rank_logging.record_failure(error)
        raise
    finally:
        lifecycle.close(context)
        console.stop()
        rank_logging.stop()
    if context.waits:  # the run ended before this replacement joined
        return
    result = result_of(context)
    ended = read_result(run.dir) if lifecycle.was_finished_before(context) else None
    if ended is not None:  # nothing was computed, so nothing is written
        result = ended
        steps_done = context.progress.steps_done
        more = start.line().flag("--resume").setting(f"steps={2 * steps_done}")
        console.print_line(f"This run already finished after {steps_done} steps. To continue: {more}")
    context.collective.run("the run's end", lambda: _leave_result(context, result, new=ended is None))
    for end in context.hooks.ended:
        end(None)
    if context.group.rank == 0:  # after a death, another process than before
        report = leave_report(context.run_dir, console.print_line)
        if not start.request.json:
            plain = not (sys.stdout.encoding or "").lower().startswith("utf")
            lines = closing_lines(
                result,
                run.dir,
                findings=_findings(context),
                shown=start.request.run_dir,
                report=report is not None,
                again=str(start.line().flag("--resume")),
                color=wants_color(context.world.terminal),
                ascii_only=plain,
                width=min(context.world.width or WIDTH, WIDTH),
            )
            print("\n".join(["", *lines]), flush=True)
        elif context.world.launcher != "unisono":
            print(json.dumps(result), flush=True)


def _findings(context: RunContext) -> Sequence[Finding]:
    """Return what slowed the run down. An error of the search is a note, and not one of the run."""
    try:
        files = RunFiles(context.run_dir)
        files.read()
        return find_all(files)
    except Exception as error:
        context.monitor.note(f"The search for bottlenecks failed: {type(error).__name__}: {error}")
        return ()


def _leave_result(context: RunContext, result: dict[str, Any], *, new: bool) -> None:
    if context.group.rank == 0 and new:
        write(context.run_dir / "result.json", json.dumps(result, indent=1) + "\n")


LOCK_SECONDS = 5.0
"""Seconds to wait for the locks of a main process that has died."""

FAKE = "fake:"
"""The kind of --trace that counts a step of fake tensors; a folder for the record follows."""

INSPECTIONS = {
    "evidence": "unisono.train.diagnostics.dump:dump_run",
    "replay": "unisono.train.diagnostics.replay_step:replay_run",
    "audit": "unisono.train.diagnostics.audited_run:audit_run",
    "export": "unisono.export.captured_call:export_run",
    "timing": "unisono.train.diagnostics.timed_steps:time_run",
    "quality": "unisono.export.script_evaluation:evaluate_run",
    "flops": "unisono.train.recording.flop_count:count_flops",
    "costs": "unisono.train.costs.step_costs:measure_costs",
    "parts": "unisono.train.costs.memory_parts:count_memory",
    "rates": "unisono.train.lr_range.rate_sweep:sweep_rates",
    "values": "unisono.train.recording.value_recorder:record_values",
    "interval": "unisono.train.recording.value_recorder:record_interval",
}
"""Inspections by the first word of the flag --trace. `unisono check` uses none of these."""


def _inspection(request: str, rank: int, predict: ScriptPredict | None) -> Inspection:
    """Build the inspection that the flag --trace requests."""
    kind, _, words = request.partition(":")
    if kind == "predict":
        from unisono.prediction.predicted_parts import predict_run

        return predict_run(words, rank, predict)
    module, name = INSPECTIONS.get(kind, "unisono.train.diagnostics.trace:trace_run").split(":")
    build: Callable[[str, int], Inspection] = getattr(importlib.import_module(module), name)
    return build(words if kind in INSPECTIONS else request, rank)


def _on_main(group: ProcessGroup, decide: Callable[[], Any]) -> Any:
    """Return the decision of the main process on every process. Its error is raised on all of them."""
    decided: Any = None
    error: UnisonoError | None = None
    if group.is_main:
        try:
            decided = decide()
        except UnisonoError as caught:
            error = caught
    message = group.broadcast_object(
        {"value": decided, "problems": error.problems if error else [], "kind": type(error).__name__}
    )
    if message["problems"]:
        from unisono import errors

        kind: type[UnisonoError] = getattr(errors, message["kind"])
        raise kind.of([Problem(*p) for p in message["problems"]])
    return message["value"]


def _inject(faults: tuple[str, ...], context: RunContext) -> AbstractContextManager[None]:
    """Return a block in which faults are injected, if any are (unisono doctor --rehearse, and tests)."""
    if not faults:
        return nullcontext()
    from unisono.testing.fault_spec import planted

    number = context.world.number
    return planted(faults, context.group.rank if number is None else number, context.run_dir / "faults")


@contextmanager
def _own_arguments(request: RunRequest) -> Iterator[None]:
    """Hide our flags from the script during a block: sys.argv has only the arguments after `--`."""
    ours = sys.argv
    sys.argv = [*ours[:1], *request.own]
    try:
        yield
    finally:
        sys.argv = ours


@contextmanager
def _signals(context: RunContext) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM save and end the run after the current step. A second signal ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        for s, handler in before.items():
            signal.signal(s, handler)
        is_main = context.group.rank == 0 and not context.waits
        if is_main and context.world.launcher != "unisono":  # which prints this itself
            words = "Stopping: the current step is finished and saved. A second Ctrl-C kills this process.\n"
            with suppress(OSError):  # not print, which the signal may have interrupted
                os.write(2, ("\n" * context.world.terminal + words).encode())
        lifecycle.leave(context)

    for s in (signal.SIGINT, signal.SIGTERM):
        before[s] = signal.signal(s, on_signal)
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
