"""The loader: this process's micro-batches of every step, prefetched by torch's DataLoader.

A task is one whole micro-batch: its key, its place and its samples. A worker seeds from the key, fetches and collates.
So the result does not depend on which worker it is, or on whether there are any. A micro-batch has one stream of random
numbers: fetching draws first, the loop's body continues that stream, and a worker that drew sends its states along.
With one virtual rank the loop's torch generator is a stream of its own. One loader serves all epochs, so no time is
lost at the end of one.

The assignment of virtual ranks may change while the loader runs. Tasks are planned ahead, so a new assignment applies
from the first step that no process has planned yet (`horizon`). The old one applies until then, and no sample is
fetched twice or discarded.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from unisono.data import alignment
from unisono.data.computed_batches import IndexDataset
from unisono.data.fast_collate import are_rows, collate, read_rows, stack_as_without_workers, stack_tensors
from unisono.data.loader_workers import MOST_RESTARTS, WorkerIterator, deaths, is_worker_death
from unisono.data.rng import (
    Drawn,
    State,
    comparable_state,
    drawn_since,
    get_state,
    seed_device,
    seed_everything,
    seed_others,
    set_others,
    set_state,
)
from unisono.data.worker_messages import OutgoingMessage, WorkerMessages
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError, UnisonoError
from unisono.plan.assignment import Slot, micro_batches_of
from unisono.plan.batch_order import BatchOrder, MicroBatchId
from unisono.plan.rng_keys import ROUND, micro_batch_key, mix

Collate = Callable[[list[Any]], Any]
Spans = tuple[tuple[int, int], ...]
Fetched = tuple[Any, State | Drawn | None]


class FetchTask(NamedTuple):
    """One micro-batch to fetch."""

    place: MicroBatchId
    run_key: int
    samples: list[int]

    @property
    def key(self) -> int:
        """The key of its random numbers."""
        step, virtual_rank, number, _ = self.place
        return micro_batch_key(self.run_key, step, virtual_rank, number)


class RaisedInWorker(NamedTuple):
    """An error of this library in a loader worker, which is raised by the process that waits for the micro-batch."""

    error: UnisonoError


class Schedule:
    """The assignment of virtual ranks at each step: the latest one that began at or before the step."""

    def __init__(self, spans: Spans) -> None:
        self._changes: list[tuple[int, Spans]] = [(0, spans)]

    def at(self, step: int) -> Spans:
        first, spans = self._changes[-1]
        return spans if first <= step else self._changes[0][1]

    def change(self, first_step: int, spans: Spans) -> None:
        """Use `spans` from `first_step` on. Calls must be in the order of steps."""
        assert first_step >= self._changes[-1][0]
        self._changes = [(0, self.at(first_step - 1)), (first_step, spans)]


class MicroBatchDataset(Dataset[Any]):
    """The user's data set, indexed by tasks instead of sample numbers. Runs in workers or in the process itself.

    Batches are aligned (alignment.py); in a worker before they are sent, since sending changes the layout of some.

    Args:
        data: the user's data set.
        collate_fn: as for DataLoader.
        keyed: whether the loop's body continues the random numbers of the fetch. If False, its torch generator is one
            stream, as in plain torch, and a fetch leaves it alone.
    """

    def __init__(self, data: Any, collate_fn: Collate, *, keyed: bool = True) -> None:
        self.data, self.keyed = data, keyed
        self.collate = collate if collate_fn is default_collate else collate_fn
        self._is_default = collate_fn is default_collate
        self.rows = are_rows(data, collate_fn)
        self._batched = hasattr(data, "__getitems__")
        self.computes = isinstance(data, IndexDataset)
        self.never_draws = self.rows or type(data) is IndexDataset
        self.messages = WorkerMessages(0)

    def __getitem__(self, task: FetchTask) -> Fetched | OutgoingMessage:
        """Return the batch for a DataLoader, and the states of the generators; None if a worker's fetch drew none."""
        info = get_worker_info()
        if info is not None:
            return self.messages.outgoing(info.id, self._fetch_in_worker(task))
        return (read_rows(self.data, task.samples), None) if self.rows else (self.fetch(task), get_state())

    def _fetch_in_worker(self, task: FetchTask) -> Fetched:
        if self.rows:
            return read_rows(self.data, task.samples), None
        stack_as_without_workers()
        seed_everything(task.key)
        before = comparable_state()
        try:
            batch = self.fetch(task)
        except UnisonoError as error:  # torch would raise it with the worker's traceback in place of its first line
            if error.__cause__ is not None:  # a mistake of the script, whose traceback helps
                raise
            return RaisedInWorker(error), None
        return batch, drawn_since(before)

    def fetch(self, task: FetchTask) -> Any:
        """Return the batch, and leave the generators in the states that the loop's body starts with."""
        data, samples, stream = self.data, task.samples, None
        if self.keyed:
            seed_everything(task.key)
        elif not self.never_draws:
            stream = torch.default_generator.get_state()
            seed_everything(task.key)
        if self.rows:
            return read_rows(data, samples)
        threads = 1 if self.computes else torch.get_num_threads()
        if threads > 1:
            torch.set_num_threads(1)  # as in a worker, since the bits depend on it
        try:
            if self.computes:
                return data.micro_batch(task.place.step, samples)
            read = data.__getitems__(samples) if self._batched else [data[i] for i in samples]
            batch = stack_tensors(read) if self._is_default else None
            return alignment.align(self.collate(read)) if batch is None else batch
        finally:
            if threads > 1:
                torch.set_num_threads(threads)
            if stream is not None:
                torch.default_generator.set_state(stream)


