"""The state of one optimizer step: which micro-batch is under way, its sums, its gradients."""

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
"""A step is new; its micro-batches are walked through; its gradient is whole; its update is made. Or the loop over its
micro-batches was left early, and it is broken."""

NO_SUMS: Mapping[str, tuple[float, float]] = MappingProxyType({})
NO_TOTALS = Totals({}, {}, [], [])


class StepState:
    """The state of a step on this process.

    number    of the step, from 0
    samples   in its global batch, over all processes
    stage     how far it is
    place     the micro-batch whose round it is; None: no round is under way
    ready     whether `backward` may be called
    gradient  of the pass that was walked last
    waiting   gradients that are whole, and not used by an optimizer yet
    passes    passes whose gradient is whole
    kept      this process's micro-batches, if there may be another pass over them
    sums      (sum, weight) over all processes, by name
    grad_norm 2-norm of the gradient before clipping; None: it was not computed
    skipped   whether an update was left out, because fp16's scale was too high
    is_verified  whether this process verifies the promise in this step
    report    numbers that ride along with the step's flags: see StepSync.reduce
    totals    what the processes agreed on in the last pass
    gathered  what all processes' buffers became in the pass under way
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
    skipped = False
    is_verified = False
    report: Sequence[float] = ()
    totals: Totals = NO_TOTALS
    loss_is_finite = True
    gathered: Gathered | None = None

    def __init__(self, number: int, samples: int) -> None:
        self.number, self.samples = number, samples

    @property
    def loss(self) -> float:
        """The mean loss of the step over all processes; its gradient must be whole."""
        total, weight = self.sums[LOSS]
        return total / weight

    @property
    def is_half_done(self) -> bool:
        """Whether it has begun, without its update."""
        return self.stage not in ("new", "updated")

    def error(self, what: str, facts: str, hint: str = "see docs/guide/loop.md, the loop's contract.") -> LoopError:
        """Return the error for a loop that breaks the contract in this step."""
        return LoopError(f"Step {self.number} {what}.", facts, hint)

    def refuse_within_round(self, verb: str) -> None:
        """Raise LoopError if a micro-batch is under way: `verb` is for all processes together."""
        if self.stage == "walking":
            raise LoopError(
                f"{verb} was called within a round of step {self.number}.",
                "Processes have different numbers of rounds, and it is for all of them together.",
                f"call {verb} between two steps, after step.update.",
            )

    def check_finished(self) -> None:
        """Raise LoopError if the loop asks for the next step before this one has its update."""
        if self.stage in ("broken", "walking"):
            raise self.left_early()
        if self.stage == "new":
            raise self.error(
                "was skipped",
                "Nobody iterated over it.",
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
