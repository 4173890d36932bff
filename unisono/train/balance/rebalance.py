"""Load balancing between steps: measure the time of every process, and move virtual ranks to faster processes.

    process 0   [ v0 v1 v2 v3 v4 v5 ]              step sync    (seconds for a virtual rank, first step not fetched yet)
    process 1   [ v6 v7 ] ........ slow            --------->   of every process: the same numbers, the same decision

The reports of the processes are sent with the step's flags, so they cost no message. A new assignment holds from the
first step of which no process has fetched a micro-batch. A micro-batch that was fetched ahead is computed by the
process that fetched it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from unisono.config import Settings
from unisono.distributed.membership.shared_counter import SharedCounter
from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.roles import RoleGroup
from unisono.exchange.choose import promise_of
from unisono.plan.assignment import Spans
from unisono.plan.batch_order import MicroBatchId
from unisono.plan.load_balance import LoadBalancer
from unisono.train.balance.step_timer import StepTimer
from unisono.train.balance.work_stealing import NoWorkStealing, WorkStealing
from unisono.train.batches.batch_source import BatchSource
from unisono.train.collective import Rounds
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState
from unisono.train.step_sync import StepSync

NOTED_CHANGES = 3
"""Changes of the assignment that are printed. Processes of similar speed may change it often."""

NUMBERS = 3
"""Length of a report: seconds for one virtual rank (0: the process computed none), the first step of which the process
has fetched nothing, seconds since its last report."""


class Rebalancer(Extension):
    """Move virtual ranks to faster processes.

    made   the decisions so far: (first step, virtual ranks of each process)
    """

    def __init__(
        self,
        settings: Settings,
        mesh: Mesh,
        source: BatchSource,
        step_sync: StepSync,
        note: Callable[[str], None],
        first: int,
        promise: str = "",
    ) -> None:
        """Measure from step `first` on. `note` prints a line on rank 0. `promise`: of the script's own exchange."""
        self.promise = promise
        self.settings, self.mesh, self.source, self.step_sync, self.note = settings, mesh, source, step_sync, note
        self.share = settings.batch / settings.virtual_ranks  # samples of a virtual rank, on average
        self.servers = mesh.world.servers if isinstance(mesh.world, RoleGroup) else 0  # they compute nothing
        self.timer = StepTimer(mesh.world.device)
        self.made: list[tuple[int, list[int]]] = []
        self._announced: tuple[int, ...] = ()  # slow processes that a line has named
        self.regrouped(first, failed=False)

    def regrouped(self, first: int, *, failed: bool) -> None:
        """Restart the measurement: a new group runs the steps from step `first` on, or the run begins."""
        self.is_on = is_balanced(self.settings, self.mesh, self.promise)
        self.balancer: LoadBalancer | None = None
        if self.is_on and self.settings.balance.by_speed:
            spans = self.source.schedule.at(first)[self.servers :]
            self.balancer = LoadBalancer(self.settings.virtual_ranks, spans)
        self.step_sync.expect_reports(NUMBERS if self.is_on else 0)
        self._samples, self._reported_at = 0, 0.0
        self._has_reported = False

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        if step.passes == 0:
            self._samples = 0
            self.timer.begin()
        return rounds

    def round_done(self, step: StepState, place: MicroBatchId) -> None:
        if step.passes == 0:
            first, last = self.source.order.micro_bounds(place.step, place.virtual_rank)[place.number]
            self._samples += last - first
            self.timer.done()
            if self.source.is_stolen:
                self.timer.keep_up()

    def before_sync(self, step: StepState, gradient: GradientPass) -> None:
        self._has_reported = self.is_on and not self.source.is_fixed
        if self._has_reported:
            before, self._reported_at = self._reported_at, time.perf_counter()
            seconds = self.timer.seconds() / self._samples * self.share if self._samples else 0.0
            elapsed = self._reported_at - before if before else 0.0
            step.report = seconds, float(self.source.horizon), elapsed

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        if self._has_reported and step.passes == 0:
            self.apply(step.number, step.totals.reports)

    def apply(self, step: int, reports: Sequence[Sequence[float]]) -> None:
        """Change the assignment of virtual ranks after a step, if that pays. `reports` are those of all processes."""
        seconds = [took for took, _, _ in reports]
        self.source.stealing.observe(self.source.schedule.at(step), seconds, reports[0][2])
        spans = self.balancer.record(seconds[self.servers :]) if self.balancer is not None else None
        if self.balancer is None or spans is None:
            return
        spans = ((0, 0),) * self.servers + spans
        first, counts = int(max(horizon for _, horizon, _ in reports)), [hi - lo for lo, hi in spans]
        self.source.schedule.change(first, spans)
        self.made.append((first, counts))
        if len(self.made) <= NOTED_CHANGES:
            share = ", ".join(map(str, counts))
            self.note(f"from step {first} on the processes compute {share} virtual ranks, by speed")
        if len(self.made) == NOTED_CHANGES:
            self.note("Later changes by speed are only in the report.")
        slow = self.balancer.slow
        if slow and slow != self._announced and not self.servers:
            self.note(_about_slow_ranks(slow, self.balancer.typical))
        self._announced = slow

    def result(self) -> Mapping[str, Any]:
        made = [{"step": first, "virtual_ranks": counts} for first, counts in self.made]
        stealing = self.source.stealing
        stolen = {"claimed_steps": stealing.steps} if isinstance(stealing, WorkStealing) else {}
        return {**({"assignments": made} if made else {}), **stolen}


