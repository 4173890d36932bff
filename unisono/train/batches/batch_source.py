"""The micro-batches of this process, step by step: which they are, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from unisono.data.loader import Loader, Schedule
from unisono.data.rng import RngStates, seed_everything
from unisono.errors import DataError
from unisono.plan.assignment import Slot, Spans, micro_batches_of
from unisono.plan.batch_order import BatchOrder, MicroBatchId
from unisono.plan.rng_keys import ROUND, STEP, UPDATE, micro_batch_key, mix
from unisono.train.balance.work_stealing import NoWorkStealing, WorkStealing
from unisono.train.collective import Rounds
from unisono.train.modules.buffer_sync import BufferSync
from unisono.train.step_state import StepState

OpenLoader = Callable[[Schedule, Slot, int], Loader]
"""Open the loader of a slot's micro-batches, from a step on."""


class Assignment(NamedTuple):
    """The virtual ranks of a pass.

    spans      of all processes; (): idle processes take what is left
    span       [lo, hi) of this process
    pieces     number of micro-batches of each virtual rank of the span
    is_stolen  whether idle processes take virtual ranks that others have not begun
    """

    spans: Spans
    span: tuple[int, int]
    pieces: Mapping[int, int]
    is_stolen: bool = False


class Batches(Protocol):
    """Where the micro-batches of a step come from."""

    def seed_step(self, step: int) -> None: ...

    def begin(self, step: StepState) -> Assignment: ...

    def rounds(self, step: StepState, assignment: Assignment) -> Rounds: ...

    def close(self) -> None: ...


