"""One optimizer step, as the loop sees it. This file is the contract of the loop; docs/guide/loop.md explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch

from unisono import phases
from unisono.distributed.process_group import wrap_peer_errors
from unisono.errors import LoopError, NotFiniteError
from unisono.parallel.precision import LossScale
from unisono.plan.batch_order import MicroBatchId
from unisono.train.batches.batch_source import Batches
from unisono.train.collective import PEER_ERRORS, Recovery, Rounds
from unisono.train.evaluation.model_call import Forward, LossCall, call, parts
from unisono.train.extensions import Hooks
from unisono.train.gradient_pass import GradientPass
from unisono.train.gradient_sync import Synchronizer
from unisono.train.guarantees.loop_checks import LoopChecks
from unisono.train.guarantees.user_errors import check_loss, explain_step_error
from unisono.train.modules.models import Models
from unisono.train.optimization.sharded_step import step_optimizer
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS, StepSync

Losses = Callable[[StepState, LossCall, Any], tuple[torch.Tensor, Any]]


def computed(_: StepState, call: LossCall, batch: Any) -> tuple[torch.Tensor, Any]:
    """Return loss and weight of a micro-batch: call the model."""
    return call(batch)


LossFunction = Callable[..., tuple[torch.Tensor, "float | torch.Tensor"]]

SEVERAL_PASSES = "for several walks a step, with an update after each: for batch in step.over(optimizer)."


class FromSettings:
    """The default of `clip` in `Step.update`: take it from the setting of this name."""

    def __repr__(self) -> str:
        return "the setting"


FROM_SETTINGS: Any = FromSettings()


class StepParts(NamedTuple):
    """The parts of a step: the same objects for all steps of a run.

    models     the placed models
    source     the source of micro-batches
    sync       completes gradients
    checks     checks that the loop keeps its contract
    step_sync  adds up sums and flags
    scale      the loss scale of fp16
    recovery   continues the step when a peer dies
    hooks      the hooks of the extensions
    periodic   whether this process runs the code that is due every n steps; otherwise another process runs it
    losses     computes loss and weight of a micro-batch in `Step.run`
    """

    models: Models
    source: Batches
    sync: Synchronizer
    checks: LoopChecks
    step_sync: StepSync
    scale: LossScale
    recovery: Recovery
    hooks: Hooks
    periodic: bool = True
    losses: Losses = computed


class Step:
    """One step: iterate over it once, call `backward` once in each round, then `update`. Or the same with `over`."""

    def __init__(self, state: StepState, parts: StepParts) -> None:
        self._state, self._parts = state, parts

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self._state.number

    @property
    def epoch(self) -> int:
        """The epoch that the step belongs to, from 0."""
        return self._parts.checks.order.epoch(self._state.number)

    @property
    def samples(self) -> int:
        """The number of samples in the step's global batch, over all processes."""
        return self._state.samples

    @property
    def skipped(self) -> bool:
        """Whether an update was left out because the fp16 scale was too high for its gradient; the same everywhere."""
        return self._state.skipped

    @property
    def counts(self) -> bool:
        """Whether this round counts. A round that is repeated to verify the promise does not."""
        place = self._state.place
        return place is None or not place.spare

    # -- the loop over micro-batches

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's micro-batches of the step. Then complete the gradient on every process."""
        self._refuse_pipeline("was iterated over")
        return self._begin(self._first_gradient())

    def _first_gradient(self) -> GradientPass:
        if self._state.stage != "new":
            raise self._state.error(
                "was iterated over twice", "Each of its micro-batches is computed once.", SEVERAL_PASSES
            )
        return self._parts.sync.gradient_of(None)

    def over(self, *optimizers: Any) -> Iterator[Any]:
        """Yield the step's micro-batches, for the parameters of these optimizers only: a pass.

        A step may have several passes, one after the other: for generator and discriminator, or two models. Each pass
        has its own gradient, exchange, loss, weights and randomness. Other parameters that the loss depends on get no
        gradient. Call `update` with the optimizers after each pass, or once after all passes.

        Raises:
            LoopError: it is called within another pass, or before the update of an earlier pass with these optimizers.
        """
        self._refuse_pipeline("began a pass for some parameters")
        state = self._state
        if state.stage not in ("new", "whole", "updated") or (state.passes and state.kept is None):
            raise state.error(
                "began another pass inside of one", "A pass begins when the last one is whole.", SEVERAL_PASSES
            )
        gradient = self._parts.sync.gradient_of(optimizers, waiting=bool(state.waiting))
        ours = {id(p) for p in gradient.params}
        if any(id(p) in ours for other in state.waiting for p in other.params):
            raise state.error(
                "began a pass over the same parameters again",
                "The gradient of an earlier pass is whole, and no optimizer used it.",
                "call step.update(optimizer) after the pass, or add the losses up in one.",
            )
        if state.kept is None:
            state.kept = []
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
        """Run the rounds as one call: forward, loss and backward of every micro-batch of this process.

        Args:
            model: the model.
            loss_fn: loss_fn(output, *batch) -> (sum, weight), as `backward` takes them; a mapping is one argument.
            forward: forward(model, batch) -> output; by default model(batch[0]), or model(**batch) for a mapping.
            mean: whether the loss is a mean over `weight` items.
            over: optimizers, if the pass is for their parameters only.
        """
        if self._parts.models.pipeline is not None and not over:
            self._run_pipeline(model, loss_fn, forward, mean=mean)
            return
        compute, state, losses = LossCall(model, loss_fn, forward or call), self._state, self._parts.losses
        for batch in self.over(*over) if over else self:
            loss, weight = losses(state, compute, batch)
            self.backward(loss, weight, mean=mean)

    def _run_pipeline(
        self, model: torch.nn.Module, loss_fn: LossFunction, forward: Forward | None, *, mean: bool
    ) -> None:
        state, models = self._state, self._parts.models
        assert models.pipeline is not None
        gradient = state.gradient = self._first_gradient()
        state.grad_norm, state.stage = None, "walking"
        pipeline = models.pipeline
        batches = [(place, batch, pipeline.start()) for place, batch, _ in self._open(gradient)]
        step_sync, scale = self._parts.step_sync, self._parts.scale

        def finish(place: MicroBatchId, batch: Any, output: Any) -> torch.Tensor:
            """Add a micro-batch's loss to the step, and return the loss that its backward pass starts from."""
            state.place = place
            loss, weight = loss_fn(output, *parts(batch))
            if not gradient.seen:
                check_loss(loss, mean)
            loss = loss * weight if mean else loss
            step_sync.add(place, LOSS, loss, weight)
            return loss * scale.value if scale.on else loss

        with wrap_peer_errors(f"Step {state.number}'s pipeline"), models.around_loss():
            pipeline.train(gradient.exchange, batches, model, forward, finish)
            phases.enter("exchange")
            step_sync.broadcast(pipeline.line.group)
        models.buffers.note_changes()
        self._end_rounds(gradient)
        with wrap_peer_errors(f"Step {state.number}'s exchange"):
            self._parts.sync.synchronize(state, gradient)
        self._complete(gradient)

    def _begin(self, gradient: GradientPass) -> Iterator[Any]:
        state = self._state
        state.gradient, state.grad_norm, state.stage = gradient, None, "walking"
        return self._rounds(gradient)

    def _open(self, gradient: GradientPass) -> Rounds:
        """Begin a pass, and return its micro-batches."""
        state, (_, source, sync, *_) = self._state, self._parts
        assignment = source.begin(state)
        sync.begin(state, gradient, assignment)
        if state.passes:
            self._parts.recovery.refetch(state)
        rounds = source.rounds(state, assignment)
        for wrap in self._parts.hooks.rounds:
            rounds = wrap(state, gradient, rounds)
        return rounds

    def _rounds(self, gradient: GradientPass) -> Iterator[Any]:
        """Yield the batches of a pass, and then complete its gradient. After a death more batches may follow."""
        state, (models, _, sync, checks, _, _, recovery, hooks, *_) = self._state, self._parts
        enter = phases.enter
        try:
            enter("data")
            if not state.passes:
                for extra in hooks.extra_rounds:
                    yield from extra(state, gradient)
            rounds: Rounds | None = self._open(gradient)
            while rounds is not None:
                for place, batch, last in rounds:
                    state.place, state.ready = place, True
                    phases.position.virtual_rank = place.virtual_rank
                    exchange = gradient.exchange  # a new one if a process died or joined
                    exchange.enter(place.virtual_rank, last=last)
                    enter("forward")
                    if gradient.seen and not models.divided_loss:
                        yield batch
                    else:
                        with checks.round_context(place, gradient):
                            yield batch
                    enter("exchange" if last else "data")
                    exchange.leave()
                    for done in hooks.round_done:
                        done(state, place)
                self._end_rounds(gradient)
                try:
                    if sync.group.size == 1:
                        sync.synchronize(state, gradient)
                    else:
                        with wrap_peer_errors(f"Step {state.number}'s exchange"):
                            sync.synchronize(state, gradient)
                    rounds = None
                except PEER_ERRORS as lost:
                    rounds = recovery.resume_step(state, gradient, lost)
                    if rounds is not None:
                        enter("data")
                        for wrap in hooks.rounds:
                            rounds = wrap(state, gradient, rounds)
            self._complete(gradient)
            if state.passes == 1:
                for closing in hooks.closing_rounds:
                    yield from closing(state, gradient)
        except GeneratorExit:
            state.stage = "broken"
            raise

    def _end_rounds(self, gradient: GradientPass) -> None:
        """End the inner loop: the processes are about to exchange their gradients."""
        self._state.ready = False
        phases.position.virtual_rank = None
        phases.enter("exchange")
        for before in self._parts.hooks.before_sync:
            before(self._state, gradient)

    def _complete(self, gradient: GradientPass) -> None:
        """Complete a pass after its gradient is complete on all processes."""
        state, parts = self._state, self._parts
        parts.sync.commit(state, gradient)
        parts.recovery.completed()
        for ready in parts.hooks.gradient_ready:
            ready(state, gradient)
        state.passes += 1
        state.waiting = [*state.waiting, gradient]
        state.stage = "whole"
        phases.enter("other")

    def __length_hint__(self) -> int:
        # list(step) and tuple(step) call this first; a plain `for` does not
        raise self._state.error("was turned into a list", "Its rounds compute micro-batches, one after the other.")

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor, *, mean: bool = False) -> None:
        """Add a micro-batch's gradient to the step's gradient.

        The step divides once, by the total weight of all micro-batches of all processes.

        Args:
            loss: the sum of the losses of the micro-batch, a tensor of one element that needs a gradient.
            weight: the number of items in the sum (samples, or tokens that count): a number, or a tensor of one
                element, which causes no synchronization.
            mean: whether the loss is a mean over `weight` items, as from models that compute their own loss.

        Raises:
            LoopError: it is called twice in a round, or outside of one; the loss has no graph; or, in the first step,
                the loss is visibly a mean although `mean` is false.
        """
        state, parts = self._state, self._parts
        gradient, place = state.gradient, state.place
        if not state.ready or gradient is None or place is None:
            raise misplaced_backward(state)
        if not gradient.seen:
            check_loss(loss, mean)
        if mean:
            loss = loss * weight
        parts.step_sync.add(place, LOSS, loss, weight)
        for heard in parts.hooks.backward:
            heard(state, loss, weight)
        if parts.scale.on:
            loss = loss * parts.scale.value
        state.ready = False
        phases.enter("backward")
        if parts.sync.group.size == 1:
            loss.backward(inputs=gradient.inputs)
        else:
            with wrap_peer_errors(f"Step {state.number}'s exchange"):  # the exchange begins in backward
                loss.backward(inputs=gradient.inputs)
        phases.enter("other")

    def add(self, name: str, total: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add to a sum of your own, exact over all processes. After the rounds, `mean(name)` is sum over weight."""
        state = self._state
        if state.stage != "walking" or state.place is None:
            raise state.error(f"cannot add {name!r} outside of its inner loop", "A sum belongs to a micro-batch.")
        if name == LOSS:
            raise state.error("cannot add a sum named 'loss'", "That name is taken by backward.", "choose another.")
        state.added += 1
        self._parts.step_sync.add(state.place, name, total, weight)

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
        """Return the sum over the weight of all values added under `name`, over all processes."""
        total, weight = self._total(name)
        return total / weight

    def sum(self, name: str) -> float:
        """Return the sum of all values added under `name`, over all processes."""
        return self._total(name)[0]

    def _total(self, name: str) -> tuple[float, float]:
        state = self._state
        if state.stage not in ("whole", "updated"):
            raise state.error(f"has no {name} yet", "It is known when all its micro-batches are computed.")
        if name not in state.sums:
            raise state.error(f"has no sum named {name!r}", f"Its sums are: {', '.join(sorted(state.sums))}.")
        return state.sums[name]

    @property
    def grad_norm(self) -> float:
        """The 2-norm of the step's mean gradient, before clipping; the same on every process.

        `update` computes it when it clips. Without clipping it costs a read of the gradient: use it before `update`.
        """
        state = self._state
        if state.grad_norm is None:
            if state.stage != "whole" or state.gradient is None:
                raise state.error(
                    "has no grad_norm now",
                    "Without clipping it is only computed on demand, and the gradient is gone after update.",
                    "read it between the inner loop and step.update(...), or clip.",
                )
            state.grad_norm = self._parts.sync.clip(state.gradient.params, None)
        return state.grad_norm

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples, averaged over the measurements so far; the same on every process.

        It is measured every `noise_scale_every` steps, and known after the rounds. None before the first measurement,
        and if the noise hides the gradient. McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162).
        """
        return self._state.noise_scale

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        """Check that the gradient is finite, clip it, step optimizers and then schedules, and release the gradient.

        After several passes it uses the gradients of these optimizers, and leaves the others for a later call.
        With precision=fp16, the first suspect for a gradient that is not finite is the scale: no optimizer steps,
        `skipped` is true, and the scale is halved.
        Args:
            steppers: optimizers and learning-rate schedules of torch.optim, or anything with a `step()`.
            clip: the gradient's largest 2-norm (as in torch.nn.utils.clip_grad_norm_); None: no clipping. By default
                the setting `clip`.

        Raises:
            LoopError: the rounds are not done, or it is called twice.
            NotFiniteError: the gradient is not finite.
        """
        if self._state.stage != "whole":
            raise misplaced_update(self._state)
        phases.enter("update")
        self._update(steppers, clip)
        phases.enter("other")
        for updated in self._parts.hooks.updated:
            updated(self._state)

    def _update(self, steppers: Sequence[Any], clip: float | None) -> None:
        state, parts = self._state, self._parts
        limit = parts.checks.settings.clip if clip is FROM_SETTINGS else clip
        optimizers = [s for s in steppers if hasattr(s, "zero_grad") or hasattr(s, "param_groups")]
        ready = state.waiting if state.kept is None else self._ready_for(optimizers)
        for before in parts.hooks.before_update:
            before(state, ready)
        overflows = [gradient for gradient in ready if gradient.may_skip and not gradient.finite]
        if not overflows:
            for gradient in ready:
                if found := gradient.find_not_finite():
                    raise self._not_finite(found)
            if limit is not None:
                state.grad_norm = parts.sync.clip([p for gradient in ready for p in gradient.params], limit)
            self._step(steppers, optimizers)
        else:
            state.skipped, state.grad_norm = True, float("inf")
        parts.scale.update(state.number, finite=not state.skipped)
        for gradient in ready:
            gradient.zero()
        state.waiting = [gradient for gradient in state.waiting if gradient not in ready]
        state.stage = "whole" if state.waiting else "updated"

    def _ready_for(self, optimizers: Sequence[Any]) -> list[GradientPass]:
        """Return the gradients that these optimizers use."""
        ready: list[GradientPass] = []
        for optimizer in optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            found = [g for g in self._state.waiting if any(id(p) in held for p in g.params)]
            if not found:
                raise self._state.error(
                    f"was updated with {type(optimizer).__name__}",
                    "No pass of this step has made a gradient for its parameters, or it is used already.",
                    "walk over it first: for batch in step.over(optimizer).",
                )
            ready += [g for g in found if g not in ready]
        return ready

    def _step(self, steppers: Sequence[Any], optimizers: Sequence[Any]) -> None:
        parts = self._parts
        for optimizer in optimizers:
            parts.checks.register_optimizer(optimizer)
            if parts.sync.steps_optimizers:
                try:
                    if parts.hooks.stepping:
                        with self._watched(optimizer):
                            step_optimizer(optimizer)
                    else:
                        step_optimizer(optimizer)
                except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
                    explain_step_error(optimizer, error)
                    raise
        for schedule in steppers:
            if schedule not in optimizers:
                parts.checks.register_schedule(schedule)
                if parts.sync.steps_optimizers:
                    schedule.step()

    def _watched(self, optimizer: Any) -> AbstractContextManager[Any]:
        """Return a block that extensions observe, in which an optimizer steps."""
        stack = ExitStack()
        for stepping in self._parts.hooks.stepping:
            stack.enter_context(stepping(optimizer))
        return stack

    def every(self, n: int) -> bool:
        """Return whether this is the n-th, 2n-th, ... step of the run (counting from 1), or the last one.

        With asynchronous parameter servers it returns True on the first server only.
        """
        following = self._state.number + 1
        return self._parts.periodic and (following % n == 0 or following == self._parts.checks.last)

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch, or of the run. It depends on the process as `every` does."""
        checks, following = self._parts.checks, self._state.number + 1
        return self._parts.periodic and (checks.order.epoch(following) != self.epoch or following == checks.last)

    # -- violations of the contract

    def _refuse_pipeline(self, what: str) -> None:
        pipeline = self._parts.models.pipeline
        if pipeline is not None:
            raise self._state.error(
                what,
                f"With parallel.pipeline={pipeline.line.group.size} its micro-batches are on their way through "
                "the stages at the same time, so there are no rounds one after the other.",
                "step.run(model, loss_fn), with loss_fn(output, *batch) -> (sum, weight): docs/guide/loop.md.",
            )

    def _not_finite(self, found: str) -> NotFiniteError:
        number = self._state.number
        return NotFiniteError(
            f"Step {number} has a gradient that is not finite, with a loss of {self._state.loss:g}.",
            f"{found} such elements.",
            "look for a division by zero, sqrt or log at 0 after that parameter, or lower the learning rate; "
            f"to see where it comes from: {self._parts.checks.replay_command(number)}",
        )


def misplaced_backward(state: StepState) -> LoopError:
    """Return the error for a call of `backward` that no micro-batch is waiting for."""
    if state.stage == "walking":
        return state.error(
            "got a second backward in one round",
            "A micro-batch contributes one loss and one weight.",
            "add the losses up and call step.backward once.",
        )
    return state.error(
        "got a backward outside of its rounds",
        "The exchange happens when the loop over its micro-batches ends.",
        "call step.backward inside `for batch in step:` (and do not collect the batches first).",
    )


def misplaced_update(state: StepState) -> LoopError:
    """Return the error for a call of `update` without a complete gradient."""
    if state.stage == "broken":
        return state.left_early()
    if state.stage == "updated":
        return state.error(
            "was updated twice",
            "The gradient is gone after the first update.",
            "pass all optimizers and schedules to one step.update(...).",
        )
    return state.error(
        "was updated too early" if state.stage == "walking" else "was updated without its rounds",
        "The gradient is whole when the loop over its micro-batches has ended.",
        "call step.update after `for batch in step:`, at the same indentation.",
    )