def _about_slow_ranks(slow: Sequence[int], seconds: Sequence[float]) -> str:
    took, others = (median(s for r, s in enumerate(seconds) if (r in slow) == of) for of in (True, False))
    return (
        f"{'Rank' if len(slow) == 1 else 'Ranks'} {', '.join(map(str, slow))} would take {1000 * took:.3g} ms for "
        f"a virtual rank, where the others take {1000 * others:.3g}: they are done sooner without help, and "
        f"--ranks {len(seconds) - len(slow)} would be as fast."
    )


def wants_balance(settings: Settings) -> bool:
    """Return whether the settings let virtual ranks move between processes."""
    return settings.virtual_ranks > 1 and (settings.balance.by_speed or settings.balance.work_stealing)


def is_balanced(settings: Settings, mesh: Mesh, promise: str = "") -> bool:
    """Return whether virtual ranks can move between the processes of a mesh.

    `promise` is that of the script's own exchange; "": the settings name the exchange.

    They cannot move in these cases: there is one process; processes wait for each other within a model, so that a
    slow one is not known; or the exchange is not exact, so that the speed of a machine would change the result.
    """
    if not wants_balance(settings) or not 1 < mesh.axes.replicate == mesh.world.size:
        return False
    return (promise or promise_of(settings, mesh.world.size)[0]) == "exact"


def build_stealing(settings: Settings, mesh: Mesh, promise: str = "") -> WorkStealing | NoWorkStealing:
    """Build work stealing for the processes of a mesh, if the settings enable it."""
    if settings.balance.work_stealing and is_balanced(settings, mesh, promise):
        return WorkStealing(mesh.world.rank, SharedCounter(mesh.world))
    return NoWorkStealing()


def set_assignment(source: BatchSource, step_sync: StepSync, group: ProcessGroup, spans: Spans) -> int:
    """Assign these virtual ranks to the processes from now on, without changing a bit of the result.

    All processes call this between the same two steps.

    Args:
        source: the micro-batches of the run.
        step_sync: the step sync of the run.
        group: all processes of the run.
        spans: for each process, the virtual ranks [lo, hi) that it computes.

    Returns:
        The first step of which no process has fetched anything. The assignment holds from this step on.
    """
    step_sync.require_same_call("run.deal")
    first = int(group.max_(torch.tensor([source.horizon], device=group.device)).item())
    source.reassign(first, spans)
    return first
