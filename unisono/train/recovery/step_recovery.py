"""When a process dies, the others finish its step: nothing is lost, repeated or left out, and no bit changes.

Everything that processes do together is a meeting: a step's exchange, an evaluation, a checkpoint. It can be
made again until it is committed: its last collective is a tiny one, which nobody can finish unless everybody holds the
result. After a death those who are left form a new group (distributed/membership/membership.py) and say
how many meetings each has behind it, and whether it holds the result of the one it is in:

    somebody has it behind him, or all hold the result     it is committed: go on
    otherwise                                              make it again, together

Of a step that is made again, each process keeps the partial sums that are still whole in its memory; what nobody has is
dealt anew and computed (plan/reassignment.py), and comes out of the loop's own `for batch in step`:

    process 0   v0 v1 v2 | exchange x        | v3 v4 | exchange | update ...        rank 0 of 2
    process 1   v3 killed
    process 2   v6 v7 v8 | exchange x        | v5    | exchange | update ...        rank 1 of 2

A process that is started instead joins at a step's end, and is given what it needs (train/recovery/state_transfer.py).

Where several processes share a model, layer by layer, a death is met in the midst of a forward or a backward pass,
which cannot be left: gathering then gives zeros (Group.attempt), the script goes on to the end of its rounds, and
these are made again, all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from unisono.data.rng import seed_everything
from unisono.distributed.process_group import wrap_peer_errors
from unisono.errors import PeerLostError, WorldError
from unisono.exchange.choose import promise_of, survives
from unisono.plan.assignment import micro_batches_of
from unisono.plan.batch_order import MicroBatchId
from unisono.plan.reassignment import assign_missing
from unisono.plan.reduction_tree import Node
from unisono.plan.rng_keys import micro_batch_key, mix
from unisono.train.balance.rebalance import WORDS, build_dealing
from unisono.train.loop import StepLoop
from unisono.train.recovery.state_transfer import send_state

if TYPE_CHECKING:
    from unisono.distributed.membership.membership import Membership
    from unisono.train.diagnostics.divergence import DivergenceCheck
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.run import Run
    from unisono.train.step import Step

T = TypeVar("T")
Rounds = Iterator[tuple[MicroBatchId, Any, bool]]

GOING_ON = "Going on without a process that died"


class PeerReport(NamedTuple):
    """What a process says of itself after a death."""

    meetings: int  # that it has behind it
    whole: bool  # does it hold the result of the one that it is in?
    in_step: bool  # is that one a step's?
    held: list[int]  # the virtual ranks whose gradients it still has
    empty: bool  # has it just come, and knows nothing yet?


class StepRecovery:
    """How this process goes on when others die, and when some join.

    meetings  how many are behind it
    deaths    (process, steps done then); `joined`: the same of those who came
    """

    def __init__(self, run: Run[Any], company: Membership) -> None:
        self.run, self.company, self.group = run, company, run._group
        self.meetings = 0
        self.deaths: list[dict[str, int]] = []
        self.joined: list[dict[str, int]] = []
        self.empty = False  # have we just come, and know nothing yet?
        self._lost: list[int] = []  # and the launcher has not heard that we go on without them
        self._leads = run.is_main
        self._regrouped = -1  # the step that was under way when the group last changed

    # -- meetings

    def retry_collective(self, what: str, body: Callable[[], T], *, again: bool = True) -> T:
        """`body`, in which all processes do something together; made again if one dies in it. It changes nothing that
        making it again does not change in the same way; or else, not `again`, the death is raised."""
        while True:
            found: list[T] = []
            try:
                with wrap_peer_errors(what):
                    found.append(body())
                    self.group.barrier()
            except (PeerLostError, RuntimeError, ConnectionError) as lost:
                said = self._regroup_peers(lost, whole=bool(found) and not self.company.torn)
                self._regroup(self._next_step)
                if self.run._last_step is not None:  # a later pass of it is dealt otherwise
                    self._regrouped = self.run._last_step.number
                if not committed(said, self.meetings):
                    if not again:
                        raise
                    self.run._models.reshard()
                    continue
            self.report_survived()
            return found[0]

    def report_survived(self) -> None:
        """A meeting is behind us."""
        self.meetings += 1
        self._outlive()

    def _outlive(self) -> None:
        """Who has died meanwhile was survived, which the launcher hears: what fails now does not fail of that."""
        if self._lost:
            self.company.report(survived=self._lost)
            self._lost = []

    def resume_step(self, step: Step, number: int, gradient: GradientPass, lost: Exception) -> Rounds | None:
        """Pass `number` of `step` met a death. The rounds that are missing; None: the gradient is whole everywhere."""
        engine, torn = step._engine, self.company.torn  # then shards were not gathered, and nothing here is good
        whole = gradient.is_whole and not torn
        if torn:
            engine.verification.discard()
        old, held = gradient.exchange, dict[Node, Any]()

        def still_held() -> list[int]:
            held.update({} if whole or torn else old.held())
            return [v for node in held for v in range(*node)]

        said = self._regroup_peers(lost, whole=whole, in_step=True, held=still_held)
        self._regroup(step.number + 1)
        self._regrouped = step.number
        if committed(said, self.meetings):
            gradient.commit()
            return None
        top = all(each.in_step and each.meetings == self.meetings for each in said)
        pieces = engine._pieces(step.number, engine.block)
        engine.models.reshard()  # not before: a gradient that is whole lies where parameters are gathered
        gradient.restart_exchange()
        if not (top and any(each.held for each in said)):  # some have not begun it: then it is an ordinary step
            held.clear()
            spans = engine.schedule.at(step.number)
            ours = list(range(*spans[engine.seat.span]))
            self._begin(step, gradient, spans, spans[engine.seat.span])
        else:
            ours = assign_missing(pieces, [each.held for each in said])[self.group.rank]
            self._begin(step, gradient, (), engine.block)
            dynamic: Any = gradient.exchange
            dynamic.continue_after_death(held, old.used, [v for v in ours if not pieces[v]])
        kept = [v for node in held for v in range(*node)]
        engine.table.keep_partial(step.number, kept)
        engine.models.buffers.keep(kept)
        old.close()
        return self._missing(step, number, gradient, [v for v in ours if pieces[v]])

    def _begin(self, step: Step, gradient: GradientPass, spans: Sequence[tuple[int, int]], of: tuple[int, int]) -> None:
        engine = step._engine
        engine.models.busy = True
        pieces = engine._pieces(step.number, of)
        gradient.begin(spans, pieces, lambda: engine.table.weights(of) * engine.scale.value)

    def _missing(self, step: Step, number: int, gradient: GradientPass, ours: Collection[int]) -> Rounds:
        """The micro-batches of these virtual ranks, fetched out of turn."""
        engine, kept = step._engine, step._kept
        if engine.dealing is not None:
            engine.dealing.begin()

        def rounds() -> Rounds:
            for place in self._places(engine, step.number, ours):
                place, batch = engine._loader.fetch(place)
                if kept is not None and number == 0:
                    kept.append((place, batch))
                if number:
                    seed_everything(mix(micro_batch_key(engine._round_key, *place[:3]), number), engine._accelerator)
                yield place, batch, False

        return engine._walk(rounds(), number, gradient)

    def refetch(self, kept: list[tuple[MicroBatchId, Any]], step: int, pieces: Mapping[int, int]) -> None:
        """Another pass of a step in which the group has changed: its micro-batches are dealt otherwise than before."""
        if self._regrouped != step:
            return
        known, engine = dict(kept), self.run._engine
        assert engine is not None
        places = self._places(engine, step, pieces)
        kept[:] = [(p, known[p]) if p in known else engine._loader.fetch(p) for p in places]

    @staticmethod
    def _places(engine: StepLoop, step: int, virtual_ranks: Iterable[int]) -> list[MicroBatchId]:
        """This process's micro-batches of these, with those who take turns in them."""
        places = [
            MicroBatchId(step, v, n) for v in virtual_ranks for n in range(len(engine.order.micro_bounds(step, v)))
        ]
        return [place for place, _ in micro_batches_of(((place, None) for place in places), engine.seat)]

    # -- a new group

    def _regroup_peers(
        self,
        lost: Exception,
        *,
        whole: bool = False,
        in_step: bool = False,
        held: Callable[[], Sequence[int]] = tuple,
        open_: bool = False,
    ) -> list[PeerReport]:
        """Form a new group with all who are left, and hear from each where it stands. Raises `lost` if it tells of
        something else than a death."""
        if not open_ and not self.company.is_peer_loss(lost):
            raise lost
        while True:
            formed = self.company.regroup(self.group, open_=open_, step=self.run.steps_done)
            self._note(formed.lost, formed.joined)
            try:
                with wrap_peer_errors(GOING_ON):
                    mine = PeerReport(self.meetings, whole, in_step, list(held()), self.empty)
                    said = [PeerReport(*each) for each in self.group.all_gather_object(mine)]
                    if any(each.empty for each in said):
                        send_state(self, [each.empty for each in said])
                        self.empty = False
                    return said
            except (PeerLostError, RuntimeError, ConnectionError) as again:
                if not self.company.is_peer_loss(again):
                    raise

    @property
    def watch(self) -> DivergenceCheck | None:
        return self.run._engine.divergence if self.run._engine is not None else None

    def _note(self, lost: Sequence[int], joined: Sequence[int]) -> None:
        self._lost += lost
        self.deaths += [{"process": number, "step": self.run.steps_done} for number in lost]
        self.joined += [{"process": number, "step": self.run.steps_done} for number in joined]

    @property
    def _next_step(self) -> int:
        """The first step of which this process has fetched nothing, outside of rounds."""
        step = self.run._last_step
        return self.run.steps_done if step is None or step.is_new else step.number + 1

    def _regroup(self, first: int) -> None:
        """From step `first` on the steps are made by the group that there is now."""
        run, engine = self.run, self.run._engine
        run._models.regroup()
        if engine is None or run._over:
            return
        if self.group.rank == 0 and not self._leads:
            self._leads = True
            run._watcher.lead(run.steps_done)
            run.on_lead()
        engine._loader.close()
        engine.seat, engine.schedule = engine.seated(run.settings, run._mesh)
        engine._loader = engine.open_loader(engine.schedule, engine.seat, first)
        engine._batches = iter(engine._loader)
        for gradient in engine._gradients.values():
            gradient.stale = True
        before = engine.dealing.deals if engine.dealing is not None else []
        promise, _ = promise_of(run.settings, self.group.size)
        if self.watch is not None:
            self.watch.doubt()
        engine.dealing = build_dealing(run.settings, run._mesh, engine.schedule, first, promise, run._watcher.note)
        run._table.words = WORDS if engine.dealing is not None else 0
        if engine.dealing is not None:
            engine.dealing.deals = before

    # -- somebody joins

    def admit_joiners(self) -> None:
        """Between two steps: those who wait come in, and are given what they need."""
        self._regroup_peers(PeerLostError(GOING_ON), open_=True)
        self._regroup(self._next_step)
        self._outlive()

    def join(self) -> None:
        """We come in addition, and know nothing: wait until the others let us in at a step's end."""
        self.empty = True
        self._regroup_peers(PeerLostError(GOING_ON), open_=True)
        self._regroup(self.run.steps_done)


