"""Try other ways to compute the same bits while a run trains, and use those that pay (`plan.auto`).

    step   0 . . . 7 8 9 | 10 . . . . . . | . . . . . . . |
           warm-up       | trial 1        | trial 2       |  no more trials, until processes come or go
                         agree            agree           agree

After the warm-up, the processes agree on what is worth a trial. Each trial compares a way with the one that is in use
(paired_trial.py). After it, the processes agree on the time of each block, that of the slowest process, so all of them
reach the same verdict. If the group of processes changes, all options return to what the settings say, and the trials
begin again: another number of processes has other costs.

Steps are counted from the first one of the group, so a process that joins follows the same schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from unisono.parallel.activation_checkpoint import ActivationCheckpoint
from unisono.train.context import LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.replan.free_memory import free_memory
from unisono.train.replan.paired_trial import PairedTrial, Verdict, judge
from unisono.train.replan.step_options import BucketSizes, KeptActivations, Proposal, StepOption
from unisono.train.step_state import StepState

WARM_UP = 10
"""Steps before the first trial."""

OBSERVED = 2
"""How many of the last steps of the warm-up are observed by the options. Their time does not count."""

WHAT = "Agreeing on faster steps"


class Replanner(Extension):
    """Try options one after the other.

    Args:
        context: The context of the run.
        options: The kinds of changes.

    Attributes:
        tried: The verdicts so far, for result.json.
    """

    def __init__(self, context: RunContext, options: Sequence[StepOption]) -> None:
        self._context, self._options = context, options
        self.tried: list[dict[str, Any]] = []
        self._begin(context.progress.steps_done)

    def _begin(self, first: int) -> None:
        """Begin with a warm-up at step `first`."""
        self._observed, self._ready = first + WARM_UP - OBSERVED, first + WARM_UP
        self._seconds: list[float] = []
        self._began = 0.0
        self._trial: PairedTrial | None = None
        self._proposal: Proposal | None = None
        self._proposals: Iterator[Proposal] = iter(())
        self._usual, self._is_new = 0.0, False

    def regrouped(self, first: int, *, failed: bool) -> None:
        self._begin(first)
        for option in self._options:
            option.reset()

    # -- time

    def before_step(self, step: StepState) -> None:
        self._synchronize()
        self._began = time.perf_counter()

    def step_ended(self, step: StepState) -> None:
        self._synchronize()
        seconds = time.perf_counter() - self._began
        if step.is_verified or not self._began:
            return
        if self._trial is not None:
            self._trial.record(step.number, seconds)
        elif step.number < self._observed:
            self._seconds.append(seconds)

    def _synchronize(self) -> None:
        """Wait for the device while steps are measured."""
        is_measuring = self._trial is not None or self._proposal is not None
        if is_measuring and self._context.device.type != "cpu":
            torch.accelerator.synchronize(self._context.device)

    # -- trials

    def between_steps(self, steps_done: int) -> None:
        if steps_done == self._observed:
            for option in self._options:
                option.observe()
        elif steps_done == self._ready:
            (usual,) = self._agree([median(self._seconds[1:] or [0.0])])
            if steps_done != self._ready:  # the group has changed meanwhile
                return
            self._usual = usual
            self._proposals = (proposal for option in self._options for proposal in option.propose(self._agree))
            self._next_trial(steps_done)
        elif self._trial is not None and steps_done >= self._trial.end:
            self._decide(steps_done, judge(self._agree(self._trial.medians())))
            self._next_trial(steps_done)
        elif self._trial is not None and self._proposal is not None:
            self._switch(self._trial.is_new(steps_done))

    def _agree(self, values: Sequence[float]) -> list[float]:
        """Return the largest value of all processes for each place."""
        group = self._context.group

        def largest() -> list[float]:
            numbers = torch.tensor(values, dtype=torch.float64, device=group.device)
            return list(map(float, group.max_(numbers).tolist()))

        return self._context.collective.run(WHAT, largest)

    def _next_trial(self, step: int) -> None:
        proposals = self._proposals
        proposal = next(proposals, None)
        if proposals is self._proposals:  # otherwise the group has changed meanwhile
            self._proposal = proposal
            self._trial = PairedTrial(step, self._usual) if proposal is not None else None

    def _switch(self, is_new: bool) -> None:
        if is_new != self._is_new and self._proposal is not None:
            self._proposal.switch(is_new)
            self._is_new = is_new

    def _decide(self, step: int, verdict: Verdict) -> None:
        """Use the new way from now on if it pays, and the old one otherwise."""
        proposal = self._proposal
        if proposal is None:  # the group has changed while the processes agreed
            return
        self._switch(verdict.pays)
        self._is_new = False  # for the next proposal
        found: dict[str, Any] = {"setting": proposal.setting, "old": proposal.old, "new": proposal.new}
        found |= {"ratio": round(verdict.ratio, 3), "used": verdict.pays}
        self.tried.append({"step": step, **found})
        self._context.monitor.event({"event": "plan", "step": step, **found})
        if verdict.pays:
            self._context.monitor.note(
                f"from step {step} on, {proposal.new}: a step takes {verdict.ratio:.2f} of the time"
            )

    def result(self) -> Mapping[str, Any]:
        return {"plan": self.tried} if self.tried else {}


def build_replanner(context: RunContext, parts: LoopParts) -> list[Extension]:
    """Return the replanner, if the settings ask for it."""
    settings = context.settings
    if not settings.plan.auto:
        return []
    parallel, options = settings.parallel, list[StepOption]()
    layers = [
        layer.forward
        for model in context.models.modules
        for layer in model.modules()
        if isinstance(layer.forward, ActivationCheckpoint)
    ]
    if layers and parallel.pipeline == 1 and not settings.speed.compile_model:
        on_cpu = context.device.type == "cpu"
        sharing = context.world.local_size if on_cpu else context.world.devices.ranks_per_device
        free = partial(free_memory, context.device, sharing)
        options.append(KeptActivations(layers, parallel.activation_checkpoint, free))
    if settings.exchange == "tree" and not parallel.cuda_graphs:  # a graph keeps the addresses of gradients
        options.append(BucketSizes(parts, settings.tree.bucket_mb))
    return [Replanner(context, options)]
