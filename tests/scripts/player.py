"""Run a script file on processes that are forked, as `unisono run` would, and say how each of them ended."""

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
"""A run of a few steps that takes longer hangs."""


class Ended(NamedTuple):
    """How one process ended.

    how      ended: the script returned; refused: an error of ours; crashed: any other
    step     in which step it refused or crashed; None: before the first
    says     result.json, or what the error says
    weights  sha256 of what this process holds
    """

    how: Literal["ended", "refused", "crashed"]
    step: int | None
    says: Any
    weights: str = ""


@dataclass(kw_only=True)
class Terminate(Fault):
    """The process is sent SIGTERM, as a cluster does it."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Came(NamedTuple):
    """A whole run: its processes' ends, and what it left in its folder.

    steps  {number of a step: [its loss, what was logged]}
    state  sha256 of models, optimizers and schedules
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
        """The end that tells most: an error that is not about another process's end."""
        ends = [end for end in self.ends if end.how == self.how]
        return next((end for end in ends if "PeerLostError" not in str(end.says)), ends[0])


def play(script: Path, folder: Path, ranks: int, words: Sequence[str], stop: int | None = None) -> Came:
    """Run it in `folder`. Raises TimeoutError for a hang, and AssertionError where a process dies.

    stop  in which step rank 0 is sent SIGTERM
    """
    folder.mkdir(exist_ok=True)
    ends = run_ranks(_play, ranks, str(script), str(folder), list(words), stop, seconds=SECONDS)
    return Came([Ended(*end) for end, _ in ends], ends[0][1], state_of(folder, [end for end, _ in ends]))


def state_of(folder: Path, ends: Sequence[Any]) -> str:
    """sha256 of what the newest checkpoint holds; "": a process did not end well, or there is none.

    Without random numbers where steps are keyed, since every step then begins from its own: a run that leaves its loop
    before a step has that step's, and one that stopped after the step before has not.
    """
    if any(end[0] != "ended" for end in ends):
        return ""
    path = newest(folder, print)
    if path is None:
        return ""
    passed = RANDOM if ends[0][2]["virtual_ranks"] > 1 else ""
    return fingerprint_of({name: state for name, state in load(path).states.items() if name != passed})


def _play(world: World, script: str, folder: str, words: Sequence[str], stop: int | None) -> tuple[Any, ...]:
    """On one rank, as unisono/launcher/worker_main.py does it: how it ended, and its steps."""
    gc.freeze()  # or collecting garbage at a run's end walks through all of torch, and copies it
    os.chdir(folder)
    environment.assign(replace(world, launcher="unisono", folder=folder))
    sys.argv = [script, f"--run-dir={folder}", *words]
    heard = Heard()
    with open(f"{folder}/screen-{world.rank}", "a") as screen:
        sys.stdout = sys.stderr = screen
        try:
            with Terminate(stop, "forward") if stop is not None and world.rank == 0 else nullcontext():
                runpy.run_path(script, run_name="__main__")
        except UnisonoError as error:
            return ("refused", phases.Position.step, f"{type(error).__name__}: {error}"), heard.steps
        except Exception:
            return ("crashed", phases.Position.step, traceback.format_exc()), heard.steps
    result = heard.results[-1]
    return ("ended", None, result, result["weights_sha256"]), heard.steps


class Heard:
    """What the run of this process says: step by step, and in the end (result.json is rank 0's alone)."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}
        """{number: [loss, what was logged]}; what is logged behind the loop is in the results."""
        self.results: list[dict[str, Any]] = []
        self._logged: dict[str, Any] = {}
        step, log, result = StepMonitor.step, StepMonitor.log, entrypoint.result_of

        def heard_step(watcher: StepMonitor, done: Any) -> None:
            self.steps[done.number], self._logged = [done.loss, self._logged], {}
            step(watcher, done)

        def heard_log(watcher: StepMonitor, values: dict[str, Any]) -> None:
            self._logged = {**self._logged, **values}
            log(watcher, values)

        def heard_result(context: RunContext) -> dict[str, Any]:
            self.results.append(result(context))
            return self.results[-1]

        StepMonitor.step, StepMonitor.log = heard_step, heard_log  # type: ignore[method-assign,assignment]
        entrypoint.result_of = heard_result