def committed(said: Sequence[PeerReport], meetings: int) -> bool:
    """Is the meeting after so many known to be over? Somebody has it behind him, or all hold its result."""
    return any(each.meetings > meetings for each in said) or all(each.whole for each in said)


def build_survivors(run: Run[Any]) -> StepRecovery | None:
    """Who goes on when a process dies; None, where nobody can: then the newest checkpoint is the way."""
    company, engine = run._group.company, run._engine
    if company is None or not may_survive(run) or (engine is not None and engine.own is not None):
        return None
    company.watch(run._mesh.unit)
    return StepRecovery(run, company)


def may_survive(run: Run[Any]) -> bool:
    """Can those who are left go on without a process that dies, as far as the settings tell? (An audit compares what
    processes have made that were there before. Of a model that lies over several, another replica must be there; its
    buddies hold what they were told of the group that is gone; and torch puts it together by collectives of its own,
    which on an accelerator nobody could leave.)"""
    settings, axes, company = run.settings, run._mesh.axes, run._group.company
    if company is None:
        return False
    replicas = (
        axes.replicate > 1 and axes.replicate * axes.shard == axes.size and not settings.parallel.replicate_shards
    )
    whole = run._mesh.torchs is None
    plain = run._kind is StepLoop and not settings.audit_every and (whole or (replicas and not company.late))
    return plain and settings.virtual_ranks > 1 and survives(settings)


def join(survivors: StepRecovery | None) -> None:
    """A loop begins in a process that comes in addition: wait until the others let it in."""
    if survivors is None:
        raise WorldError(
            "A process was to join a run that is in the midst of it.",
            "Its settings ask for something that no process can join later.",
            "go on from the newest checkpoint: the same command with --resume.",
        )
    survivors.join()
