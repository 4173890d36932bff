"""Replay: compute one step of an earlier run again on one process, and write a record of its micro-batches.

    checkpoint      steps on the way         the step                    `unisono replay RUN --step 43`
    after 40   -->  40  41  42          -->  43: v0 v1 ... v7            recorded, or stopped in a debugger
                    as in any run            '-- or one of them alone

Placement changes no bit. For any earlier run, one process therefore computes the same step: the same losses, the same
gradient, the same NaN.
"""

from __future__ import annotations

import json
import pdb  # noqa: T100  (on request)
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from unisono import phases
from unisono.data.computed_batches import IndexDataset
from unisono.data.prepared import PreparedDataset
from unisono.errors import RunStopped
from unisono.exchange.buckets import finite
from unisono.plan.batch_order import MicroBatchId
from unisono.train.collective import Rounds
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS

SHOWN = 8
"""Number of samples that a debugger names when it starts."""


@dataclass(frozen=True)
class ReplayRequest:
    """The step to replay.

    step          the number of the step
    virtual_rank  the only one to compute; None: all of them, and the update
    debug         stop in a debugger when the loop receives its first micro-batch
    file          the file for the record, with one line of JSON for each event
    """

    step: int
    virtual_rank: int | None
    debug: bool
    file: Path

    @classmethod
    def of(cls, words: str) -> ReplayRequest:
        """Parse STEP:VIRTUAL RANK or nothing:debug or nothing:FILE."""
        step, virtual_rank, debug, file = words.split(":", 3)
        return cls(int(step), int(virtual_rank) if virtual_rank else None, bool(debug), Path(file))

    def __str__(self) -> str:
        alone = "" if self.virtual_rank is None else self.virtual_rank
        return f"{self.step}:{alone}:{'debug' * self.debug}:{self.file}"

    def write(self, **line: Any) -> None:
        """Append a line to the file."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Replay(Extension):
    """Record each round of the step as soon as it is computed, and end the run after the step."""

    def __init__(self, request: ReplayRequest, context: RunContext, parts: LoopParts) -> None:
        self.request, self.models, self.scale = request, context.models, context.scale
        self.source, self.sync, self.checks = parts.source, parts.sync, parts.checks
        self._has_stopped = False  # in the debugger
        self._loss: tuple[float, float] | None = None  # sum and weight of the current round

    def before_step(self, step: StepState) -> None:
        number, order = step.number, self.source.order
        if number > self.request.step:
            raise RunStopped
        if number == self.request.step:
            self.request.write(kind="step", step=number, epoch=order.epoch(number), samples=order.batch_size(number))

    def extra_rounds(self, step: StepState, gradient: GradientPass) -> Iterator[Any]:
        """Yield the rounds of one virtual rank, if only this one is replayed. Then the run ends, without a gradient."""
        virtual_rank = self.request.virtual_rank
        if step.number == self.request.step and virtual_rank is not None:
            for _, batch, _ in self.rounds(step, gradient, self._alone(step, gradient, virtual_rank)):
                yield batch
            raise RunStopped

    def _alone(self, step: StepState, gradient: GradientPass, virtual_rank: int) -> Rounds:
        buffers, order = self.models.buffers, self.source.order
        if order.virtual_ranks > 1:
            buffers.begin(virtual_rank)
            buffers.enter(virtual_rank)
        for number in range(len(order.micro_bounds(step.number, virtual_rank))):
            phases.enter("data")
            place = MicroBatchId(step.number, virtual_rank, number)
            batch = self.source.fetch(place)
            step.place, step.ready = place, True
            phases.position.virtual_rank = virtual_rank
            phases.enter("forward")
            with self.checks.round_context(place, gradient):
                yield place, batch, False
        step.ready = False

    def rounds(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        return self._watch(step, gradient, rounds) if step.number == self.request.step else rounds

    def _watch(self, step: StepState, gradient: GradientPass, rounds: Rounds) -> Rounds:
        norms = LayerNorms(gradient.leaves)
        for place, batch, last in rounds:
            norms.begin()
            if self.request.debug and not self._has_stopped:
                self._has_stopped = True
                self._stop_in_debugger(place)
            yield place, batch, last
            self._write_round(step, gradient, place, norms)
        norms.close()

    def backward(self, step: StepState, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        self._loss = float(loss.detach()), float(weight)

    def _write_round(self, step: StepState, gradient: GradientPass, place: MicroBatchId, norms: LayerNorms) -> None:
        (total, weight), self._loss = self._loss or (0.0, 0.0), None
        squares, bad = norms.end()
        scale = weight * self.scale.value
        self.request.write(
            kind="micro-batch",
            walk=step.passes,
            virtual_rank=place.virtual_rank,
            number=place.number,
            samples=self._samples_of(place),
            loss=total / weight if weight else 0.0,
            weight=weight,
            norm=squares**0.5 / scale if scale else 0.0,
            bad=[self.models.names.get(id(gradient.params[i]), "a parameter") for i in bad],
        )

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        if step.number == self.request.step:
            total, weight = step.sums[LOSS]
            self.request.write(kind="pass", walk=step.passes, loss=total / weight, weight=weight)

    def before_update(self, step: StepState, gradients: Sequence[GradientPass]) -> None:
        if step.number == self.request.step:
            assert step.gradient is not None
            if step.grad_norm is None:
                step.grad_norm = self.sync.clip(step.gradient.params, None)
            self.request.write(kind="norm", walk=step.passes - 1, norm=step.grad_norm)

    def step_ended(self, step: StepState) -> None:
        if step.number == self.request.step:
            raise RunStopped  # the code after the step does not belong to the replay

    def _stop_in_debugger(self, place: MicroBatchId) -> None:
        """Stop in a debugger at the line at which the loop receives its batch."""
        samples = self._samples_of(place)
        more = f", ... {len(samples)} in all" if len(samples) > SHOWN else ""
        print(
            f"Step {place.step}, virtual rank {place.virtual_rank}, micro-batch {place.number}: samples "
            f"{', '.join(map(str, samples[:SHOWN]))}{more}. The next line is the loop's own; c continues, q quits.",
            flush=True,
        )
        phases.enter("other")
        Debugger(nosigint=True).set_trace(_frame_of_loop())

    def _samples_of(self, place: MicroBatchId) -> list[Any]:
        """Return the names of a micro-batch's samples: numbers, or shards and offsets in a stream."""
        numbers = self.source.order.micro_batches(place.step, place.virtual_rank)[place.number]
        data = self.source.loader.fetcher.data
        if isinstance(data, PreparedDataset):
            return [data.name_of(number) for number in numbers]
        if isinstance(data, IndexDataset):
            return list(data.numbers(place.step, numbers))
        return numbers


