"""One optimizer step, as the loop sees it. This file is the contract of the loop; docs/loop.md tells it in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from unisono import phases
from unisono.distributed.process_group import wrap_peer_errors
from unisono.errors import LoopError, PeerLostError
from unisono.plan.batch_order import MicroBatchId
from unisono.train.context_rounds import context_rounds
from unisono.train.evaluation.model_outputs import Forward, call, parts
from unisono.train.guarantees.user_errors import check_loss, explain_step_errors
from unisono.train.optimization.sharded_step import on_local_shards
from unisono.train.step_sync import LOSS
from unisono.train.verification.no_verification import NOT_VERIFIED

if TYPE_CHECKING:
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.loop import StepLoop

LossFunction = Callable[..., tuple[torch.Tensor, "float | torch.Tensor"]]

AGAIN = "for several walks a step, with an update after each: for batch in step.over(optimizer)."
FROM_SETTINGS: Any = type("FromSettings", (), {"__repr__": lambda _: "the setting"})()


class Step:
    """One step: iterate over it once, call `backward` once in each round, then `update`. Or the same with `over`.

    number   of the step, from 0
    epoch    that it belongs to, from 0
    samples  in its global batch, over all processes
    skipped  was an update left out, because fp16's scale was too high for its gradient? The same on every process
    """

    skipped: bool = False
    _place: MicroBatchId | None = None  # of the micro-batch whose round it is
    _ready = False  # may `backward` be called?
    _state = "new"  # -> "walking" -> "whole" -> "updated"; or "broken"
    _gradient: GradientPass | None = None  # of the pass that was walked last
    _waiting: Sequence[GradientPass] = ()  # whole, and no optimizer has used them
    _passes = 0
    _kept: list[tuple[MicroBatchId, Any]] | None = None  # this process's micro-batches, for more than one pass
    _sums: Mapping[str, tuple[float, float]] = MappingProxyType({})
    _grad_norm: float | None = None

    def __init__(self, engine: StepLoop, number: int) -> None:
        self._engine = engine
        self.number = number
        self.samples = engine.order.batch_size(number)
        phases.begin_step(number)

    @property
    def epoch(self) -> int:
        return self._engine.order.epoch(self.number)

    @property
    def counts(self) -> bool:
        """Return whether this round counts: False in one that is computed a second time, to check the promise."""
        return self._place is None or not self._place.spare

    # -- the loop over micro-batches

    def __iter__(self) -> Iterator[Any]:
        """This process's micro-batches of the step. When it ends, the gradient is whole on every process."""
        self._refuse_pipeline("was iterated over")
        return self._begin(self._first_gradient())

    def _first_gradient(self) -> GradientPass:
        if self._state != "new":
            raise self._breach("was iterated over twice", "Each of its micro-batches is computed once.", AGAIN)
        return self._engine.gradient_of(None)

    def over(self, *optimizers: Any) -> Iterator[Any]:
        """The step's micro-batches, for the parameters of these optimizers only: a pass. There may be several a step,
        one after the other: generator and discriminator, or two models.

        Each pass has its own gradient, exchange, loss, weights and randomness. What the loss depends on beside these
        parameters gets no gradient. Call `update` with the optimizers after each pass, or once after all.
        Raises LoopError inside another pass, or if an earlier one's gradient waits for its update.
        """
        self._refuse_pipeline("began a pass for some parameters")
        if self._state not in ("new", "whole", "updated") or (self._passes and self._kept is None):
            raise self._breach("began another pass inside of one", "A pass begins when the last one is whole.", AGAIN)
        gradient = self._engine.gradient_of(optimizers, waiting=bool(self._waiting))
        ours = {id(p) for p in gradient.params}
        if any(id(p) in ours for other in self._waiting for p in other.params):
            raise self._breach(
                "began a pass over the same parameters again",
                "The gradient of an earlier pass is whole, and no optimizer used it.",
                "call step.update(optimizer) after the pass, or add the losses up in one.",
            )
        if self._kept is None:
            self._kept = []
        return self._begin(gradient)

    def run(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        *,
        forward: Forward | None = None,
        mean: bool = False,
        over: Sequence[Any] = (),
    ) -> None:
        """The rounds as one call: forward, loss and backward of every micro-batch of this process.

        loss_fn  loss_fn(output, *batch) -> (sum, weight), as `backward` takes them; a mapping is passed as one thing
        forward  forward(model, batch) -> output; by default model(batch[0]), or model(**batch) for a mapping
        mean     the loss is a mean over `weight` things
        over     optimizers, if the pass is for their parameters only
        """
        if self._engine.models.pipeline is not None and not over:
            self._gradient, self._grad_norm, self._state = self._first_gradient(), None, "walking"
            self._engine.models.pipeline.train(self, self._gradient, model, loss_fn, forward, mean)
            self._meet(self._gradient, 0)
            return
        for batch in self.over(*over) if over else self:
            loss, weight = loss_fn((forward or call)(model, batch), *parts(batch))
            self.backward(loss, weight, mean=mean)

    def _begin(self, gradient: GradientPass) -> Iterator[Any]:
        self._gradient, self._grad_norm = gradient, None
        self._state = "walking"
        return self._rounds(gradient)

    def _rounds(self, gradient: GradientPass) -> Iterator[Any]:
        try:
            yield from self._walk(gradient)
        except GeneratorExit:
            self._state = "broken"
            raise

    def _walk(self, gradient: GradientPass) -> Iterator[Any]:
        engine, number = self._engine, self._passes
        phases.enter("data")
        verification = NOT_VERIFIED if number else engine.verification
        yield from verification.before(self, gradient)
        if engine.audit is not None and not number:
            yield from engine.audit.recompute(self, gradient)  # from here on it listens
        again: Iterator[tuple[MicroBatchId, Any, bool]] | None
        again = engine.micro_batches(self.number, number, gradient, self._kept)
        if engine.mesh.context.size > 1:
            again = context_rounds(engine, again, number)
        while again is not None:
            for place, batch, last in verification.watched(self, gradient, again):
                self._place, self._ready = place, True
                phases.Position.virtual_rank = place.virtual_rank
                exchange = gradient.exchange  # another one than before, if a process died or joined
                exchange.enter(place.virtual_rank, last=last)
                phases.enter("forward")
                yield batch
                phases.enter("exchange" if last else "data")
                exchange.leave()
            self._ready = False
            again = self._meet(gradient, number)
        yield from verification.after(self, gradient, self._sums)

    def _meet(self, gradient: GradientPass, number: int) -> Iterator[tuple[MicroBatchId, Any, bool]] | None:
        """The rounds of a pass are done: the gradient becomes whole. If a process dies meanwhile, these are the rounds
        that are missing."""
        engine = self._engine
        phases.Position.virtual_rank = None
        phases.enter("exchange")
        if engine.group.size == 1:
            sums = engine.synchronize(self, number, gradient)
        else:
            try:
                with wrap_peer_errors(f"Step {self.number}'s exchange"):
                    sums = engine.synchronize(self, number, gradient)
            except (PeerLostError, RuntimeError, ConnectionError) as lost:
                if engine.survivors is None:
                    raise
                missing = engine.survivors.resume_step(self, number, gradient, lost)
                if missing is not None:
                    phases.enter("data")
                    return missing
                sums = engine.commit(self, number, gradient)
        if engine.audit is not None:
            engine.audit.after(self)
        self._sums = {**self._sums, **sums} if number else sums
        self._passes += 1
        self._waiting = [*self._waiting, gradient]
        self._state = "whole"
        phases.enter("other")
        return None

    def __length_hint__(self) -> int:
        # list(step) and tuple(step) ask for this first; a plain `for` does not
        raise self._breach("was turned into a list", "Its rounds compute micro-batches, one after the other.")

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor, *, mean: bool = False) -> None:
        """Add a micro-batch's gradient to the step's.

        loss    the sum of the losses of what it holds, a tensor of one element that needs a gradient
        weight  how many things it sums (samples, or tokens that count); a number, or a tensor of one element (no sync)
        mean    the loss is a mean over `weight` things, as models that own their loss return it

        The step divides by the total weight of all micro-batches of all processes, once. Raises LoopError if it is
        called twice in a round, outside of one, with a loss that has no graph, or (in the first step) with a loss that
        is visibly a mean although `mean` was not said.
        """
        if not self._ready:
            self._refuse_backward()
        assert self._place is not None
        assert self._gradient is not None
        if not self._gradient.seen:
            check_loss(loss, mean)
        if mean:
            loss = loss * weight
        engine = self._engine
        engine.table.add(self._place, LOSS, loss, weight)
        engine.verification.heard(self._place, loss, weight)
        if engine.scale.on:
            loss = loss * engine.scale.value
        self._ready = False
        phases.enter("backward")
        inputs = self._gradient.inputs
        if engine.group.size == 1:
            loss.backward(inputs=inputs)
        else:
            with wrap_peer_errors(f"Step {self.number}'s exchange"):  # which begins in here
                loss.backward(inputs=inputs)
        phases.enter("other")

    def add(self, name: str, total: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add to a sum of your own, exact over all processes: after the rounds, `mean(name)` is sum over weight."""
        if self._state != "walking" or self._place is None:
            raise self._breach(f"was asked to add {name!r} outside of its rounds", "A sum belongs to a micro-batch.")
        if name == LOSS:
            raise self._breach("was asked to add 'loss'", "That name is taken by backward.", "choose another.")
        self._engine.table.add(self._place, name, total, weight)

    # -- after the rounds

    @property
    def loss(self) -> float:
        """The mean loss of the step over all processes: the sum of losses over the sum of weights."""
        return self.mean(LOSS)

    @property
    def weight(self) -> float:
        """The total weight of the step over all processes."""
        return self._total(LOSS)[1]

    def mean(self, name: str) -> float:
        """sum / weight of what was added under `name`, over all processes."""
        total, weight = self._total(name)
        return total / weight

    def sum(self, name: str) -> float:
        """The sum of what was added under `name`, over all processes."""
        return self._total(name)[0]

    def _total(self, name: str) -> tuple[float, float]:
        if self._state not in ("whole", "updated"):
            raise self._breach(f"was asked for its {name}", "That is known when all its rounds are done.")
        if name not in self._sums:
            raise self._breach(
                f"was asked for the mean of {name!r}", f"What was added is: {', '.join(sorted(self._sums))}."
            )
        return self._sums[name]

    @property
    def grad_norm(self) -> float:
        """The 2-norm of the step's mean gradient, before clipping; the same on every process.

        `update` computes it when it clips. Without clipping it costs a read of the gradient, so ask before `update`.
        """
        if self._grad_norm is None:
            if self._state != "whole":
                raise self._breach(
                    "was asked for grad_norm",
                    "Without clipping it is only computed on demand, and the gradient is gone after update.",
                    "ask between the rounds and step.update(...), or clip.",
                )
            assert self._gradient is not None
            self._grad_norm = self._engine.clip(self._gradient.params, None)
        return self._grad_norm

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        """Check that the gradient is finite, clip it, step optimizers and then schedules, and forget the gradient.

        steppers  optimizers and learning-rate schedules of torch.optim, or anything with a `step()`
        clip      the gradient's largest 2-norm (as in torch.nn.utils.clip_grad_norm_); None: no clipping; left out: the
                  setting `clip`

        After several passes it uses the gradients that these optimizers hold, and leaves the others for a later call.
        With precision=fp16 a gradient that is not finite is the scale's fault at first: nothing is stepped then,
        `skipped` is true, and the scale is halved.

        Raises LoopError before the rounds are done, when called twice, and if the gradient is not finite.
        """
        if self._state != "whole":
            self._refuse_update()
        phases.enter("update")
        self._update(steppers, clip)
        phases.enter("other")

    def _update(self, steppers: Sequence[Any], clip: float | None) -> None:
        engine = self._engine
        limit = engine.settings.clip if clip is FROM_SETTINGS else clip
        optimizers = [s for s in steppers if hasattr(s, "zero_grad") or hasattr(s, "param_groups")]
        ready = self._waiting if self._kept is None else self._ready_for(optimizers)
        if engine.divergence is not None:
            engine.divergence.given(self.number, ready)
        if all(gradient.finite or not gradient.may_skip for gradient in ready):
            for gradient in ready:
                gradient.check_finite(self)
            if limit is not None:
                self._grad_norm = engine.clip([p for gradient in ready for p in gradient.params], limit)
            self._step(steppers, optimizers)
        else:
            self.skipped = True
            self._grad_norm = float("inf")
        engine.scale.tell(self.number, finite=not self.skipped)
        for gradient in ready:
            gradient.zero()
        self._waiting = [gradient for gradient in self._waiting if gradient not in ready]
        self._state = "whole" if self._waiting else "updated"

    def _ready_for(self, optimizers: Sequence[Any]) -> list[GradientPass]:
        """The gradients that these optimizers use."""
        ready: list[GradientPass] = []
        for optimizer in optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            found = [g for g in self._waiting if any(id(p) in held for p in g.params)]
            if not found:
                raise self._breach(
                    f"was updated with {type(optimizer).__name__}",
                    "No pass of this step has made a gradient for its parameters, or it is used already.",
                    "walk over it first: for batch in step.over(optimizer).",
                )
            ready += [g for g in found if g not in ready]
        return ready

    def _step(self, steppers: Sequence[Any], optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            self._engine.register_optimizer(optimizer)
            with (
                explain_step_errors(optimizer),
                self._engine.verification.stepping(optimizer),
                on_local_shards(optimizer),
            ):
                optimizer.step()
        for schedule in steppers:
            if schedule not in optimizers:
                self._engine.register_schedule(schedule)
                schedule.step()

    def every(self, n: int) -> bool:
        """Is this the n-th, 2n-th, ... step of the run (counting from 1), or the last one?"""
        return (self.number + 1) % n == 0 or self.number + 1 == self._engine.last

    @property
    def ends_epoch(self) -> bool:
        """Is this the last step of its epoch, or of the run?"""
        return self._engine.order.epoch(self.number + 1) != self.epoch or self.number + 1 == self._engine.last

    @property
    def is_new(self) -> bool:
        """Has nobody walked over it yet?"""
        return self._state == "new"

    @property
    def is_half_done(self) -> bool:
        """Has it begun, without its update?"""
        return self._state not in ("new", "updated")

    @property
    def is_done(self) -> bool:
        """Has its update been made?"""
        return self._state == "updated"

    # -- breaches

    def finish(self) -> None:
        """Called when the loop asks for the next step: is this one done? Raises LoopError if not."""
        if self._state in ("broken", "walking"):
            raise self._broken()
        if self._state == "new":
            raise self._breach(
                "was skipped",
                "Nobody iterated over it.",
                "write `for batch in step:` inside `for step in run.steps(...)`.",
            )
        if self._state != "updated":
            raise self._breach(
                "ended without an update",
                "Its gradient is whole, and no optimizer used it.",
                "call step.update(optimizer).",
            )

    def refuse_within(self, verb: str) -> None:
        """Raise LoopError if a round is under way: this verb is for all processes together."""
        if self._state == "walking":
            raise LoopError(
                f"{verb} was called within a round of step {self.number}.",
                "Processes have different numbers of rounds, and it is for all of them together.",
                f"call {verb} between two steps, after step.update.",
            )

    def _refuse_pipeline(self, what: str) -> None:
        if self._engine.models.pipeline is not None:
            raise self._breach(
                what,
                f"With parallel.pipeline={self._engine.mesh.pipeline.size} its micro-batches are on their way through "
                "the stages at the same time, so there are no rounds one after the other.",
                "step.run(model, loss_fn), with loss_fn(output, *batch) -> (sum, weight): docs/placements.md.",
            )

    def _broken(self) -> LoopError:
        return self._breach(
            "was left with break",
            "Its other micro-batches were not computed, so its gradient is not whole anywhere.",
            "use continue: a round without backward counts as weight 0.",
        )

    def _refuse_backward(self) -> None:
        if self._state == "walking":
            raise self._breach(
                "got a second backward in one round",
                "A micro-batch contributes one loss and one weight.",
                "add the losses up and call step.backward once.",
            )
        raise self._breach(
            "got a backward outside of its rounds",
            "The exchange happens when the loop over its micro-batches ends.",
            "call step.backward inside `for batch in step:` (and do not collect the batches first).",
        )

    def _refuse_update(self) -> None:
        if self._state == "broken":
            raise self._broken()
        if self._state == "updated":
            raise self._breach(
                "was updated twice",
                "The gradient is gone after the first update.",
                "pass all optimizers and schedules to one step.update(...).",
            )
        raise self._breach(
            "was updated too early" if self._state == "walking" else "was updated without its rounds",
            "The gradient is whole when the loop over its micro-batches has ended.",
            "call step.update after `for batch in step:`, at the same indentation.",
        )

    def _breach(self, what: str, true: str, do: str = "see docs/loop.md for the contract of the loop.") -> LoopError:
        return LoopError(f"Step {self.number} {what}.", true, do)
