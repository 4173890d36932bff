"""The state of one optimizer step: its current micro-batch, its sums, its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from unisono.errors import LoopError
from unisono.plan.batch_order import MicroBatchId
from unisono.train.step_sync import LOSS, Totals

if TYPE_CHECKING:
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.modules.buffer_sync import Gathered

Stage = Literal["new", "walking", "whole", "updated", "broken"]
"""A new step; micro-batches are being computed; the gradient is complete; the update is done. A step is broken if the
loop over its micro-batches was left early."""

NO_SUMS: Mapping[str, tuple[float, float]] = MappingProxyType({})
NO_TOTALS = Totals({}, {}, [], [])


class StepState:
    """The state of a step on this process.

    number    the number of the step, from 0
    samples   the number of samples in its global batch, over all processes
    stage     the stage of the step
    place     the micro-batch of the current round, or None outside of a round
    ready     whether `backward` may be called
    gradient  the gradient of the last pass
    waiting   complete gradients that no optimizer has used yet
    passes    number of passes whose gradient is complete
    kept      this process's micro-batches, if another pass over them may follow
    sums      (sum, weight) over all processes, by name
    grad_norm 2-norm of the gradient before clipping; None: it was not computed
    noise_scale  the gradient noise scale in samples; None: it is not known
    skipped   whether an update was left out, because the fp16 scale was too high
    is_verified  whether this process verifies the promise in this step
    added     the number of values that the script has added to sums of its own, on this process
    report    numbers that are sent with the step's flags: see StepSync.reduce
    totals    the values on which the processes agreed in the last pass
    gathered  the buffers of all processes in the current pass
    """

    stage: Stage = "new"
    place: MicroBatchId | None = None
    ready = False
    gradient: GradientPass | None = None
    waiting: Sequence[GradientPass] = ()
    passes = 0
    kept: list[tuple[MicroBatchId, Any]] | None = None
    sums: Mapping[str, tuple[float, float]] = NO_SUMS
    grad_norm: float | None = None
    noise_scale: float | None = None
    skipped = False
    is_verified = False
    added = 0
    report: Sequence[float] = ()
    totals: Totals = NO_TOTALS
    loss_is_finite = True
    gathered: Gathered | None = None

    def __init__(self, number: int, samples: int) -> None:
        self.number, self.samples = number, samples

    @property
    def loss(self) -> float:
        """The mean loss of the step over all processes. Its gradient must be complete."""
        total, weight = self.sums[LOSS]
        return total / weight

    @property
    def weight(self) -> float:
        """The total weight of the step over all processes. Its gradient must be complete."""
        return self.sums[LOSS][1]

    @property
    def is_half_done(self) -> bool:
        """Whether the step has begun, and its update is not done."""
        return self.stage not in ("new", "updated")

    def error(self, what: str, facts: str, hint: str = "see docs/guide/loop.md, the loop's contract.") -> LoopError:
        """Return the error for a loop that violates the contract in this step."""
        return LoopError(f"Step {self.number} {what}.", facts, hint)

    def refuse_within_round(self, verb: str) -> None:
        """Raise LoopError within a round. `verb` is a call for all processes together."""
        if self.stage == "walking":
            raise LoopError(
                f"{verb} was called within a round of step {self.number}.",
                "Processes have different numbers of rounds, and it is for all of them together.",
                f"call {verb} between two steps, after step.update.",
            )

    def check_finished(self) -> None:
        """Raise LoopError if the loop requests the next step before this one has its update."""
        if self.stage in ("broken", "walking"):
            raise self.left_early()
        if self.stage == "new":
            raise self.error(
                "was skipped",
                "No loop iterated over its micro-batches.",
                "write `for batch in step:` inside `for step in run.steps(...)`.",
            )
        if self.stage != "updated":
            raise self.error(
                "ended without an update",
                "Its gradient is whole, and no optimizer used it.",
                "call step.update(optimizer).",
            )

    def left_early(self) -> LoopError:
        """Return the error for a loop over micro-batches that was left with break."""
        return self.error(
            "was left with break",
            "Its other micro-batches were not computed, so its gradient is not whole anywhere.",
            "use continue: a round without backward counts as weight 0.",
        )