class BatchSource:
    """Fetch this process's micro-batches, and prepare random number generators and buffers for each of them.

    slot      which span this process computes
    schedule  the spans of all processes, by step
    stealing  lets idle processes take virtual ranks from others
    """

    def __init__(
        self,
        order: BatchOrder,
        slot: Slot,
        schedule: Schedule,
        first: int,
        *,
        open_loader: OpenLoader,
        build_stealing: Callable[[], WorkStealing | NoWorkStealing],
        generators: RngStates,
        buffers: BufferSync,
        device: torch.device,
    ) -> None:
        self.order, self.slot, self.schedule = order, slot, schedule
        self._open_loader, self._build_stealing = open_loader, build_stealing
        self._generators, self._buffers = generators, buffers
        self.loader = open_loader(schedule, slot, first)
        self._batches = iter(self.loader)
        self.stealing = build_stealing()
        self._is_stolen = False
        self._is_fixed = False
        self._accelerator = device if device.type != "cpu" else None
        self._keys = {key: mix(order.seed, key) for key in (STEP, ROUND, UPDATE)}
        self._pieces: dict[tuple[int, tuple[int, int]], dict[int, int]] = {}
        self._has_seeded = False

    # -- random numbers

    def seed_step(self, step: int) -> None:
        """Seed for what the loop does before its rounds: the same on every process, and after a resume.

        With one virtual rank there is one stream of random numbers, as in plain torch, and the checkpoint keeps it.
        """
        if self.order.virtual_ranks == 1:
            had_seeded, self._has_seeded = self._has_seeded, True
            if had_seeded or self._generators.apply():
                return
        seed_everything(mix(self._keys[STEP], step), self._accelerator)

    def seed_pass(self, place: MicroBatchId, number: int) -> None:
        """Seed for a micro-batch of a later pass. (With one virtual rank there is one stream, as in plain torch.)"""
        if number and self.order.virtual_ranks > 1:
            seed_everything(mix(micro_batch_key(self._keys[ROUND], *place[:3]), number), self._accelerator)

    def seed_update(self, step: StepState) -> None:
        """Seed for what comes after the rounds: noise on p.grad must not depend on which process computed what."""
        if self.order.virtual_ranks > 1:
            key = mix(self._keys[UPDATE], step.number, *([step.passes] if step.passes else []))
            seed_everything(key, self._accelerator)

    # -- the micro-batches of a pass

    def begin(self, step: StepState) -> Assignment:
        """Return what this process computes in the next pass of a step. Later passes follow the first one."""
        if step.passes == 0:
            self._is_stolen = self.stealing.on and not self._is_fixed
        if self._is_stolen:
            everything = (0, self.order.virtual_ranks)
            return Assignment((), everything, self.pieces(step, everything), is_stolen=True)
        spans = self.schedule.at(step.number)
        span = spans[self.slot.span]
        return Assignment(spans, span, self.pieces(step, span))

    @property
    def is_stolen(self) -> bool:
        """Whether idle processes take virtual ranks in the step under way."""
        return self._is_stolen

    def rounds(self, step: StepState, assignment: Assignment) -> Rounds:
        """Return (place, batch, whether it is the last one here) for each micro-batch of this process in a pass.

        The first pass fetches them, and keeps them in `step.kept` if there may be another pass.
        """
        if step.passes:
            return self._kept(step, overlap=not assignment.is_stolen)
        return self._stolen(step) if assignment.is_stolen else self._assigned(step, assignment.pieces)

    def _assigned(self, step: StepState, pieces: Mapping[int, int]) -> Rounds:
        number, kept, batches = step.number, step.kept, self._batches
        left = -(-sum(pieces.values()) // self.slot.turns)
        while left:
            left -= 1
            try:
                place, batch = next(batches)
            except StopIteration:
                raise _ended_early(number) from None
            assert place.step == number
            if kept is not None:
                kept.append((place, batch))
            self._buffers.enter(place.virtual_rank, spare=place.spare)
            yield place, batch, left == 0
        self._buffers.leave()

    def _stolen(self, step: StepState) -> Rounds:
        """Yield the micro-batches of virtual ranks that this process got because it was idle. None is known to be the
        last one."""
        number, spans = step.number, self.schedule.at(step.number)
        pieces = self.pieces(step, (0, self.order.virtual_ranks))
        ahead = sum(pieces[v] for v in range(*spans[self.slot.span]))  # fetched ahead, or about to be
        for virtual_rank, at_home in self.stealing.virtual_ranks_of(number, spans, [v for v in pieces if pieces[v]]):
            for piece in range(pieces[virtual_rank]):
                if at_home:
                    ahead -= 1
                    place, batch = next(self._batches)
                else:
                    place, batch = self.loader.fetch(MicroBatchId(number, virtual_rank, piece))
                if step.kept is not None:
                    step.kept.append((place, batch))
                self._buffers.enter(place.virtual_rank)
                yield place, batch, False
        self.loader.skip(ahead, self._batches)
        self._buffers.leave()

    def _kept(self, step: StepState, *, overlap: bool) -> Rounds:
        """Yield what the first pass has fetched, under this pass's own key."""
        kept = step.kept or []
        for number, (place, batch) in enumerate(kept, 1):
            self.seed_pass(place, step.passes)
            self._buffers.enter(place.virtual_rank, spare=place.spare)
            yield place, batch, overlap and number == len(kept)
        self._buffers.leave()

    def missing(self, step: StepState, virtual_ranks: Iterable[int]) -> Rounds:
        """Yield micro-batches that no process has computed, after a death: they are fetched out of turn."""
        for place in self.places(step.number, virtual_ranks):
            place, batch = self.loader.fetch(place)
            if step.kept is not None and step.passes == 0:
                step.kept.append((place, batch))
            self.seed_pass(place, step.passes)
            self._buffers.enter(place.virtual_rank, spare=place.spare)
            yield place, batch, False
        self._buffers.leave()

    def places(self, step: int, virtual_ranks: Iterable[int]) -> list[MicroBatchId]:
        """Return this process's micro-batches of these virtual ranks, which it may share with others in turns."""
        places = [MicroBatchId(step, v, n) for v in virtual_ranks for n in range(len(self.order.micro_bounds(step, v)))]
        return [place for place, _ in micro_batches_of(((place, None) for place in places), self.slot)]

    def fetch(self, place: MicroBatchId) -> Any:
        """Return a micro-batch, out of turn."""
        return self.loader.fetch(place)[1]

    def pieces(self, step: StepState, span: tuple[int, int]) -> dict[int, int]:
        """Return the number of micro-batches of each virtual rank of a span: it follows from the size of the batch."""
        known = self._pieces.get((step.samples, span))
        if known is None:
            found = {v: len(self.order.micro_bounds(step.number, v)) for v in range(*span)}
            known = self._pieces[step.samples, span] = found
        return known

    # -- other assignments

    @property
    def horizon(self) -> int:
        """The first step of which nothing was fetched here."""
        return self.loader.horizon

    def reassign(self, first: int, spans: Spans) -> None:
        """Let these spans hold from step `first` on, whatever the speed of the processes."""
        self.schedule.change(first, spans)
        self._is_fixed = True

    @property
    def is_fixed(self) -> bool:
        """Whether the assignment was fixed by `reassign`."""
        return self._is_fixed

    def reopen(self, slot: Slot, schedule: Schedule, first: int) -> None:
        """Fetch the micro-batches of another slot from step `first` on, since other processes make the steps."""
        self.loader.close()
        self.slot, self.schedule = slot, schedule
        self.loader = self._open_loader(schedule, slot, first)
        self._batches = iter(self.loader)
        self.stealing, self._is_fixed = self._build_stealing(), False

    def follow(self, steps: Iterator[int]) -> None:
        """Fetch the micro-batches of these steps instead of consecutive ones."""
        self.loader.steps = steps

    def close(self) -> None:
        """Let loader workers go; closing twice changes nothing."""
        self.loader.close()
        self._batches = iter(())


def _ended_early(step: int) -> DataError:
    return DataError(f"Step {step} has too few micro-batches.", "The data set ended early.", "check its __len__.")