class Debugger(pdb.Pdb):
    """The debugger of Python. `quit` ends the replay without an error."""

    def do_quit(self, arg: str) -> None:
        sys.settrace(None)
        raise RunStopped

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> None:
        self.do_quit(arg)


class LayerNorms:
    """Measure the gradients of the backward passes of a round: the norm, and the parameters with values not finite."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.squares = 0.0
        self.bad: list[int] = []
        self._hooks = [p.register_hook(partial(self._note, number)) for number, p in enumerate(params)]

    def begin(self) -> None:
        self.squares, self.bad = 0.0, []

    def _note(self, number: int, grad: torch.Tensor) -> None:
        dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
        self.squares += float(torch.linalg.vector_norm(dense, dtype=torch.float64)) ** 2
        if not finite(dense):
            self.bad.append(number)

    def end(self) -> tuple[float, list[int]]:
        return self.squares, sorted(self.bad)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _frame_of_loop() -> FrameType:
    """Return the frame that waits for a batch: the script's, or that of `step.run`."""
    frame = sys._getframe()
    own = ("_frame_of_loop", "_stop_in_debugger", "_watch", "extra_rounds", "_rounds")
    while frame.f_back is not None and frame.f_code.co_name in own:
        frame = frame.f_back
    return frame


def replay_run(request: str, rank: int) -> Inspection:
    """Return an inspection that replays a step.

    Args:
        request: the text for ReplayRequest.of.
        rank: the rank of this process.
    """
    return Inspection(partial(Replay, ReplayRequest.of(request)))
