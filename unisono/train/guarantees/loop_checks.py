"""Checks of the script's loop: its totals, its forward passes, its optimizers and schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from unisono.config import Settings
from unisono.distributed.process_group import to_local
from unisono.errors import LoopError, NotFiniteError
from unisono.parallel.precision import LossScale
from unisono.plan.batch_order import BatchOrder, MicroBatchId
from unisono.tensors.digest import tensor_hashes
from unisono.train.gradient_pass import GradientPass
from unisono.train.guarantees.user_errors import (
    check_optimizer,
    check_schedule,
    refuse_changing_buffers,
    single_sample_error,
)
from unisono.train.modules.buffer_sync import versions, watch_samples
from unisono.train.modules.models import Models
from unisono.train.optimization.sharded_step import prepare
from unisono.train.optimization.step_kernels import choose_kernels
from unisono.train.step_state import StepState


class LoopChecks:
    """Check the script's loop in every step.

    last      number of steps of the whole run
    turns     processes that compute the micro-batches of one virtual rank in turn
    steppers  optimizers and schedules that were stepped, in the order of their first step; filled here
    run_dir   the run directory, as a user types it
    """

    def __init__(
        self,
        settings: Settings,
        models: Models,
        scale: LossScale,
        order: BatchOrder,
        last: int,
        *,
        turns: int,
        steppers: list[Any],
        run_dir: str,
    ) -> None:
        self.settings, self.models, self.scale = settings, models, scale
        self.order, self.last, self.turns = order, last, turns
        self.steppers, self.run_dir = steppers, run_dir
        self._held: dict[int, int] = {}  # number of parameters of each optimizer, when it was checked
        self._versions: list[int] = []  # of the parameters, when the pass began
        self._hashes: list[int] = []  # hashes of the parameters, when a first pass began

    # -- forward passes

    def begin(self, gradient: GradientPass) -> None:
        """Begin a pass: remember the versions of the parameters, and before the first pass their hashes."""
        self._versions = versions(self.models.params)
        if not gradient.seen:
            self._hashes = self._param_hashes()

    def check_forward(self, step: StepState) -> None:
        """Raise LoopError if a forward pass changed a parameter: that is state outside the tree."""
        params = self.models.params
        hashes, self._hashes = self._hashes, []
        unseen = [now != was for now, was in zip(self._param_hashes() if hashes else [], hashes, strict=False)]
        unseen = unseen or [False] * len(params)
        for p, before, now, changed in zip(params, self._versions, versions(params), unseen, strict=True):
            if before != now or changed:
                raise LoopError(
                    f"The forward pass of step {step.number} changed the parameter {self.models.names.get(id(p), '')} "
                    f"of shape {tuple(p.shape)}.",
                    f"With {self.order.virtual_ranks} virtual ranks its value would depend on the placement; "
                    "parameters may change between two steps only.",
                    "do it after step.update (Embedding without max_norm, and a line that renorms), or "
                    "--set virtual_ranks=1.",
                )

    def _param_hashes(self) -> list[int]:
        return tensor_hashes([to_local(p.detach()) for p in self.models.params], ordered=True)

    def check_buffers(self, step: StepState, *, changed: bool) -> None:
        """Raise LoopError if buffers changed where several processes compute one virtual rank.

        No process has all changes of that virtual rank then.
        """
        if changed and self.models.pipeline is not None:
            raise self.models.pipeline.changing(step.number)
        if changed and self.turns > 1:
            following = range(step.number, min(step.number + 2, self.last))  # the last batch of an epoch may be short
            refuse_changing_buffers(step.number, max(map(self.order.batch_size, following)), self.settings)

    @contextmanager
    def round_context(self, place: MicroBatchId, gradient: GradientPass) -> Iterator[None]:
        """Return the block in which the script's loop computes a micro-batch.

        In the first step it checks whether every batch norm gets more than one sample, now and in all later steps.
        """
        hooks = []
        if not gradient.seen and self.order.virtual_ranks > 1 and self.order.smallest(self.last) == 1:
            bounds = self.order.micro_bounds(place.step, place.virtual_rank)[place.number]
            hooks = watch_samples(
                self.models.batch_norms(), bounds[1] - bounds[0], partial(single_sample_error, self.order, self.last)
            )
        try:
            with self.models.around_loss():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    # -- totals

    def check_totals(self, step: StepState, loss: float, weight: float, losses: list[float]) -> bool:
        """Return whether the loss is finite.

        Raises:
            LoopError: the total weight is not above 0.
            NotFiniteError: the loss is not finite, and no smaller fp16 scale can help.
        """
        if not weight > 0:
            raise LoopError(
                f"Cannot average step {step.number}: the total weight is {weight:g}.",
                f"The total weight of its {step.samples} samples over all processes is {weight:g}"
                + (", since no round called step.backward with more." if weight == 0 else "."),
                "call step.backward(loss, weight) in `for batch in step:` with a weight above 0 in some round.",
            )
        if not math.isfinite(loss) and not self.scale.may_skip:
            bad = [v for v, row in enumerate(losses) if not math.isfinite(row)]
            raise NotFiniteError(
                f"Step {step.number} has a loss of {loss}.",
                f"It comes from virtual rank {bad[0]} of {self.order.virtual_ranks}"
                f" (samples {self._samples(step.number, bad[0])}).",
                f"inspect them: {self.replay_command(step.number)} --virtual-rank {bad[0]}; lower the learning rate, "
                "or clip the gradient (--set clip=1.0).",
            )
        return math.isfinite(loss)

    def replay_command(self, step: int) -> str:
        """Return the command that replays a step."""
        return f"unisono replay {self.run_dir} --step {step}"

    def _samples(self, step: int, virtual_rank: int) -> str:
        samples = [i for micro_batch in self.order.micro_batches(step, virtual_rank) for i in micro_batch]
        return ", ".join(map(str, samples[:8])) + (f", ... {len(samples)} in all" if len(samples) > 8 else "")

    # -- optimizers and schedules

    def register_optimizer(self, optimizer: Any) -> None:
        """Check an optimizer when it is first stepped, and again when it has other parameters."""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if self._held.get(id(optimizer)) == count:
            return
        choose_kernels(optimizer, self.settings.speed.optimizer)
        check_optimizer(optimizer, self.models.trained, self.order.virtual_ranks)
        prepare(optimizer)
        if id(optimizer) not in self._held:
            self.steppers.append(optimizer)
        self._held[id(optimizer)] = count

    def register_schedule(self, schedule: Any) -> None:
        """Check a schedule when it is first stepped."""
        if not any(known is schedule for known in self.steppers):
            check_schedule(schedule, self.settings)
            self.steppers.append(schedule)
