"""When a process dies, the others finish its step: nothing is lost, repeated or left out, and no bit changes.

Every joint operation of the processes is a collective: the exchange of a step, an evaluation, a checkpoint. A
collective can be repeated until it is committed. Its last operation is a tiny one, which no process finishes before all
processes hold the result. After a death the others form a new group (distributed/membership/membership.py). Each
process reports the number of collectives that it has completed, and whether it holds the result of the current one:

    a process has completed it, or all hold the result     it is committed: continue
    otherwise                                              repeat it, together

When a step is repeated, each process keeps the partial sums that are still complete in its memory. The virtual ranks
that no process holds are assigned again and computed (plan/reassignment.py). Their batches come out of the script's own
`for batch in step`:

    process 0   v0 v1 v2 | exchange x        | v3 v4 | exchange | update ...        rank 0 of 2
    process 1   v3 killed
    process 2   v6 v7 v8 | exchange x        | v5    | exchange | update ...        rank 1 of 2

A replacement process joins after a step, and receives the state that it needs (train/recovery/state_transfer.py).

If several processes share a model layer by layer, a process detects a death in the middle of a forward or a backward
pass, which it cannot leave. Gathering then returns zeros (ProcessGroup.attempt), the script completes its rounds, and
all rounds are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

from unisono.data.loader import Schedule
from unisono.distributed.membership.membership import Membership, membership_of
from unisono.distributed.process_group import wrap_peer_errors
from unisono.errors import PeerLostError
from unisono.plan.assignment import Slot, Spans
from unisono.plan.reassignment import assign_missing
from unisono.plan.reduction_tree import Node
from unisono.train.batches.batch_source import Assignment
from unisono.train.collective import PEER_ERRORS, Attempt, Rounds
from unisono.train.context import LoopParts, RunContext
from unisono.train.extensions import Hook
from unisono.train.gradient_pass import GradientPass
from unisono.train.recovery.state_transfer import send_state
from unisono.train.recovery.survival import may_survive
from unisono.train.step_state import StepState

BuildSlot = Callable[[], tuple[Slot, Schedule]]
"""Return which span this process computes, and the spans of all processes, in the current group."""

REGROUPING = "Continuing without a process that died"


class PeerReport(NamedTuple):
    """The report of a process after a death.

    completed  number of collectives that it has completed
    whole      whether it holds the result of the current collective
    in_step    whether the current collective is the exchange of a step
    held       the virtual ranks whose gradients it still has
    empty      whether it has just joined, and needs the state
    """

    completed: int
    whole: bool
    in_step: bool
    held: list[int]
    empty: bool


class RepeatableAttempt(Attempt):
    """An attempt at a collective that is repeated if a peer dies in it."""

    def __init__(self, recovery: StepRecovery, verb: str, *, again: bool) -> None:
        self.recovery, self.verb, self.again = recovery, verb, again
        self.repeat = False

    @contextmanager
    def checking(self) -> Iterator[None]:
        try:
            with wrap_peer_errors(self.verb):
                yield
        except PEER_ERRORS as lost:
            self._recover(lost, whole=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, PEER_ERRORS):
            return False
        try:
            with wrap_peer_errors(self.verb):
                if error is not None:
                    raise error
                self.recovery.group.barrier()
        except PEER_ERRORS as lost:
            self._recover(lost, whole=error is None)
        if not self.repeat:
            self.recovery.completed()
        return True

    def _recover(self, lost: Exception, *, whole: bool) -> None:
        """Form a new group, and decide whether to repeat the collective. Raise `lost` if it is not a death."""
        self.repeat = not self.recovery.recover(lost, whole=whole)
        if self.repeat and not self.again:
            raise lost


class StepRecovery:
    """Continue a run when other processes die or join.

    deaths  {"process", "step"}: the number of a process that died, and the number of steps completed at that time
    joined  the same for processes that joined
    """

    def __init__(
        self,
        context: RunContext,
        parts: LoopParts,
        membership: Membership,
        regrouped: Sequence[Hook],
        build_slot: BuildSlot,
    ) -> None:
        self.context, self.membership, self.group = context, membership, context.group
        self.source, self.sync = parts.source, parts.sync
        self._hooks, self._build_slot = regrouped, build_slot
        self._completed = 0
        self.deaths: list[dict[str, int]] = []
        self.joined: list[dict[str, int]] = []
        self._is_empty = False  # this process has just joined, and needs the state
        self._lost: list[int] = []  # deaths that are not yet reported to the launcher as survived
        self._leads = context.group.rank == 0 and not context.waits
        self._regrouped_in = -1  # the current step when the group last changed

    # -- collectives

    def attempt(self, verb: str, *, again: bool) -> Attempt:
        """Return an attempt at a collective.

        `again` allows a repetition, which must have the same effect as the first attempt.
        """
        return RepeatableAttempt(self, verb, again=again)

    def recover(self, lost: Exception, *, whole: bool) -> bool:
        """Form a new group after a death within a collective, and return whether the collective is committed.

        Args:
            lost: the error that was raised; it is raised again if it is not a death.
            whole: whether this process holds the result.
        """
        context = self.context
        reports = self._exchange_reports(lost, whole=whole and not self.membership.failed)
        self._regroup(context.progress.next_step)
        if context.progress.step is not None:  # a later pass of this step has another assignment
            self._regrouped_in = context.progress.step.number
        if is_committed(reports, self._completed):
            return True
        context.models.reshard()
        return False

    def completed(self) -> None:
        """Record that a collective is complete on all processes."""
        self._completed += 1
        self._report_survived()

    def _report_survived(self) -> None:
        """Report survived deaths to the launcher, so that it does not blame a later failure on them."""
        if self._lost:
            self.membership.report(survived=self._lost)
            self._lost = []

    def result(self) -> Mapping[str, Any]:
        """Return entries of result.json: which processes have died and joined, and after which step."""
        changes = {"deaths": self.deaths, "joined": self.joined}
        return {name: value for name, value in changes.items() if value}

    # -- a step

    def resume_step(self, step: StepState, gradient: GradientPass, lost: Exception) -> Rounds | None:
        """Continue a pass in which a peer died.

        Return the missing micro-batches, or None if the gradient is complete on all processes.
        """
        torn = self.membership.failed  # shards were not gathered, so no result on this process is valid
        whole = gradient.is_whole and not torn
        old, held = gradient.exchange, dict[Node, Any]()

        def still_held() -> list[int]:
            held.update({} if whole or torn else old.held())
            return [v for node in held for v in range(*node)]

        reports = self._exchange_reports(lost, whole=whole, in_step=True, held=still_held)
        self._regroup(step.number + 1, torn=torn)
        self._regrouped_in = step.number
        if is_committed(reports, self._completed):
            gradient.commit()
            return None
        models, block = self.context.models, self.sync.block
        pieces = self.source.pieces(step, block)
        models.reshard()  # not earlier: a complete gradient needs the parameters gathered
        gradient.restart_exchange()
        all_in_step = all(each.in_step and each.completed == self._completed for each in reports)
        if not (all_in_step and any(each.held for each in reports)):  # some have not begun it: a usual step
            held.clear()
            spans: Spans = self.source.schedule.at(step.number)
            span = spans[self.source.slot.span]
            ours = list(range(*span))
            self.sync.begin_exchange(gradient, Assignment(spans, span, self.source.pieces(step, span)))
        else:
            ours = assign_missing(pieces, [each.held for each in reports])[self.group.rank]
            self.sync.begin_exchange(gradient, Assignment((), block, pieces))
            dynamic: Any = gradient.exchange
            dynamic.continue_after_death(held, old.used, [v for v in ours if not pieces[v]])
        kept = [v for node in held for v in range(*node)]
        self.context.step_sync.keep_partial(step.number, kept)
        models.buffers.keep(kept)
        old.close()
        return self.source.missing(step, [v for v in ours if pieces[v]])

    def refetch(self, step: StepState) -> None:
        """Fetch the micro-batches for another pass of a step in which the group has changed."""
        if self._regrouped_in != step.number or step.kept is None:
            return
        known = dict(step.kept)
        places = self.source.places(step.number, self.source.begin(step).pieces)
        step.kept[:] = [(p, known[p] if p in known else self.source.fetch(p)) for p in places]

    # -- a new group

    def _exchange_reports(
        self,
        lost: Exception,
        *,
        whole: bool = False,
        in_step: bool = False,
        held: Callable[[], Sequence[int]] = tuple,
        open_: bool = False,
    ) -> list[PeerReport]:
        """Form a new group of the remaining processes, and return the report of each.

        Args:
            lost: the error that was raised; it is raised again if it is not a death.
            whole: whether this process holds the result of the current collective.
            in_step: whether the current collective is the exchange of a step.
            held: returns the virtual ranks whose gradients this process has.
            open_: whether waiting processes may join.
        """
        if not open_ and not self.membership.is_peer_loss(lost):
            raise lost
        while True:
            steps_done = self.context.progress.steps_done
            formed = self.membership.regroup(self.group, admit=open_, step=steps_done)
            self._lost += formed.lost
            self.deaths += [{"process": number, "step": steps_done} for number in formed.lost]
            self.joined += [{"process": number, "step": steps_done} for number in formed.joined]
            for event, numbers in (("death", formed.lost), ("join", formed.joined)):
                if numbers:
                    self.context.monitor.event({"event": event, "step": steps_done, "ranks": list(numbers)})
            try:
                with wrap_peer_errors(REGROUPING):
                    mine = PeerReport(self._completed, whole, in_step, list(held()), self._is_empty)
                    reports = [PeerReport(*each) for each in self.group.all_gather_object(mine)]
                    if any(each.empty for each in reports):
                        self._transfer_state([each.empty for each in reports])
                    return reports
            except PEER_ERRORS as again:
                if not self.membership.is_peer_loss(again):
                    raise

    def _transfer_state(self, empty: Sequence[bool]) -> None:
        """Send the state of the run to the processes that have just joined. All processes call this."""
        mine = {"completed": self._completed, "deaths": self.deaths, "joined": self.joined}
        received = send_state(self.context, self.membership, empty, mine)
        if received is not None:
            self._completed = received["completed"]
            self.deaths, self.joined = received["deaths"], received["joined"]
        self._is_empty = False

    def _regroup(self, first: int, *, torn: bool = False) -> None:
        """Let the processes of the new group run the steps from step `first`."""
        context, progress = self.context, self.context.progress
        context.models.regroup()
        if progress.is_over:
            return
        if self.group.rank == 0 and not self._leads:
            self._leads = True
            context.monitor.lead(progress.steps_done)
            context.on_lead()
        slot, schedule = self._build_slot()
        self.source.reopen(slot, schedule, first)
        self.sync.restart()
        for regrouped in self._hooks:
            regrouped(first, failed=torn)

    # -- processes that join

    def admit_joiners(self) -> None:
        """Let waiting processes join between two steps, and send them the state of the run."""
        self._exchange_reports(PeerLostError(REGROUPING), open_=True)
        self._regroup(self.context.progress.next_step)
        self._report_survived()

    def join(self) -> None:
        """Wait until the other processes admit this process, after a step."""
        self._is_empty = True
        self._exchange_reports(PeerLostError(REGROUPING), open_=True)
        self._regroup(self.context.progress.steps_done)


def is_committed(reports: Sequence[PeerReport], completed: int) -> bool:
    """Return whether a collective is committed: a process has completed it, or all processes hold its result.

    Args:
        reports: the reports of all processes.
        completed: number of collectives that were complete before.
    """
    return any(each.completed > completed for each in reports) or all(each.whole for each in reports)


def build_recovery(
    context: RunContext,
    parts: LoopParts,
    regrouped: Sequence[Hook],
    build_slot: BuildSlot,
) -> StepRecovery | None:
    """Return the recovery of this process; None if a run after a death must continue from the newest checkpoint."""
    membership = membership_of(context.group)
    if membership is None or not may_survive(context) or context.progress.exchange is not None:
        return None
    membership.tolerate_losses(context.mesh.unit)
    return StepRecovery(context, parts, membership, regrouped, build_slot)
