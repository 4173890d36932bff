"""The gradient noise scale: the batch size around which larger batches stop to save steps.

The gradients of a step's micro-batches are samples of one gradient. With G the gradient over all data, and S the trace
of the covariance of the gradients of single items, the simple noise scale is S / |G|² (McCandlish et al., An Empirical
Model of Large-Batch Training, 2018, arXiv 1812.06162, appendix A). With the mean gradient g[i] of each of n
micro-batches, its weight w[i], and mean gradient g and weight W of the step, unbiased estimates are

    S    = (Σ w[i] |g[i]|² - W |g|²) / (n - 1)
    |G|² = |g|² - S / W

Both are noisy, so each is averaged over measurements, and the scale is the quotient of the averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.distributed.process_group import to_local
from unisono.train.extensions import Extension

if TYPE_CHECKING:
    from unisono.plan.batch_order import MicroBatchId
    from unisono.train.collective import Rounds
    from unisono.train.context import LoopParts, RunContext
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.step_state import StepState

SQUARES = "squares of gradients"
"""The sum of |g[i]|² w[i] over micro-batches, among the sums of a step."""


class NoiseMeasurement(Extension):
    """Measure the noise scale every n steps, in the first pass of the step.

    A hook reads each gradient when autograd has computed it, before it is added to those of other micro-batches.
    """

    def __init__(self, context: RunContext, parts: LoopParts) -> None:
        self._context, self._sync, self._scale = context, parts.sync, context.scale
        self._every = context.settings.noise_scale_every
        self._norms: dict[int, torch.Tensor] = {}
        self._weight: float | torch.Tensor = 0.0

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        if (step.number + 1) % self._every or step.passes:
            yield from rounds
            return
        hooks = [p.register_hook(partial(self._note, number)) for number, p in enumerate(gradient.leaves)]
        try:
            yield from rounds
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, number: int, grad: torch.Tensor) -> None:
        local = to_local(grad.detach())
        entries = local.coalesce().values() if local.is_sparse else local
        self._norms[number] = torch.linalg.vector_norm(entries, dtype=torch.float32)

    def backward(self, step: StepState, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        self._norms.clear()
        self._weight = weight

    def round_done(self, step: StepState, place: MicroBatchId) -> None:
        norms, self._norms = self._norms, {}
        if not norms or place.spare:
            return
        squares = torch.stack([norms[number] for number in sorted(norms)]).double().square().sum()
        weight = torch.as_tensor(self._weight, dtype=torch.float64, device=squares.device)
        share = torch.where(weight > 0, squares / (self._scale.value**2 * weight), 0.0)
        self._context.step_sync.add(place, SQUARES, share, weight > 0)

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        if SQUARES in step.sums:
            (squares, count), weight = step.sums[SQUARES], step.weight
            step.sums = {name: total for name, total in step.sums.items() if name != SQUARES}
            if count > 1 and gradient.finite:
                self._add(squares, count, weight, self._sync.clip(gradient.params, None) ** 2, step.samples)
        step.noise_scale = self._context.noise.value

    def _add(self, squares: float, count: float, weight: float, square: float, samples: int) -> None:
        """Add a measurement: the sum over micro-batches, their number, the weight and |g|² of the step."""
        noise = (squares - weight * square) / (count - 1)
        if math.isfinite(noise):
            self._context.noise.add(noise * samples / weight, square - noise / weight)
            if (value := self._context.noise.value) is not None:
                self._context.monitor.log({"noise_scale": value})

    def result(self) -> Mapping[str, Any]:
        return {"noise_scale": self._context.noise.value}


def build_noise_scale(context: RunContext, parts: LoopParts) -> list[Extension]:
    """Return the measurement, if the settings ask for it."""
    return [NoiseMeasurement(context, parts)] if context.settings.noise_scale_every else []
