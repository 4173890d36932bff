"""Verification: a run checks, while it trains, that its promise holds.

    step 0, 1, 2, 4, 8, ...   process 0                process 1
    before the rounds                                  v3, in spare rounds      another process, or another order
    the rounds                v0 v1 v2 v3              v4 v5 v6 v7
    after the exchange        v3 = v3?  samples, losses, gradients              of one virtual rank
                              sum along the tree = p.grad?                      of a few parameters, all virtual ranks
    the update                rows of the whole parameter's update = the update of the rows?     under parallel.shard

Placement is free, so no part of this changes the result. A difference has one of these causes: the script keeps state
outside the model, a kernel's rounding depends on an address, an optimizer is not elementwise, or Unisono has a defect.
The run then stops, or it lowers its promise (`promise.on_violation`), and reports the difference and its cause
(causes.py).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unisono import phases
from unisono.config.wording import plural
from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.errors import PromiseBrokenError
from unisono.exchange.choose import promise_of
from unisono.tensors.digest import content_digest
from unisono.train.batches.spare_rounds import Fetch, SpareRounds, gradients_aside
from unisono.train.collective import Rounds
from unisono.train.context import LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.guarantees.promise import promise
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS
from unisono.train.verification import causes
from unisono.train.verification.attribute_text import attributes_of
from unisono.train.verification.causes import Cause
from unisono.train.verification.checked_step import CheckedStep
from unisono.train.verification.diagnosis import diagnose
from unisono.train.verification.gradient_observer import listening
from unisono.train.verification.gradient_sums import GradientSums
from unisono.train.verification.pass_record import Facts, PassRecord
from unisono.train.verification.sharded_update import ShardedUpdate
from unisono.train.verification.spare_batches import FetchFailed, SpareBatches

WHAT = "The verification of the promise"

STOPS_BEFORE = 10
"""With promise.on_violation=auto, a promise that does not hold before this step stops the run; later it is lowered."""

DIFFERS = {"samples": "other samples", "loss": "another loss", "gradient": "another gradient"}
"""The kinds of differences. Each one can cause the next."""


ALWAYS = (0, 1, 2, 4, 8)
"""Steps that are always verified, counted from the first step of this run or of the resumed run."""


def is_early(offset: int) -> bool:
    """Return whether the step this many steps after the first one is always verified."""
    return offset in ALWAYS


def is_candidate(offset: int, *, begins_epoch: bool) -> bool:
    """Return whether a later step is verified if the last verification is long enough ago."""
    return begins_epoch or (offset > 0 and offset & (offset - 1) == 0)


class Verification(Extension):
    """The verification of one process. Either every process of the run has one, or none has.

    steps   number of verified steps
    alone   whether this process computes micro-batches without others
    """

    def __init__(self, context: RunContext, parts: LoopParts) -> None:
        self.context, self.parts, self.settings = context, parts, context.settings.promise
        self.models = context.models
        self.batches = SpareBatches(parts.source, workers=context.settings.loader.workers)
        self.spare = SpareRounds(parts.source, context.models, parts.checks)
        self.steps = 0
        self._first = 0 if context.waits else context.progress.steps_done
        self._now: CheckedStep | None = None
        self._update: ShardedUpdate | None = None
        self._record: PassRecord | None = None  # the record of the current spare rounds
        self._last_at: float | None = None
        mesh = context.mesh
        self._has_shards = mesh.shard.size > 1
        self._recomputes = context.settings.virtual_ranks > 1 and mesh.pipeline.size == mesh.context.size == 1
        self.alone = not self._has_shards and mesh.tensor.size == 1

    @property
    def world(self) -> ProcessGroup:
        """The processes that verify together."""
        return self.parts.sync.group

    # -- which step, and which virtual rank

    def is_due(self, step: int) -> bool:
        """Return whether this process verifies the step. Processes that share a model agree about it."""
        offset = step - self._first
        if self.context.progress.broken_promise:
            return False
        if is_early(offset):
            return True
        begins_epoch = self.alone and step % self.parts.source.order.steps_per_epoch == 0
        if not is_candidate(offset, begins_epoch=begins_epoch):
            return False
        return not self.alone or self._last_at is None or time.monotonic() - self._last_at >= self.settings.min_interval

    def _plan(self, step: int) -> tuple[CheckedStep, bool]:
        """Return an empty record for the step, and whether this process also computes the virtual rank beforehand."""
        source, turn = self.parts.source, step.bit_length()
        spans, busy = source.schedule.at(step), dict[int, list[int]]()
        for slot, span in enumerate(spans):
            if found := [v for v in range(*span) if source.order.micro_bounds(step, v)]:
                busy[slot] = found
        owner = list(busy)[turn % len(busy)]
        odd, alone = turn % 2 == 1, len(spans) == 1
        virtual_rank = busy[owner][0 if odd and not alone else -1]  # alone: after all others, so that the order differs
        others = busy[owner][:-1]
        first = others[turn % len(others)] if odd and alone and others else None
        checked = CheckedStep(step, virtual_rank, turn, first, [attributes_of(self.models.modules)])
        return checked, source.slot.span == (owner + 1) % len(spans)

    # -- the rounds

    def extra_rounds(self, step: StepState, gradient: GradientPass) -> Iterator[Any]:
        """Yield the spare rounds that come before the step's own, if this process has any."""
        self._now = self._update = None
        if not self.is_due(step.number):
            return
        self._now, helps = self._plan(step.number)
        step.is_verified = True
        self._last_at = time.monotonic()
        if not self._recomputes:
            return
        gradient.prepare()
        if helps:
            if self._now.first is not None:
                with gradients_aside(gradient), listening(gradient, ignore, spare=True):
                    yield from self.spare.rounds(step, gradient, self._now.first)
            self._now.before = self.record(gradient)
            try:
                yield from self.compute(step, gradient, self._now.before, self.batches.fetch_otherwise)
            except FetchFailed as unfetched:
                if not self.alone:  # other processes wait in the same rounds
                    raise unfetched.error from None
                self._now.before = self._record = None  # the step's own fetch reports the error, if it fails, too

    def compute(self, step: StepState, gradient: GradientPass, record: PassRecord, fetch: Fetch) -> Iterator[Any]:
        """Yield the verified virtual rank's micro-batches as spare rounds, and record their results."""
        assert self._now is not None
        number = 0

        def note(parameter: int, grad: torch.Tensor) -> None:
            record.gradient(number, parameter, grad)

        self._record = record
        with gradients_aside(gradient), listening(gradient, note, spare=True):
            for batch in self.spare.rounds(step, gradient, self._now.virtual_rank, fetch):
                assert step.place is not None
                number = step.place.number
                self._look(self._now, number)
                record.begin(number, content_digest(batch))
                yield batch
        self._record = None

    def record(self, gradient: GradientPass) -> PassRecord:
        """Return an empty record of one virtual rank, on this process."""
        return PassRecord(len(gradient.leaves), self.context.mesh.tensor.rank)

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        """Return the step's own rounds, and record their results if the step is verified."""
        if step.passes or self._now is None or not self._recomputes:
            return rounds
        return self._watch(step, gradient, rounds, self._now)

    def _watch(self, step: StepState, gradient: GradientPass, rounds: Rounds, checked: CheckedStep) -> Rounds:
        sums = checked.sums = self._sums(gradient, checked)

        def note(parameter: int, grad: torch.Tensor) -> None:
            place = step.place
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
                    checked.inside = checked.inside or self.record(gradient)
                    checked.inside.begin(place.number, content_digest(batch))
                    self._look(checked, place.number)
                yield place, batch, last

    def _look(self, checked: CheckedStep, number: int) -> None:
        """Save the models' attributes before the first micro-batch of the virtual rank."""
        if number == 0:
            checked.attributes.append(attributes_of(self.models.modules))

    def _sums(self, gradient: GradientPass, checked: CheckedStep) -> GradientSums | None:
        """Return the sums of gradients, or None if the exchange does not add along the tree."""
        settings = self.context.settings
        is_custom = self.context.progress.exchange is not None
        if is_custom or settings.exchange != "tree" or settings.compress.kind != "none":
            return None
        return GradientSums(self.parts.source.order, checked.step, gradient, checked.turn)

    def backward(self, step: StepState, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Record the loss of a backward pass."""
        place = step.place
        assert place is not None
        if place.spare:
            if self._record is not None:
                self._record.loss(place.number, loss, weight)
        elif self._now is not None and self._now.inside is not None and place.virtual_rank == self._now.virtual_rank:
            self._now.inside.loss(place.number, loss, weight)

    def regrouped(self, first: int, *, failed: bool) -> None:
        if failed and self._now is not None:  # the layers are no longer gathered
            self._now.before = self._now.inside = None

    # -- after the exchange

    def closing_rounds(self, step: StepState, gradient: GradientPass) -> Iterator[Any]:
        """Compare, after the gradient is complete on every process. Yield more spare rounds if something differs.

        Raises:
            PromiseBrokenError: something differs and the run has to stop. All processes raise the error.
        """
        checked = self._now
        if checked is None or step.totals.flags["verified"] != self.world.size:  # not all processes verify this step
            self._now = None
            return
        self.steps += 1
        if self._recomputes:
            weight = step.sums[LOSS][1] * self.parts.sync.scale.value
            found = self.context.collective.run(WHAT, lambda: self._gather(checked, weight))
            yield from self._compare(step, gradient, checked, found)
        if self._has_shards and not self.context.progress.broken_promise and self.context.mesh.tensor.size == 1:
            shard, random = self.context.mesh.shard, self.steps == 1
            self._update = ShardedUpdate(self.models, shard, checked.turn, random=random)
            self._update.begin()

    def _gather(self, checked: CheckedStep, weight: float) -> tuple[list[Facts], list[int], str]:
        """Return all records of the virtual rank, the parameters whose sum differs, and differences of the data.

        The last one compares two reads of the data set.
        """
        mine = [record.facts() for record in (checked.before, checked.inside) if record is not None]
        differing = [] if checked.sums is None else checked.sums.differing(weight, self.parts.sync.mesh.data)
        with wrap_peer_errors(WHAT):
            rows = self.world.all_gather_object([mine, differing, self.batches.differs])
        facts = [each for of, _, _ in rows for each in of]
        return (
            facts,
            sorted({number for _, of, _ in rows for number in of}),
            next((row[2] for row in rows if row[2]), ""),
        )

    def _compare(
        self,
        step: StepState,
        gradient: GradientPass,
        checked: CheckedStep,
        found: tuple[list[Facts], list[int], str],
    ) -> Iterator[Any]:
        facts, differing, reads = found
        kind = "samples" if reads == "data" else first_difference(facts)
        virtual_rank = f"virtual rank {checked.virtual_rank} of step {step.number}"
        what = "" if kind is None else f"A second computation of {virtual_rank} has {DIFFERS[kind]}"
        if kind == "samples":
            self._report(step.number, what, "", causes.DATA)
        elif reads == "worker":
            self._report(step.number, f"A loader worker gives other samples for {virtual_rank}", "", causes.WORKER)
        elif kind is not None:

            def again(fetch: Fetch) -> Generator[Any, None, Facts]:
                record = self.record(gradient)
                yield from self.compute(step, gradient, record, fetch)
                return record.facts()

            computed_here = checked.before is not None or checked.inside is not None
            compute = again if self.alone and computed_here else None
            batches, models = self.batches, self.models
            diagnosis = yield from diagnose(compute, batches, self.world, models, gradient, checked, kind)
            self._report(step.number, what, diagnosis.where, diagnosis.cause)
        elif differing:
            name = self.models.names.get(id(gradient.params[differing[0]]), "a parameter")
            what = f"The gradient of {name} in step {step.number} is not the sum along the tree"
            count = f"{len(differing)} of {plural(len(gradient.params), 'parameter')} differ."
            self._report(step.number, what, count, causes.EXCHANGE)

    # -- the update

    def stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        """Return a block in which an optimizer steps."""
        return nullcontext() if self._update is None else self._update.stepping(optimizer)

    def after_step(self, step: StepState) -> None:
        """Compare the step's update. Raise PromiseBrokenError on all processes if it differs and the run must stop."""
        update, self._update = self._update, None
        if update is None:
            return
        update.end()

        def exchange() -> list[Any]:
            with wrap_peer_errors(WHAT):
                return self.world.all_gather_object(update.found)

        by_rank = self.context.collective.run(WHAT, exchange)
        for what, cause in (found for of in by_rank for found in of):
            self._report(step.number, f"{what}, in step {step.number}", "", Cause(*cause))

    def close(self) -> None:
        """Stop observing the script's operators."""
        if self._update is not None:
            self._update.end()
            self._update = None

    def result(self) -> Mapping[str, Any]:
        return {"verified_steps": self.steps}

    # -- messages

    def _report(self, step: int, what: str, facts: str, cause: Cause) -> None:
        """Stop the run, or lower its promise."""
        progress, monitor = self.context.progress, self.context.monitor
        if progress.broken_promise or promise(self.context)[0] != "exact":
            return
        progress.broken_promise = f"from step {step} on: {what[0].lower()}{what[1:]} ({cause.name})"
        monitor.event({"promise": "tolerance", "step": step, "cause": cause.name, "reason": what})
        stops = self.settings.on_violation == "stop" or (self.settings.on_violation == "auto" and step < STOPS_BEFORE)
        first, true = f"{what}, so the promise of equal bits does not hold.", f"{facts} {cause.said}".strip()
        if stops:
            raise PromiseBrokenError(
                first, true, f"{cause.remedy}; or continue with a lowered promise: --set promise.on_violation=warn"
            )
        monitor.note(f"promise  tolerance from step {step} on. {first}\n  {true}\n  Next: {cause.remedy}.")


def ignore(parameter: int, grad: torch.Tensor) -> None:
    """Ignore a gradient."""


def first_difference(facts: Sequence[Facts]) -> str | None:
    """Return the first difference between processes that computed the same micro-batches: a key of DIFFERS, or None."""
    for place, kind in enumerate(DIFFERS):
        seen: dict[str, Any] = {}
        for number, fact in (item for of in facts for item in of.items()):
            if seen.setdefault(number, fact[place]) != fact[place]:
                return kind
    return None


def build_verification(context: RunContext, parts: LoopParts) -> list[Verification]:
    """Build the verification of a run.

    There is none in these cases: the setting is off; the promise is less than exact; machines differ; processes have
    different roles; or the run inspects a script (`unisono check`, `prove`, `audit`, `replay`).
    """
    settings, mesh = context.settings, context.mesh
    several = settings.virtual_ranks > 1 or mesh.shard.size > 1
    is_plain = context.loop.is_uniform and context.inspection is None
    alike = not context.progress.differences and not mesh.world.mixed
    exchange, _ = context.progress.exchange or promise_of(settings, context.group.size)
    is_exact = exchange == promise(context)[0] == "exact"
    if not (settings.promise.check and is_exact and is_plain and several and alike):
        return []
    return [Verification(context, parts)]