class Loader:
    """Yield (place, batch) for each micro-batch of this process, in order, from step `first` to `last` - 1.

    Args:
        data: the user's data set.
        order: the order of samples.
        schedule: the assignment of virtual ranks.
        slot: which micro-batches are this process's.
        first: the first step.
        last: the step after the last one.
        device: where batches are needed.
        collate: as for DataLoader; None: default_collate.
        workers: number of worker processes; 0: this process fetches.
        prefetch: micro-batches that each worker fetches ahead.
        keyed: see MicroBatchDataset.
    """

    def __init__(
        self,
        data: Any,
        order: BatchOrder,
        schedule: Schedule,
        *,
        slot: Slot,
        first: int,
        last: int,
        device: torch.device,
        collate: Collate | None = None,
        workers: int = 0,
        prefetch: int = 2,
        keyed: bool = True,
    ) -> None:
        self.order, self.schedule, self.slot = order, schedule, slot
        self.steps: Iterable[int] = range(first, last)
        """The steps to plan. Without workers this may be an iterator that yields them as they begin."""
        self.device = device
        self._workers = workers
        self.horizon = first
        """The first step that has not been planned yet."""
        self._pending: deque[FetchTask] = deque()  # planned and not delivered yet
        self._planned = self.plan()
        self._tasks: Iterator[FetchTask] | None = None  # set where nothing is prefetched
        self.fetcher = fetcher = MicroBatchDataset(data, collate or default_collate, keyed=keyed)
        self._worker_iterator: WorkerIterator[Fetched] | None = None
        if fetcher.computes or (workers == 0 and device.type == "cpu"):
            # A DataLoader would only add 20 microseconds a batch, and a worker cannot compute with the script's model.
            self._tasks = self._planned
            self._batches: Iterable[Any] = map(fetcher.fetch if device.type == "cpu" else self._compute, self._tasks)
            return

        def start_workers(report: Callable[[int], None]) -> Iterator[Fetched]:
            with warnings.catch_warnings():  # workers that wait for storage may be more than the cores
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                return iter(new_loader(report))

        def new_loader(report: Callable[[int], None]) -> DataLoader[Fetched]:
            fetcher.messages = WorkerMessages(workers)  # those of workers that died are not used again
            return DataLoader(
                fetcher,
                sampler=_TaskSampler(self),
                batch_size=None,
                collate_fn=_identity,
                num_workers=workers,
                prefetch_factor=prefetch if workers else None,
                pin_memory=device.type != "cpu",
                generator=torch.Generator(),
                worker_init_fn=report,
            )

        self._worker_iterator = WorkerIterator(start_workers, workers, self._has_more)
        self._batches = self._from_workers(self._worker_iterator)

    def _has_more(self) -> bool:
        """Return whether a micro-batch has not been delivered yet."""
        return bool(self._pending) or next(self._planned, None) is not None

    def _from_workers(self, fetched: Iterator[Fetched]) -> Iterator[Any]:
        """Yield the batches; set this process's generators to the states in which the worker left its own."""
        for batch, state in fetched:
            if isinstance(batch, RaisedInWorker):
                raise batch.error
            if self.fetcher.keyed:
                seed_everything(self._pending[0].key, None if self.device.type == "cpu" else self.device)
                restore = set_state
            else:
                if not self.fetcher.never_draws:
                    seed_others(self._pending[0].key)
                restore = set_others
            if state is not None:
                restore(state)
            yield alignment.align(batch if self.device.type == "cpu" else to_device(batch, self.device))

    def close(self) -> None:
        """Stop the workers. Left to the garbage collector, each may take five seconds to end."""
        self._batches = ()
        workers, self._worker_iterator = self._worker_iterator, None
        if workers is not None:
            workers.close()
            self.fetcher.messages.close()

    def __iter__(self) -> Iterator[tuple[MicroBatchId, Any]]:
        batches = iter(self._batches)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                raise self._describe(error) from error.__cause__
            yield self._pending.popleft().place, batch

    def fetch(self, place: MicroBatchId) -> tuple[MicroBatchId, Any]:
        """Fetch one micro-batch out of order: one that was assigned to another process.

        The generators are left in the states that the loop's body starts with, that of the device included.
        """
        samples = self.order.micro_batches(place.step, place.virtual_rank)[place.number]
        task = FetchTask(place, mix(self.order.seed, ROUND), list(samples))
        computes = self.fetcher.computes
        try:
            batch = self._compute(task) if computes else self.fetcher.fetch(task)
        except Exception as error:
            error.add_note(_while_fetching(place, samples))
            raise
        if computes or self.device.type == "cpu":
            return place, batch
        if self.fetcher.keyed:
            seed_device(task.key, self.device)
        return place, to_device(batch, self.device)

    def _compute(self, task: FetchTask) -> Any:
        """Return a micro-batch that the script's function computes, with the generator of the device seeded before."""
        if self.device.type == "cpu":
            return self.fetcher.fetch(task)
        if self.fetcher.keyed:
            seed_device(task.key, self.device)
        return to_device(self.fetcher.fetch(task), self.device)

    def skip(self, count: int, batches: Iterator[tuple[MicroBatchId, Any]]) -> None:
        """Drop the next `count` micro-batches of this process, which others have computed.

        Without prefetching they are not fetched at all.
        """
        for _ in range(count):
            if self._tasks is None:
                next(batches)
            else:
                next(self._tasks)
                self._pending.popleft()

    def plan(self) -> Iterator[FetchTask]:
        """Yield every task of this process in order, and keep each until its micro-batch is delivered."""
        run_key = mix(self.order.seed, ROUND)
        for step in self.steps:
            span = self.schedule.at(step)[self.slot.span]
            self.horizon = step + 1
            for place, samples in micro_batches_of(self.order.places(step, span), self.slot):
                task = FetchTask(place, run_key, samples)
                self._pending.append(task)
                yield task

    def _describe(self, error: Exception) -> Exception:
        """Return the error of a fetch with the step and the samples that it is about."""
        if not self._pending:
            return error
        place, _, samples = self._pending[0]
        if self._workers and is_worker_death(error):
            return DataError(
                f"A loader worker died {MOST_RESTARTS + 1} times in a row.",
                f"It left no message and fetched no micro-batch from step {place.step}, virtual rank "
                f"{place.virtual_rank} on. {(str(error) or type(error).__name__).splitlines()[0]}",
                "if memory ran out, use fewer workers (--set loader.workers=1); to see its error, "
                "fetch without workers (--set loader.workers=0).",
            )
        error.add_note(_while_fetching(place, samples))
        return error

    def undelivered(self) -> Iterator[FetchTask]:
        """Yield the tasks that are pending, then new ones."""
        tasks = chain(list(self._pending), self._planned)
        while True:
            with deaths.deferred():  # an exception inside `plan` would end it
                task = next(tasks, None)
            if task is None:
                return
            yield task


