"""Tests with real processes: run a function on N ranks and get each rank's value, or its traceback.

A fork server has torch loaded, so a rank costs a fork instead of an import. Ranks join through a file store, so no port
can collide. A deadline ends a hang and prints the stacks of every rank.

    def sums(world):                                    # at module level, so that the ranks can import it
        with unisono.distributed.init.join_process_group(world) as group:
            return group.sum_(torch.tensor([1.0])).item()

    assert run_ranks(sums, 3) == [3.0, 3.0, 3.0]

A training loop gets its run from `build_run`:

    def loss(world, settings, folder):
        with unisono.distributed.init.join_process_group(world) as group:
            run = build_run(settings, world, group, folder)
            script.main(run)
            close_run(run)
            return run_result(run)["loss"]

    assert len({loss for size in (1, 2, 3) for loss in run_ranks(loss, size, Settings(steps=3), tmp_path)}) == 1
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unisono.config import CommandLine, Settings
from unisono.environment import World
from unisono.errors import SettingsError
from unisono.testing.faults import (
    BitFlip,
    FailAt,
    FullDisk,
    HangAt,
    LostPackets,
    PlantedFailure,
    SlowAt,
    TornFile,
    flip_,
    flip_bit,
    tear,
)

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup
    from unisono.plan.assignment import Spans
    from unisono.train.run import Run

__all__ = [
    "BitFlip",
    "FailAt",
    "FullDisk",
    "HangAt",
    "LostPackets",
    "PlantedFailure",
    "SlowAt",
    "TornFile",
    "build_run",
    "close_run",
    "extension_of",
    "finish_run",
    "flip_",
    "flip_bit",
    "reassign",
    "run_promise",
    "run_ranks",
    "run_result",
    "tear",
]

S = TypeVar("S", bound=Settings)
E = TypeVar("E")

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
        *(
            "unisono.train.run",
            "unisono.entrypoint",
            "unisono.parallel.pipeline_parallel.schedule",
            "unisono.parallel.tensor_parallel.tensor_parallel",
        ),
        "pytest",  # the test module imports it, which takes 0.1 s on every rank
    ]
)


def run_ranks(function: Callable[..., Any], size: int, *args: Any, seconds: float = 120.0) -> list[Any]:
    """Run function(world, *args) on each rank, and return the values in the order of ranks.

    Args:
        function: a function at module level. It joins the process group itself, if it needs one.
        size: the number of ranks.
        args: further arguments, which are pickled.
        seconds: the deadline.

    Raises:
        AssertionError: with the traceback of a rank that failed or died.
        TimeoutError: after `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        ends: dict[Any, int] = {}
        for rank in range(size):
            world = World(
                rank=rank, size=size, local_rank=rank, local_size=size, store=f"file://{folder}/store", launcher="test"
            )
            mine, theirs = _context.Pipe(duplex=False)
            process: BaseProcess = _context.Process(
                target=_rank, args=(function, world, theirs, args, seconds), daemon=False
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends[mine] = rank
        results: dict[int, Any] = {}
        try:
            _collect(results, ends, processes, size, time.monotonic() + seconds, seconds)
        finally:
            for process in processes:
                process.join(5 if len(results) == size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
        return [results[rank] for rank in range(size)]


def build_run(
    settings: S, world: World, group: ProcessGroup, folder: Path, *, resume: bool = False, verified: bool = False
) -> Run[S]:
    """Build the run that is passed to a script's main function, without output. Call `close_run` at the end.

    Args:
        settings: the settings.
        world: this process among those of the run.
        group: the process group.
        folder: the run directory.
        resume: continue from the newest checkpoint there, if there is one. The settings are not compared with it.
        verified: check the promise as `unisono run` does, under the setting `promise.check`. Otherwise no micro-batch
            is computed twice, so that a test can count rounds, samples and random draws.

    Raises:
        SettingsError: if `unisono run` would refuse the settings.
    """
    from unisono.checkpoint.load import newest, open_checkpoint
    from unisono.checkpoint.storage import prepare_storage
    from unisono.config.validate import check
    from unisono.train.context import build_context
    from unisono.train.loop import choose_loop
    from unisono.train.run import Run

    if problems := check(settings, world.size, CommandLine()):
        raise SettingsError.of(problems)
    if not verified:
        settings = replace(settings, promise=replace(settings.promise, check=False))
    prepare_storage(folder, settings.checkpoint.dir, resume=resume or world.rank > 0)
    found = newest(folder, print) if resume else None
    resumed = open_checkpoint(found) if found is not None else None
    loop = choose_loop(settings, group)
    return Run(build_context(settings, loop, world=world, run_dir=folder, resumed=resumed, output=io.StringIO()), loop)


def finish_run(run: Run[Any]) -> None:
    """End a run as `unisono.main` does when the script has returned."""
    from unisono.train import lifecycle

    lifecycle.finish(run.context)


def close_run(run: Run[Any]) -> None:
    """Release everything that a run holds."""
    from unisono.train import lifecycle

    lifecycle.close(run.context)


def run_result(run: Run[Any]) -> dict[str, Any]:
    """Return what goes into result.json."""
    from unisono.train.state.run_result import result

    return result(run.context)


def run_promise(run: Run[Any]) -> tuple[str, str]:
    """Return what is promised of a run's result, and why."""
    from unisono.train.guarantees.promise import promise

    return promise(run.context)


def extension_of(run: Run[Any], kind: type[E]) -> E | None:
    """Return the extension of this class, if the loop of a run has one."""
    return next((each for each in run.context.extensions if isinstance(each, kind)), None)


def reassign(run: Run[Any], spans: Spans) -> int:
    """Assign virtual ranks from now on as given; returns the first step for which that holds. All processes call it."""
    from unisono.train.balance.rebalance import set_assignment

    context = run.context
    assert context.parts is not None
    return set_assignment(context.parts.source, context.step_sync, context.group, spans)


def _collect(
    results: dict[int, Any],
    ends: dict[Any, int],
    processes: list[BaseProcess],
    size: int,
    deadline: float,
    seconds: float,
) -> None:
    open_ends = dict(ends)
    try:
        while open_ends:
            ready = wait(list(open_ends), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"ranks {sorted(open_ends.values())} of {size} still run after {seconds:g} s")
            for end in ready:
                rank = open_ends.pop(end)
                assert isinstance(end, Connection)
                try:
                    value, error = end.recv()
                except EOFError:
                    processes[rank].join(5)
                    raise AssertionError(
                        f"rank {rank} of {size} died with exit code {processes[rank].exitcode}"
                    ) from None
                if error:
                    raise AssertionError(f"rank {rank} of {size} failed:\n{error}")
                results[rank] = value
    finally:
        for end in ends:
            end.close()


def _rank(function: Callable[..., Any], world: World, pipe: Connection, args: tuple[Any, ...], seconds: float) -> None:
    import torch

    faulthandler.dump_traceback_later(max(seconds - 1.0, 0.5), exit=False)
    if "fork" in mp.get_all_start_methods():
        mp.set_start_method("fork", force=True)  # otherwise each loader worker starts a fork server
    torch.set_num_threads(1)
    try:
        pipe.send((function(world, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        pipe.close()
