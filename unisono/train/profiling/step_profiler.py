"""Profile the steps that `profile.steps` names, on the ranks of `profile.ranks`.

Each of these ranks writes a trace of its own when it has done the steps (`StepProfiler`). Later, when all ranks have
done so, the main process starts another one that merges them (`TraceMerging`).

    step             19         20         21         22                   23
    rank 0     prepare |  record  |  record  |  record  | write its trace |    | start to merge
    rank 1     prepare |  record  |  record  |  record  | write its trace |    |
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from unisono.distributed.process_group import wrap_peer_errors
from unisono.environment import inherited
from unisono.monitor import console
from unisono.profiles.profile_folder import ProfileFolder
from unisono.profiles.profiled_steps import ProfiledSteps, parse_ranks, parse_steps
from unisono.train.extensions import Extension
from unisono.train.profiling.host_clocks import ClockDifference, measure_clocks
from unisono.train.profiling.step_recording import StepRecording

if TYPE_CHECKING:
    from unisono.plan.batch_order import MicroBatchId
    from unisono.train.collective import Rounds
    from unisono.train.context import RunContext
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.step_state import StepState

PATIENCE = 10.0
"""Seconds that the end of a run waits until the traces are merged. Then that process finishes by itself."""


class FailureReport:
    """Prints the first error of a profile, in one line."""

    def __init__(self) -> None:
        self._is_printed = False

    def add(self, error: Exception) -> None:
        """Print this error, if it is the first one."""
        reason = str(error).strip().partition("\n")[0]
        if not self._is_printed:
            console.logger.warning("Profiling failed: %s: %s. Training continues.", type(error).__name__, reason)
        self._is_printed = True


class StepProfiler(Extension):
    """Record some steps of this rank. An error is reported once, and training continues without the profile.

    Args:
        context: The context of the run.
        steps: The steps to record.
        rank: The rank of this process, as its timeline names it.
        failures: Prints an error.
    """

    def __init__(self, context: RunContext, steps: ProfiledSteps, rank: int, failures: FailureReport) -> None:
        self._steps, self._monitor, self._failures = steps, context.monitor, failures
        self._folder = ProfileFolder(context.run_dir)
        self._recording = StepRecording(context.settings.profile, context.device, rank, context.world.host)

    def before_step(self, step: StepState) -> None:
        if self._steps.covers(step.number):
            self._attempt(self._recording.begin_step)
        elif step.number + 1 == self._steps.first:
            self._attempt(self._recording.prepare)
        elif self._recording.is_on:  # a parameter server has assigned the last steps to other processes
            self._attempt(self._write)

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        return self._marked(rounds) if self._recording.is_on else rounds

    def round_done(self, step: StepState, place: MicroBatchId) -> None:
        if self._recording.is_on:
            self._recording.spans.end_round(place.virtual_rank, place.number)

    def step_ended(self, step: StepState) -> None:
        if self._recording.is_on:
            self._recording.end_step(step.number)
            if not self._steps.covers(step.number + 1):
                self._attempt(self._write)

    def close(self) -> None:
        self._attempt(self._write)

    def _marked(self, rounds: Rounds) -> Rounds:
        for each in rounds:
            self._recording.spans.begin_round()
            yield each

    def _write(self) -> None:
        steps = self._recording.write(self._folder)
        if steps is not None:
            self._monitor.event({"event": "profile", "step": steps[1], "first": steps[0]})

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._recording.abandon()
            self._failures.add(error)


class TraceMerging(Extension):
    """Merge the traces of all ranks, in a process that the main process starts.

    Args:
        context: The context of the run.
        steps: The steps to record.
        failures: Prints an error.
    """

    def __init__(self, context: RunContext, steps: ProfiledSteps, failures: FailureReport) -> None:
        progress, group = context.progress, context.group
        self._context, self._steps, self._failures = context, steps, failures
        self._folder = ProfileFolder(context.run_dir)
        self._computes = progress.steps_done < steps.end and steps.first < progress.last
        """Whether this run computes some of the steps. A resumed run may have done them before."""
        self._mergers: list[subprocess.Popen[str]] = []
        if self._computes and group.rank == 0 and not context.world.joins:
            self._try(self._folder.clear)
        self._hosts: list[str] = group.all_gather_object(context.world.host)  # after it, no trace is an earlier one
        self._clocks: Mapping[str, ClockDifference] = {}
        self._measure()

    def between_steps(self, steps_done: int) -> None:
        """Begin to merge after the step that follows the recorded ones: before it, each rank has written its trace."""
        if self._computes and steps_done > self._steps.end and not self._mergers:
            if self._context.loop.is_uniform:
                self._measure()
            self._merge()

    def ended(self, error: Exception | None) -> None:
        if error is not None or self._context.group.rank:
            return
        note, done = self._context.monitor.note, self._context.progress.steps_done
        if not self._folder.ranks():
            if not (self._computes and done > self._steps.first):  # otherwise an error was reported
                note(f"profile.steps recorded nothing: the run ended after {done} steps, without {self._steps}.")
        elif self._computes:
            self._merge()
            for merger in self._mergers:
                self._await(merger)
            note(f"profile of {self._steps}: unisono profile {self._context.monitor.typed}")

    def _measure(self) -> None:
        """Measure the clocks of hosts. All processes call this."""
        if len(set(self._hosts)) > 1:
            with wrap_peer_errors("Measuring the clocks of the hosts"):
                self._clocks = measure_clocks(self._context.group, self._hosts)

    def _merge(self) -> None:
        """Start to merge the traces. The main process does so."""
        if self._context.group.rank == 0:
            self._try(self._write_hosts)
            self._try(self._start_merger)

    def _write_hosts(self) -> None:
        clocks = {host: difference._asdict() for host, difference in self._clocks.items()}
        ranks = {str(rank): host for rank, host in enumerate(self._hosts)}
        self._folder.write_hosts({"steps": list(self._steps), "ranks": ranks, "clocks": clocks})

    def _start_merger(self) -> None:
        self._mergers.append(
            subprocess.Popen(
                [sys.executable, "-m", "unisono.profiles.merged_trace", str(self._context.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=inherited({"PYTHONPATH": ":".join(path for path in sys.path if path)}),
                start_new_session=True,  # Ctrl-C ends training
            )
        )

    def _await(self, merger: subprocess.Popen[str]) -> None:
        try:
            said, _ = merger.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._context.monitor.note("The traces of the ranks are still being merged.")
            return
        if said.strip():
            console.logger.warning("The traces of the ranks were not merged: %s", said.strip().splitlines()[-1])

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._failures.add(error)


def build_profiler(context: RunContext) -> list[Extension]:
    """Return the extensions that record a profile, if the settings say so. A run that a command observes has none."""
    settings, world = context.settings.profile, context.world
    steps = parse_steps(settings.steps)
    if steps is None or context.inspection is not None:
        return []
    ranks = parse_ranks(settings.ranks)
    chosen = ranks is None or world.rank in ranks
    number = world.number if world.number is not None else context.group.rank
    failures = FailureReport()
    recorders = [StepProfiler(context, steps, number, failures)] if chosen else []
    return [TraceMerging(context, steps, failures), *recorders]
