"""Load data for evaluation: every sample once, on any number of processes, in micro-batches of one shape.

Each process reads a contiguous part of a map-style data set. An iterable is read by every process from beginning to
end, and its micro-batches are assigned round robin. The micro-batches depend on the settings alone, and so do their
random numbers: the generators are seeded before the samples of each are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from unisono.config import Settings
from unisono.data import alignment
from unisono.data.loader import Collate, Loader, Schedule, length_of, refuse_data_loader, same_length, to_device
from unisono.data.prepared import not_counting, prepare
from unisono.data.rng import seed_everything
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder, cut_batch
from unisono.plan.rng_keys import EVALUATE, ROUND, micro_batch_key, mix


class EvalBatch(NamedTuple):
    """One micro-batch.

    Attributes:
        number: from 0, in the order of the data.
        samples: how many samples it has.
        batch: the collated samples.
        spare: whether it is padding: another process has it as well, and only that one counts it.
    """

    number: int
    samples: int
    batch: Any
    spare: bool = False


class EvalLoader:
    """Iterate over this process's micro-batches; `finish` then returns the number of all processes' micro-batches.

    Args:
        data: a map-style data set, a Stream, or any iterable.
        what: the name of the data in messages.
        settings: of the run.
        group: the processes that share the data.
        collate: as for DataLoader; None: default_collate.
        lockstep: give every process equally many micro-batches, with a spare one at the end where needed. Needed where
            each process holds a part of every layer, so that none can compute without the others.
    """

    def __init__(
        self,
        data: Any,
        what: str,
        settings: Settings,
        group: ProcessGroup,
        collate: Collate | None,
        *,
        lockstep: bool = False,
    ) -> None:
        self.data, self.what, self.settings, self.group, self.collate = data, what, settings, group, collate
        self.lockstep = lockstep
        self.size = settings.micro_batch or -(-settings.batch // settings.virtual_ranks)
        self.key = mix(settings.seed, EVALUATE)
        self._count = self._samples = 0

    def __iter__(self) -> Iterator[EvalBatch]:
        refuse_data_loader(self.data, self.what)
        prepare(self.data, self.group, self.settings.loader.on_error, not_counting)
        sized = hasattr(self.data, "__getitem__") and hasattr(self.data, "__len__")
        if sized and not isinstance(self.data, IterableDataset):
            return self._indexed()
        if not isinstance(self.data, Iterable):
            length_of(self.data, self.what)  # raises DataError
        return self._read()

    def finish(self) -> int:
        """Return the number of micro-batches.

        Raises:
            DataError: the processes saw different data, or none. Raised on every process.
        """
        same_length(self.group, self._samples, self.what)
        if self._samples == 0:
            raise DataError(
                f"{self.what} has no samples.",
                f"The {type(self.data).__name__} ended before its first sample.",
                "check the path or the filter; an iterator can be read only once.",
            )
        return self._count

    def _indexed(self) -> Iterator[EvalBatch]:
        length = length_of(self.data, self.what)
        same_length(self.group, length, self.what)
        # one "step" per micro-batch on one virtual rank, which gives the order of the data
        order = BatchOrder(length=length, batch=self.size, virtual_ranks=1, seed=self.key, shuffle=False)
        self._count, self._samples = order.steps_per_epoch, length
        first, last = cut_batch(self._count, self.group.size, self.group.rank)
        ours = range(first, last)
        if self.lockstep and len(ours) < -(-self._count // self.group.size):  # add a neighboring one
            first, last = (first, last + 1) if last < self._count else (first - 1, last)
        loader = Loader(
            self.data,
            order,
            Schedule(((0, 1),)),
            slot=Slot(0),
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
        iterator, last = iter(self.data), list[Any]()

        def build(number: int, samples: list[Any], *, spare: bool = False) -> EvalBatch:
            batch = alignment.align(collate(samples))
            return EvalBatch(number, len(samples), batch if device is None else to_device(batch, device), spare)

        while True:
            seed_everything(micro_batch_key(key, self._count, 0, 0), device)
            samples = list(islice(iterator, self.size))
            if not samples:
                break
            number, last = self._count, samples
            self._count, self._samples = number + 1, self._samples + len(samples)
            if number % self.group.size == self.group.rank:
                yield build(number, samples)
        if self.lockstep and self.group.rank >= (self._count % self.group.size or self.group.size):
            yield build(self._count - 1, last, spare=True)