class _TaskSampler:
    """The tasks of a loader as a sampler for DataLoader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[FetchTask]:
        return self._loader.undelivered()


def _identity(batch: Any) -> Any:
    return batch


def _while_fetching(place: MicroBatchId, samples: Sequence[int]) -> str:
    return f"while fetching the samples {_first_few(samples)} of step {place.step}, virtual rank {place.virtual_rank}"


def _first_few(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (f", ... ({len(samples)} in all)" if len(samples) > 8 else "")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`. Looks into lists, tuples and mappings at any depth."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def same_length(group: ProcessGroup, length: int, what: str) -> None:
    """Raise DataError if the data has different lengths on different processes. Collective."""
    lengths = group.all_gather_object(length)
    if len(set(lengths)) > 1:
        found = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(lengths) if lengths.index(n) == rank)
        raise DataError(
            f"{what} must be the same on every process: each takes its part of it by sample number.",
            f"It has {found} samples.",
            "pass the whole data set on every process (no DistributedSampler, no data[rank::size]).",
        )


def refuse_data_loader(data: Any, what: str) -> None:
    """Raise DataError if the data is a DataLoader."""
    if isinstance(data, DataLoader):
        raise DataError(
            f"{what} must not be a DataLoader.",
            "Its batches are already made, and the bits would depend on their shape.",
            "pass loader.dataset and collate_fn=loader.collate_fn; set the size of a batch with --set batch=64.",
        )


def length_of(data: Any, what: str) -> int:
    """Return the number of samples in a map-style data set. Raises DataError for other data, and for an empty set."""
    refuse_data_loader(data, what)
    stream = isinstance(data, IterableDataset)  # Dataset gives it a __getitem__ that only raises
    if stream or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        problem = "It is an IterableDataset" if stream else "It lacks __len__ or __getitem__"
        raise DataError(
            f"{what} is not a map-style data set.",
            f"It is of class {type(data).__name__}. {problem}, and the order of a run needs sample numbers.",
            "pass a torch.utils.data.Dataset with __len__ and __getitem__, or a unisono.Stream, which has shards "
            "(docs/guide/streams.md).",
        )
    length = len(data)
    if length == 0:
        raise DataError(
            f"{what} has no samples.",
            f"The length of the {type(data).__name__} is 0.",
            "check the path or the filter.",
        )
    return length
