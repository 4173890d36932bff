"""Run a script in forked processes as `unisono run` does, and return how each one ended."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unisono import entrypoint, environment, phases
from unisono.checkpoint.load import load, newest
from unisono.environment import World
from unisono.errors import UnisonoError
from unisono.monitor.step_monitor import StepMonitor
from unisono.tensors.digest import fingerprint_of
from unisono.testing import run_ranks
from unisono.testing.faults import Fault
from unisono.train.context import RunContext
from unisono.train.state.run_state import RANDOM

SECONDS = 100.0
"""A run of a few steps that takes longer counts as a hang."""


class Ended(NamedTuple):
    """How a process ended.

    Args:
        how: "ended" (the script returned), "refused" (an error of Unisono) or "crashed" (another error).
        step: The step of the error; None: before the first step.
        says: The result, or the error message.
        weights: sha256 of this process's weights.
    """

    how: Literal["ended", "refused", "crashed"]
    step: int | None
    says: Any
    weights: str = ""


@dataclass(kw_only=True)
class Terminate(Fault):
    """Sends SIGTERM to the process, as a cluster does."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Played(NamedTuple):
    """The result of a run.

    Args:
        ends: The end of each process.
        steps: [loss, logged values] by step.
        state: sha256 of models, optimizers and schedules.
    """

    ends: list[Ended]
    steps: dict[int, Any]
    state: str

    @property
    def how(self) -> str:
        kinds = {end.how for end in self.ends}
        return next(kind for kind in ("crashed", "refused", "ended") if kind in kinds)

    @property
    def worst(self) -> Ended:
        """The most informative end: an error other than a lost peer."""
        ends = [end for end in self.ends if end.how == self.how]
        return next((end for end in ends if "PeerLostError" not in str(end.says)), ends[0])


def play(script: Path, folder: Path, ranks: int, words: Sequence[str], stop: int | None = None) -> Played:
    """Run a script in `folder`.

    Args:
        stop: The step in which rank 0 receives SIGTERM.

    Raises:
        TimeoutError: The run hangs.
        AssertionError: A process dies.
    """
    folder.mkdir(exist_ok=True)
    ends = run_ranks(_play, ranks, str(script), str(folder), list(words), stop, seconds=SECONDS)
    return Played([Ended(*end) for end, _ in ends], ends[0][1], state_of(folder, [end for end, _ in ends]))


def state_of(folder: Path, ends: Sequence[Any]) -> str:
    """Return the sha256 of the newest checkpoint; "" if a process failed or there is none.

    With several virtual ranks, RNG states are excluded: each step is seeded, and a run that leaves its loop before a
    step has seeded for it, unlike a run that stopped after the step before.
    """
    if any(end[0] != "ended" for end in ends):
        return ""
    path = newest(folder, print)
    if path is None:
        return ""
    passed = RANDOM if ends[0][2]["virtual_ranks"] > 1 else ""
    return fingerprint_of({name: state for name, state in load(path).states.items() if name != passed})


def _play(world: World, script: str, folder: str, words: Sequence[str], stop: int | None) -> tuple[Any, ...]:
    """Run the script on this rank as unisono/launcher/worker_main.py does; return its end and its steps."""
    gc.freeze()  # otherwise garbage collection at the end of a run copies the pages of torch's objects
    os.chdir(folder)
    environment.assign(replace(world, launcher="unisono", folder=folder))
    sys.argv = [script, f"--run-dir={folder}", *words]
    recorder = Recorder()
    with open(f"{folder}/screen-{world.rank}", "a") as screen:
        sys.stdout = sys.stderr = screen
        try:
            with Terminate(stop, "forward") if stop is not None and world.rank == 0 else nullcontext():
                runpy.run_path(script, run_name="__main__")
        except UnisonoError as error:
            return ("refused", phases.position.step, f"{type(error).__name__}: {error}"), recorder.steps
        except Exception:
            return ("crashed", phases.position.step, traceback.format_exc()), recorder.steps
    result = recorder.results[-1]
    return ("ended", None, result, result["weights_sha256"]), recorder.steps


class Recorder:
    """Records steps and result of the run in this process (only rank 0 writes result.json)."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}
        """[loss, logged values] by step. Values logged after the loop are in the results."""
        self.results: list[dict[str, Any]] = []
        self._logged: dict[str, Any] = {}
        step, log, result = StepMonitor.step, StepMonitor.log, entrypoint.result_of

        def record_step(watcher: StepMonitor, done: Any) -> None:
            self.steps[done.number], self._logged = [done.loss, self._logged], {}
            step(watcher, done)

        def record_log(watcher: StepMonitor, values: dict[str, Any]) -> None:
            self._logged = {**self._logged, **values}
            log(watcher, values)

        def record_result(context: RunContext) -> dict[str, Any]:
            self.results.append(result(context))
            return self.results[-1]

        StepMonitor.step, StepMonitor.log = record_step, record_log  # type: ignore[method-assign,assignment]
        entrypoint.result_of = record_result
