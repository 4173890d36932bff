"""Verification: a run checks, while it trains, that its promise holds.

    step 0, 1, 2, 4, 8, ...   process 0                process 1
    before the rounds                                  v3, in spare rounds      another process, or another order
    the rounds                v0 v1 v2 v3              v4 v5 v6 v7
    after the exchange        v3 = v3?  samples, losses, gradients              of one virtual rank
                              sum along the tree = p.grad?                      of a few parameters, all virtual ranks
    the update                rows of the whole parameter's update = the update of the rows?     under parallel.shard

Placement is free, so nothing of this changes the result. Something differs if the script keeps state outside the model,
if a kernel's rounding depends on an address, if an optimizer does not go element by element, or by a defect of ours.
The run then stops, or it lowers its promise (`promise.on_violation`), and says what differed and why (causes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from unisono import phases
from unisono.config.wording import plural
from unisono.distributed.process_group import wrap_peer_errors
from unisono.errors import PromiseBrokenError
from unisono.plan.batch_order import MicroBatchId
from unisono.tensors.digest import content_digest
from unisono.train.spare_rounds import gradients_aside, spare_rounds
from unisono.train.step_sync import LOSS
from unisono.train.verification import causes
from unisono.train.verification.attribute_text import attributes_of
from unisono.train.verification.causes import Cause
from unisono.train.verification.diagnosis import diagnose
from unisono.train.verification.gradient_observer import listening
from unisono.train.verification.gradient_sums import GradientSums
from unisono.train.verification.no_verification import NOT_VERIFIED, NoVerification
from unisono.train.verification.pass_record import Facts, PassRecord
from unisono.train.verification.sharded_update import ShardedUpdate
from unisono.train.verification.spare_batches import FetchFailed, SpareBatches

if TYPE_CHECKING:
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.loop import StepLoop
    from unisono.train.run import Run
    from unisono.train.step import Step

T = TypeVar("T")
Rounds = Iterator[tuple[MicroBatchId, Any, bool]]

WHAT = "The verification of the promise"

STOPS_BEFORE = 10
"""With promise.on_violation=auto, a promise that does not hold before this step stops the run; later it is lowered."""

DIFFERS = {"samples": "other samples", "loss": "another loss", "gradient": "another gradient"}
"""In the order in which one follows from the other."""


@dataclass
class CheckedStep:
    """A step that is verified, on this process.

    turn    goes up from one verified step to the next
    first   with one process, now and then, a virtual rank that is computed before it
    attributes  of the models, when the step begins and whenever the virtual rank is computed
    before  what spare rounds gave; None: this process had none
    inside  what the step's own rounds gave; None: this process did not compute the virtual rank
    """

    step: int
    virtual_rank: int
    turn: int
    first: int | None = None
    attributes: list[Mapping[str, str]] = field(default_factory=list)
    before: PassRecord | None = None
    inside: PassRecord | None = None
    sums: GradientSums | None = None


ALWAYS = (0, 1, 2, 4, 8)
"""Steps, counted from where this run began or was resumed, that are verified whatever the time."""


def is_early(offset: int) -> bool:
    """Return whether the step this many steps after the first one is verified without regard to time."""
    return offset in ALWAYS


def is_candidate(offset: int, *, begins_epoch: bool) -> bool:
    """Return whether a later step is verified if the last verification is long enough ago."""
    return begins_epoch or (offset > 0 and offset & (offset - 1) == 0)


class Verification:
    """The verification of one process. Every process of the run has one, or none has.

    steps   how many steps were verified
    broken  why the promise was lowered, and from which step on; "": it holds as far as is known
    """

    def __init__(self, engine: StepLoop, run: Run[Any]) -> None:
        self.engine, self.settings = engine, run.settings.promise
        self.batches = SpareBatches(engine)
        self.steps, self.broken = 0, ""
        self._run, self._watcher = run, run._watcher
        self._first = 0 if run.waits else run.steps_done
        self._now: CheckedStep | None = None
        self._update: ShardedUpdate | None = None
        self._spare: PassRecord | None = None  # what the spare rounds under way are noted in
        self._together = False  # do all processes verify the step under way?
        self._last_at: float | None = None
        mesh = engine.mesh
        self._shards = mesh.shard.size > 1
        self._recomputes = engine.order.virtual_ranks > 1 and mesh.pipeline.size == mesh.context.size == 1
        self.alone = not self._shards and mesh.tensor.size == 1
        """Can this process compute without others?"""

    # -- which step, and which virtual rank

    def is_due(self, step: int) -> bool:
        """Return whether this process verifies the step. Processes that share a model agree about it."""
        offset = step - self._first
        if self.broken:
            return False
        if is_early(offset):
            return True
        begins_epoch = self.alone and step % self.engine.order.steps_per_epoch == 0
        if not is_candidate(offset, begins_epoch=begins_epoch):
            return False
        return not self.alone or self._last_at is None or time.monotonic() - self._last_at >= self.settings.min_interval

    def _plan(self, step: int) -> tuple[CheckedStep, bool]:
        """Return what is verified in this step, and whether this process computes it beforehand as well."""
        engine, turn = self.engine, step.bit_length()
        spans, busy = engine.schedule.at(step), dict[int, list[int]]()
        for seat, span in enumerate(spans):
            if found := [v for v in range(*span) if engine.order.micro_bounds(step, v)]:
                busy[seat] = found
        owner = list(busy)[turn % len(busy)]
        odd, alone = turn % 2 == 1, len(spans) == 1
        virtual_rank = busy[owner][0 if odd and not alone else -1]  # alone: after all others, so the order is another
        others = busy[owner][:-1]
        first = others[turn % len(others)] if odd and alone and others else None
        checked = CheckedStep(step, virtual_rank, turn, first, [attributes_of(engine.models.modules)])
        return checked, engine.seat.span == (owner + 1) % len(spans)

    # -- the rounds

    @property
    def active(self) -> bool:
        """Return whether this process verifies the step under way."""
        return self._now is not None

    def before(self, step: Step, gradient: GradientPass) -> Iterator[Any]:
        """Yield the spare rounds that come before the step's own, if this process has any."""
        self._now = self._update = None
        if not self.is_due(step.number):
            return
        self._now, helps = self._plan(step.number)
        self._last_at = time.monotonic()
        if not self._recomputes:
            return
        gradient.prepare()
        if helps:
            if self._now.first is not None:
                with gradients_aside(gradient), listening(gradient, ignore, spare=True):
                    yield from spare_rounds(step, gradient, self._now.first)
            self._now.before = self.noted(gradient)
            try:
                yield from self.rounds(step, gradient, self._now.before, self.batches.fetch_otherwise)
            except FetchFailed as unfetched:
                if not self.alone:  # others wait in the same rounds
                    raise unfetched.error from None
                self._now.before = self._spare = None  # the step's own fetch reports the error, if it has it too

    def rounds(
        self, step: Step, gradient: GradientPass, noted: PassRecord, fetch: Callable[[MicroBatchId], Any]
    ) -> Iterator[Any]:
        """Yield the verified virtual rank's micro-batches as spare rounds, and note what comes of them."""
        assert self._now is not None
        number = 0

        def note(parameter: int, grad: torch.Tensor) -> None:
            noted.gradient(number, parameter, grad)

        self._spare = noted
        with gradients_aside(gradient), listening(gradient, note, spare=True):
            for batch in spare_rounds(step, gradient, self._now.virtual_rank, fetch):
                assert step._place is not None
                number = step._place.number
                self._look(self._now, number)
                noted.begin(number, content_digest(batch))
                yield batch
        self._spare = None

    def noted(self, gradient: GradientPass) -> PassRecord:
        """Return an empty record of one virtual rank, on this process."""
        return PassRecord(len(gradient.leaves), self.engine.mesh.tensor.rank)

    def watched(self, step: Step, gradient: GradientPass, rounds: Rounds) -> Rounds:
        """Return the step's own rounds; if the step is verified, what comes of them is noted."""
        return rounds if self._now is None or not self._recomputes else self._watch(step, gradient, rounds, self._now)

    def _watch(self, step: Step, gradient: GradientPass, rounds: Rounds, checked: CheckedStep) -> Rounds:
        sums = checked.sums = self._sums(gradient, checked)

        def note(parameter: int, grad: torch.Tensor) -> None:
            place = step._place
            if place is None or place.spare or phases.now() != "backward":  # torch.autograd.grad calls hooks, too
                return
            if place.virtual_rank == checked.virtual_rank and checked.inside is not None:
                checked.inside.gradient(place.number, parameter, grad)
            if sums is not None:
                sums.note(place, parameter, grad)

        with listening(gradient, note, spare=False):
            for place, batch, last in rounds:
                if sums is not None and not place.spare:
                    sums.begin(place)
                if place.virtual_rank == checked.virtual_rank and not place.spare:
                    checked.inside = checked.inside or self.noted(gradient)
                    checked.inside.begin(place.number, content_digest(batch))
                    self._look(checked, place.number)
                yield place, batch, last

    def _look(self, checked: CheckedStep, number: int) -> None:
        """Keep what the models' attributes are, before the first micro-batch of the virtual rank."""
        if number == 0:
            checked.attributes.append(attributes_of(self.engine.models.modules))

    def _sums(self, gradient: GradientPass, checked: CheckedStep) -> GradientSums | None:
        """Only of an exchange that adds along the tree is the sum known."""
        settings = self.engine.settings
        if self.engine.own is not None or settings.exchange != "tree" or settings.compress.kind != "none":
            return None
        return GradientSums(self.engine.order, checked.step, gradient, checked.turn)

    def heard(self, place: MicroBatchId, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Note the loss of a backward pass."""
        if place.spare:
            if self._spare is not None:
                self._spare.loss(place.number, loss, weight)
        elif self._now is not None and self._now.inside is not None and place.virtual_rank == self._now.virtual_rank:
            self._now.inside.loss(place.number, loss, weight)

    def discard(self) -> None:
        """Forget what this process noted in the step under way: a peer died, and layers were no longer gathered."""
        if self._now is not None:
            self._now.before = self._now.inside = None

    # -- after the exchange

    def agree(self, count: int, size: int) -> None:
        """So many of `size` processes verify the step under way: all of them, or it is not verified."""
        self._together = count == size

    def after(self, step: Step, gradient: GradientPass, sums: Mapping[str, tuple[float, float]]) -> Iterator[Any]:
        """Compare, now that the gradient is whole on every process. Yields more spare rounds if something differs.

        Raises PromiseBrokenError on every process, if the run is to stop.
        """
        checked = self._now
        if checked is None or not self._together:
            self._now = None
            return
        self.steps += 1
        if self._recomputes:
            weight = sums[LOSS][1] * self.engine.scale.value
            yield from self._compare(step, gradient, checked, self._meet(lambda: self._gather(checked, weight)))
        if self._shards and not self.broken and self.engine.mesh.tensor.size == 1:
            first = self.steps == 1
            self._update = ShardedUpdate(self.engine.models, self.engine.mesh.shard, checked.turn, random=first)
            self._update.begin()

    def _gather(self, checked: CheckedStep, weight: float) -> tuple[list[Facts], list[int], str]:
        """Return what every process noted of the virtual rank, the parameters whose sum differs, and how the data set
        differs from one read to the next."""
        mine = [noted.facts() for noted in (checked.before, checked.inside) if noted is not None]
        differing = [] if checked.sums is None else checked.sums.differing(weight, self.engine.mesh.data)
        rows = self.engine.mesh.world.all_gather_object([mine, differing, self.batches.differs])
        facts = [each for of, _, _ in rows for each in of]
        return (
            facts,
            sorted({number for _, of, _ in rows for number in of}),
            next((row[2] for row in rows if row[2]), ""),
        )

    def _compare(
        self,
        step: Step,
        gradient: GradientPass,
        checked: CheckedStep,
        met: tuple[list[Facts], list[int], str],
    ) -> Iterator[Any]:
        facts, differing, reads = met
        kind = "samples" if reads == "data" else first_difference(facts)
        virtual_rank = f"virtual rank {checked.virtual_rank} of step {step.number}"
        what = "" if kind is None else f"A second computation of {virtual_rank} has {DIFFERS[kind]}"
        if kind == "samples":
            self._report(step.number, what, "", causes.DATA)
        elif reads == "worker":
            self._report(step.number, f"A loader worker gives other samples for {virtual_rank}", "", causes.WORKER)
        elif kind is not None:
            found = yield from diagnose(self, step, gradient, checked, kind)
            self._report(step.number, what, found.where, found.cause)
        elif differing:
            name = self.engine.models.names.get(id(gradient.params[differing[0]]), "a parameter")
            what = f"The gradient of {name} in step {step.number} is not the sum along the tree"
            count = f"{len(differing)} of {plural(len(gradient.params), 'parameter')} differ."
            self._report(step.number, what, count, causes.EXCHANGE)

    def _meet(self, body: Callable[[], T]) -> T:
        """Do something together with all processes; again without one that dies in it, if the others survive that."""
        survivors = self.engine.survivors
        if survivors is not None:
            return survivors.retry_collective(WHAT, body)
        with wrap_peer_errors(WHAT):
            return body()

    # -- the update

    def stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        """Return a block in which an optimizer steps."""
        return nullcontext() if self._update is None else self._update.stepping(optimizer)

    def end(self, step: int) -> None:
        """The step is over. Raises PromiseBrokenError on every process, if its update differs and the run is to
        stop."""
        update, self._update = self._update, None
        if update is None:
            return
        update.end()
        found_by_rank = self._meet(lambda: self.engine.mesh.world.all_gather_object(update.found))
        for what, cause in (found for of in found_by_rank for found in of):
            self._report(step, f"{what}, in step {step}", "", Cause(*cause))

    def close(self) -> None:
        """Stop looking at the script's operators."""
        if self._update is not None:
            self._update.end()
            self._update = None

    # -- what is said

    def _report(self, step: int, what: str, facts: str, cause: Cause) -> None:
        """Stop the run, or lower its promise."""
        if self.broken or self._run.promise()[0] != "exact":
            return
        self.broken = f"from step {step} on: {what[0].lower()}{what[1:]} ({cause.name})"
        self._watcher.event({"promise": "tolerance", "step": step, "cause": cause.name, "reason": what})
        stops = self.settings.on_violation == "stop" or (self.settings.on_violation == "auto" and step < STOPS_BEFORE)
        asked, true = f"{what}, so the promise of equal bits does not hold.", f"{facts} {cause.said}".strip()
        if stops:
            raise PromiseBrokenError(
                asked, true, f"{cause.do}; or go on with the promise lowered: --set promise.on_violation=warn"
            )
        self._watcher.note(f"promise  tolerance from step {step} on. {asked}\n  {true}\n  Next: {cause.do}.")


def ignore(parameter: int, grad: torch.Tensor) -> None:
    """Note nothing of a gradient."""


def first_difference(facts: Sequence[Facts]) -> str | None:
    """Return what differs first between processes that computed the same micro-batches: a key of DIFFERS, or None."""
    for place, kind in enumerate(DIFFERS):
        seen: dict[str, Any] = {}
        for number, fact in (item for of in facts for item in of.items()):
            if seen.setdefault(number, fact[place]) != fact[place]:
                return kind
    return None


def build_verification(engine: StepLoop, run: Run[Any], promise: str) -> Verification | NoVerification:
    """Return the verification of a run.

    Return NOT_VERIFIED where the setting is off, where the promise is less than exact, where machines differ, and for a
    run that inspects a script (`unisono check`, `prove`, `audit`, `replay`).
    """
    from unisono.train.loop import StepLoop as Plain

    several = engine.order.virtual_ranks > 1 or engine.mesh.shard.size > 1
    alike = not run.differences and not engine.mesh.world.mixed
    apt = promise == run.promise()[0] == "exact" and run._kind is Plain and several and alike
    if not (run.settings.promise.check and apt):
        return NOT_VERIFIED
    return Verification(engine, run)
