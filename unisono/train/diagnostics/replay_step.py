"""A replay: one step of a run that was, computed again on one process, with all that its micro-batches can tell.

    checkpoint      steps on the way         the step                    `unisono replay RUN --step 43`
    after 40   -->  40  41  42          -->  43: v0 v1 ... v7            written down, or entered with a debugger
                    as in any run            '-- or one of them alone

Placement changes no bit, so whatever the job was, one process makes the same of the step: the same losses, the same
gradient, the same NaN. An ordinary run has nothing of this in its path: engine and step are replaced by these here.
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
from unisono.data.loader import IndexDataset
from unisono.data.streaming.stream import Stream
from unisono.errors import RunStopped
from unisono.exchange.buckets import finite
from unisono.plan.batch_order import MicroBatchId
from unisono.train.gradient_pass import GradientPass
from unisono.train.loop import StepLoop
from unisono.train.run import Run
from unisono.train.step import FROM_SETTINGS, Step
from unisono.train.step_sync import LOSS

SHOWN = 8
"""Samples whose names a debugger is greeted with."""


@dataclass(frozen=True)
class ReplayRequest:
    """The step that is replayed.

    virtual_rank  the only one that is computed of it; None: all of them, and what the update makes of them
    debug         stop in a debugger as its first micro-batch is handed to the loop
    file          what is seen goes there, a line of JSON each
    """

    step: int
    virtual_rank: int | None
    debug: bool
    file: Path

    @classmethod
    def of(cls, words: str) -> ReplayRequest:
        """STEP:VIRTUAL RANK or nothing:debug or nothing:FILE."""
        step, virtual_rank, debug, file = words.split(":", 3)
        return cls(int(step), int(virtual_rank) if virtual_rank else None, bool(debug), Path(file))

    def __str__(self) -> str:
        alone = "" if self.virtual_rank is None else self.virtual_rank
        return f"{self.step}:{alone}:{'debug' * self.debug}:{self.file}"

    def tell(self, **line: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class ReplayedStep(Step):
    """The step itself: what comes of each of its rounds is written down as soon as it is known."""

    _engine: ReplayedLoop
    _told: MicroBatchId | None = None  # the round that was told last

    def _rounds(self, gradient: GradientPass) -> Iterator[Any]:
        """Of one virtual rank alone no gradient becomes whole: its rounds are all there is, and the replay ends."""
        engine, wanted = self._engine, self._engine.wanted
        norms = LayerNorms(gradient.leaves)
        self._norms, self._names = norms, [engine.models.names.get(id(p), "a parameter") for p in gradient.params]
        if wanted.virtual_rank is None:
            rounds = super()._rounds(gradient)
        else:
            rounds = engine.alone(self, wanted.virtual_rank)
        for batch in rounds:
            norms.begin()
            if wanted.debug and self._told is None:
                self._greet()
            self._told = self._place
            yield batch
            self._tell()
        norms.close()
        if wanted.virtual_rank is not None:
            raise RunStopped

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor, *, mean: bool = False) -> None:
        total = loss * weight if mean else loss
        self._said = float(total.detach()), float(weight)
        super().backward(loss, weight, mean=mean)

    _said: tuple[float, float] | None = None

    def _tell(self) -> None:
        """The round under way is over."""
        assert self._place is not None
        (total, weight), self._said = self._said or (0.0, 0.0), None
        squares, bad = self._norms.end()
        scale = weight * self._engine.scale.value
        self._engine.wanted.tell(
            kind="micro-batch",
            walk=self._passes,
            virtual_rank=self._place.virtual_rank,
            number=self._place.number,
            samples=self._engine.samples_of(self._place),
            loss=total / weight if weight else 0.0,
            weight=weight,
            norm=squares**0.5 / scale if scale else 0.0,
            bad=[self._names[i] for i in bad],
        )

    def _meet(self, gradient: GradientPass, number: int) -> None:
        super()._meet(gradient, number)
        total, weight = self._sums[LOSS]
        self._engine.wanted.tell(kind="pass", walk=number, loss=total / weight, weight=weight)

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        if self._state == "whole":
            self._engine.wanted.tell(kind="norm", walk=self._passes - 1, norm=self.grad_norm)
        super().update(*steppers, clip=clip)

    def finish(self) -> None:
        super().finish()
        raise RunStopped  # what comes after the step is no part of it

    def _greet(self) -> None:
        """Stop in a debugger where the loop takes its batch."""
        assert self._place is not None
        samples = self._engine.samples_of(self._place)
        more = f", ... {len(samples)} in all" if len(samples) > SHOWN else ""
        print(
            f"Step {self.number}, virtual rank {self._place.virtual_rank}, micro-batch {self._place.number}: samples "
            f"{', '.join(map(str, samples[:SHOWN]))}{more}. The next line is the loop's own; c goes on, q leaves.",
            flush=True,
        )
        phases.enter("other")
        Debugger(nosigint=True).set_trace(_outside())


class ReplayedLoop(StepLoop):
    """An engine that makes its steps as any other, until the one that was asked for."""

    wanted: ReplayRequest

    def new_step(self, number: int) -> Step:
        if number > self.wanted.step:
            raise RunStopped
        if number < self.wanted.step:
            return Step(self, number)
        self.wanted.tell(
            kind="step", step=number, epoch=self.order.epoch(number), samples=self.order.batch_size(number)
        )
        return ReplayedStep(self, number)

    def alone(self, step: Step, virtual_rank: int) -> Iterator[Any]:
        """The micro-batches of one virtual rank."""
        buffers = self.models.buffers
        if self.order.virtual_ranks > 1:
            buffers.begin(virtual_rank)
            buffers.enter(virtual_rank)
        for number in range(len(self.order.micro_bounds(step.number, virtual_rank))):
            phases.enter("data")
            place, batch = self._loader.fetch(MicroBatchId(step.number, virtual_rank, number))
            step._place, step._ready = place, True
            phases.Position.virtual_rank = virtual_rank
            phases.enter("forward")
            yield batch
        step._ready = False

    def samples_of(self, place: MicroBatchId) -> list[Any]:
        """What the samples of a micro-batch are called: their numbers, or in a stream their shards and places."""
        numbers = self.order.micro_batches(place.step, place.virtual_rank)[place.number]
        data = self._loader.fetcher.data
        if isinstance(data, Stream):
            found = [data.address(number) for number in numbers]
            return [f"{data.shards.names[shard]}[{offset}]" for shard, offset in found]
        if isinstance(data, IndexDataset):
            return list(data.micro_batch(place.step, numbers))
        return numbers


class Debugger(pdb.Pdb):
    """Python's own; who quits leaves the replay, and not with an error."""

    def do_quit(self, arg: str) -> None:
        sys.settrace(None)
        raise RunStopped

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> None:
        self.do_quit(arg)


class LayerNorms:
    """The norm of what a round's backward passes give, and the parameters that are given what is not finite."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.squares = 0.0
        self.bad: list[int] = []
        self._hooks = [p.register_hook(partial(self._hear, number)) for number, p in enumerate(params)]

    def begin(self) -> None:
        self.squares, self.bad = 0.0, []

    def _hear(self, number: int, grad: torch.Tensor) -> None:
        dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
        self.squares += float(torch.linalg.vector_norm(dense, dtype=torch.float64)) ** 2
        if not finite(dense):
            self.bad.append(number)

    def end(self) -> tuple[float, list[int]]:
        return self.squares, sorted(self.bad)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _outside() -> FrameType:
    """The frame that waits for a batch: the script's, or our own rounds where step.run walks them."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name in ("_outside", "_greet", "_rounds"):
        frame = frame.f_back
    return frame


def replayed(words: str, rank: int) -> tuple[type[Run[Any]], type[StepLoop]]:
    """A run and an engine that replay what these words ask for (Asked)."""
    return Run, type("Engine", (ReplayedLoop,), {"wanted": ReplayRequest.of(words)})
