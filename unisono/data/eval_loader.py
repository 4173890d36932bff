"""A walk over data without training: every sample once, on any number of processes, in micro-batches of one shape.

Data that can be indexed is dealt in stretches: each process reads its own. Any other iterable is read by everybody from
beginning to end, and the micro-batches are dealt in turn. How it is cut depends on the settings alone, and so does the
randomness of each micro-batch: it is seeded before its samples are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from unisono.config import Settings
from unisono.data import alignment
from unisono.data.loader import Collate, Loader, Schedule, length_of, refuse_made_batches, same_length, to_device
from unisono.data.rng import seed_everything
from unisono.data.streaming.stream import settle_streams
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder, cut_batch
from unisono.plan.rng_keys import EVALUATE, ROUND, micro_batch_key, mix


class EvalBatch(NamedTuple):
    """Its number, from 0 in the data's own order; how many samples it has; what they were collated into.

    spare  somebody else has it as well, for whom it counts
    """

    number: int
    samples: int
    batch: Any
    spare: bool = False


class EvalLoader:
    """Iterate over it for this process's micro-batches; then `finish` says how many there are of all processes.

    what      names the data in messages
    abreast   every process must have equally many, since none can go on without the others (each holds a part of every
              layer): who would have fewer has a spare one at the end
    """

    def __init__(
        self,
        data: Any,
        what: str,
        settings: Settings,
        group: ProcessGroup,
        collate: Collate | None,
        *,
        abreast: bool = False,
    ) -> None:
        self.data, self.what, self.settings, self.group, self.collate = data, what, settings, group, collate
        self.abreast = abreast
        self.size = settings.micro_batch or -(-settings.batch // settings.virtual_ranks)
        self.key = mix(settings.seed, EVALUATE)
        self._count = self._samples = 0

    def __iter__(self) -> Iterator[EvalBatch]:
        refuse_made_batches(self.data, self.what)
        settle_streams(self.data, self.group, self.settings.loader.on_error)
        sized = hasattr(self.data, "__getitem__") and hasattr(self.data, "__len__")
        if sized and not isinstance(self.data, IterableDataset):
            return self._indexed()
        if not isinstance(self.data, Iterable):
            length_of(self.data, self.what)  # says what it lacks
        return self._read()

    def finish(self) -> int:
        """How many micro-batches there are. Raises DataError, on every process, if they have not all seen the same."""
        same_length(self.group, self._samples, self.what)
        if self._samples == 0:
            raise DataError(
                f"{self.what} is of class {type(self.data).__name__}.",
                "It ended before its first sample.",
                "check the path or the filter that makes it; an iterator can be walked through only once.",
            )
        return self._count

    def _indexed(self) -> Iterator[EvalBatch]:
        length = length_of(self.data, self.what)
        same_length(self.group, length, self.what)
        # one "step" per micro-batch, on one virtual rank: the order is the data's own
        order = BatchOrder(length=length, batch=self.size, virtual_ranks=1, seed=self.key, shuffle=False)
        self._count, self._samples = order.steps_per_epoch, length
        first, last = cut_batch(self._count, self.group.size, self.group.rank)
        ours = range(first, last)
        if self.abreast and len(ours) < -(-self._count // self.group.size):  # a neighbour of ours
            first, last = (first, last + 1) if last < self._count else (first - 1, last)
        loader = Loader(
            self.data,
            order,
            Schedule(((0, 1),)),
            seat=Slot(0),
            first=first,
            last=last,
            device=self.group.device,
            collate=self.collate,
            workers=self.settings.loader.workers,
            prefetch=self.settings.loader.prefetch,
        )
        try:
            for place, batch in loader:
                yield EvalBatch(place.step, order.batch_size(place.step), batch, spare=place.step not in ours)
        finally:
            loader.close()

    def _read(self) -> Iterator[EvalBatch]:
        key, collate = mix(self.key, ROUND), self.collate or default_collate
        device = None if self.group.device.type == "cpu" else self.group.device
        seed_everything(self.key)
        samples, last = iter(self.data), list[Any]()

        def made(number: int, some: list[Any], *, spare: bool = False) -> EvalBatch:
            batch = alignment.align(collate(some))
            return EvalBatch(number, len(some), batch if device is None else to_device(batch, device), spare)

        while True:
            seed_everything(micro_batch_key(key, self._count, 0, 0), device)
            some = list(islice(samples, self.size))
            if not some:
                break
            number, last = self._count, some
            self._count, self._samples = number + 1, self._samples + len(some)
            if number % self.group.size == self.group.rank:
                yield made(number, some)
        if self.abreast and self.group.rank >= (self._count % self.group.size or self.group.size):
            yield made(self._count - 1, last, spare=True)
