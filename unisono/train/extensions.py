"""Extensions: optional features of the training loop, as objects with hooks.

An extension overrides the hooks that it needs. The loop binds them once, when it is built: for each hook one tuple, in
the order of the extensions. A feature that is off has no extension, and the loop over its hooks is one over an empty
tuple. A step calls them in this order:

    before_step                       before the script sees the step
    extra_rounds                      micro-batches before the step's own, which do not count
    rounds                            wrap the step's micro-batches
      backward, round_done            for every micro-batch
    before_sync                       before the processes exchange their gradients
    gradient_ready                    the gradient of a pass is complete on all processes
    closing_rounds                    micro-batches after the gradient is complete, which do not count
    before_update                     an update is about to use gradients
      stepping                        around every optimizer's step
    updated                           the update is made
    step_ended                        the script asks for the next step
    after_step                        the step is counted
    between_steps                     all processes have done the same steps, and more follow
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from unisono.plan.batch_order import MicroBatchId
    from unisono.train.collective import Rounds
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.step_state import StepState

Hook = Callable[..., Any]

UNWATCHED: AbstractContextManager[None] = nullcontext()


class Extension:
    """An optional feature of the training loop: override the hooks that it needs."""

    def before_step(self, step: StepState) -> None:
        """Prepare for a step, before the script sees it. Raise RunStopped to end the loop."""

    def extra_rounds(self, step: StepState, gradient: GradientPass) -> Iterable[Any]:
        """Yield batches that the script's loop computes before the step's first pass, and that do not count."""
        return ()

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        """Return the micro-batches of a pass, or a generator around them."""
        return rounds

    def backward(self, step: StepState, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Observe a call of `step.backward` with this sum of losses, before its backward pass."""

    def round_done(self, step: StepState, place: MicroBatchId) -> None:
        """Observe the end of a micro-batch of a pass."""

    def before_sync(self, step: StepState, gradient: GradientPass) -> None:
        """Prepare for the exchange of a pass, whose rounds are finished."""

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        """Observe the gradient of pass `step.passes`, which is complete on all processes."""

    def closing_rounds(self, step: StepState, gradient: GradientPass) -> Iterable[Any]:
        """Yield batches that the script's loop computes after the step's first pass, and that do not count."""
        return ()

    def before_update(self, step: StepState, gradients: Sequence[GradientPass]) -> None:
        """Observe gradients that an update is about to use."""

    def stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        """Return a block in which an optimizer makes its step."""
        return UNWATCHED

    def updated(self, step: StepState) -> None:
        """Observe the end of an update, after its gradients were released."""

    def step_ended(self, step: StepState) -> None:
        """Finish a step after its update, when the script requests the next one. Raise RunStopped to end the loop."""

    def after_step(self, step: StepState) -> None:
        """Observe a step that is counted in the progress of the run."""

    def between_steps(self, steps_done: int) -> None:
        """Act between two steps, after checkpoints. All processes have done `steps_done` steps, and more follow."""

    def before_save(self, steps_done: int) -> None:
        """Prepare for a checkpoint that is about to be written. All processes call this together."""

    def regrouped(self, first: int, *, failed: bool) -> None:
        """Adapt to a new group. Its processes run the steps from step `first` on, because some died or joined.

        failed  a collective of the forward or backward pass failed, so the records of this step are invalid
        """

    def settle(self) -> None:
        """Wait for pending messages after the script has returned."""

    def ended(self, error: Exception | None) -> None:
        """Observe an error of the script that ends this process; None: the run ended, and result.json is written."""

    def close(self) -> None:
        """Release all resources. A second call has no effect."""

    def result(self) -> Mapping[str, Any]:
        """Return entries of result.json."""
        return {}


class Hooks(NamedTuple):
    """The hooks of a run's extensions: for each hook of `Extension`, the methods of those that override it."""

    before_step: tuple[Hook, ...] = ()
    extra_rounds: tuple[Hook, ...] = ()
    rounds: tuple[Hook, ...] = ()
    backward: tuple[Hook, ...] = ()
    round_done: tuple[Hook, ...] = ()
    before_sync: tuple[Hook, ...] = ()
    gradient_ready: tuple[Hook, ...] = ()
    closing_rounds: tuple[Hook, ...] = ()
    before_update: tuple[Hook, ...] = ()
    stepping: tuple[Hook, ...] = ()
    updated: tuple[Hook, ...] = ()
    step_ended: tuple[Hook, ...] = ()
    after_step: tuple[Hook, ...] = ()
    between_steps: tuple[Hook, ...] = ()
    before_save: tuple[Hook, ...] = ()
    regrouped: tuple[Hook, ...] = ()
    settle: tuple[Hook, ...] = ()
    ended: tuple[Hook, ...] = ()
    close: tuple[Hook, ...] = ()
    result: tuple[Hook, ...] = ()


def bind(extensions: Sequence[Extension]) -> Hooks:
    """Return the hooks of these extensions, in their order."""

    def overriding(name: str) -> tuple[Hook, ...]:
        usual = getattr(Extension, name)
        return tuple(getattr(each, name) for each in extensions if getattr(type(each), name) is not usual)

    return Hooks(*map(overriding, Hooks._fields))
