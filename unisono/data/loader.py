"""The loader: this process's micro-batches of every step, fetched ahead by torch's DataLoader.

A task is one whole micro-batch: its key, its place, its samples. A worker seeds from the key, fetches, collates;
which worker it is, or whether there is any, changes nothing. A micro-batch has one stream of random numbers: fetching
draws first, the body of the loop goes on where that stopped, and a worker that drew sends home where it stopped. One
loader runs through all epochs, so no epoch's end stalls.

Placement may change while it runs. Tasks are dealt ahead, so a new placement holds from the first step for which nobody
has dealt yet (`horizon`); until then the old one does, and nothing is fetched twice or thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from unisono.data import alignment
from unisono.data.fast_collate import are_rows, collate, collate_as_at_home, read_rows
from unisono.data.loader_workers import MOST_RESTARTS, WorkerIterator, deaths, tells_of_a_death
from unisono.data.rng import State, get_state, same_state, seed_everything, set_state
from unisono.data.rng_marks import mark
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError
from unisono.plan.assignment import Slot, micro_batches_of
from unisono.plan.batch_order import BatchOrder, MicroBatchId
from unisono.plan.rng_keys import ROUND, micro_batch_key, mix

Collate = Callable[[list[Any]], Any]
Spans = tuple[tuple[int, int], ...]
Fetched = tuple[Any, State | None]


class FetchTask(NamedTuple):
    """One micro-batch to fetch."""

    place: MicroBatchId
    run_key: int
    samples: list[int]

    @property
    def key(self) -> int:
        """Of its random numbers."""
        return micro_batch_key(self.run_key, *self.place[:3])


class Schedule:
    """Which placement holds at which step: the newest that began at or before it."""

    def __init__(self, spans: Spans) -> None:
        self._changes: list[tuple[int, Spans]] = [(0, spans)]

    def at(self, step: int) -> Spans:
        first, spans = self._changes[-1]
        return spans if first <= step else self._changes[0][1]

    def change(self, first_step: int, spans: Spans) -> None:
        """From `first_step` on, `spans` holds. Steps must be announced in order."""
        assert first_step >= self._changes[-1][0]
        self._changes = [(0, self.at(first_step - 1)), (first_step, spans)]


class IndexDataset(Dataset[int]):
    """No data: a step's batch is the next so many numbers. Fetching gives a micro-batch's as a range."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return self.batch

    def __getitem__(self, sample: int) -> int:
        return sample

    def micro_batch(self, step: int, samples: Sequence[int]) -> range:
        first = step * self.batch + samples[0]
        return range(first, first + len(samples))


class MicroBatchDataset(Dataset[Any]):
    """The user's data set, seen through tasks instead of sample numbers. Runs in workers, or in the process itself.
    What it returns is aligned (alignment.py), before it leaves a worker too: the layout of some tensors is lost there.

    keyed  False: the generators are one stream, as in plain torch, and only a fetch that draws begins it anew
    """

    def __init__(self, data: Any, collate_fn: Collate, *, keyed: bool = True) -> None:
        self.data, self.keyed = data, keyed
        self.collate = collate if collate_fn is default_collate else collate_fn
        self.rows = are_rows(data, collate_fn)
        self._draws = False  # has a fetch been seen to draw?

    def __getitem__(self, task: FetchTask) -> Fetched:
        """For a worker: the batch, and where the generators stand if the fetch drew from them."""
        if self.rows:
            return read_rows(self.data, task.samples), None
        if get_worker_info() is None:
            return self.fetch(task), get_state()
        collate_as_at_home()
        seed_everything(task.key)
        before = get_state()
        batch = self._read(task)
        after = get_state()
        return batch, None if same_state(before, after) else after

    def fetch(self, task: FetchTask) -> Any:
        """The batch; the generators stand where they shall for what the loop does with it."""
        if self.keyed:
            seed_everything(task.key)
            return self._read(task)
        if self.rows:  # which cannot draw
            return read_rows(self.data, task.samples)
        if not self._draws:
            before = mark()
            batch = self._read(task)
            if mark() == before:
                return batch
            self._draws = True
        # a fetch that draws does so from its key; what it drew from the stream before that was seen is drawn anew
        stream = get_state()
        seed_everything(task.key)
        before = mark()
        batch = self._read(task)
        if mark() == before:
            set_state(stream)
        return batch

    def _read(self, task: FetchTask) -> Any:
        data, samples = self.data, task.samples
        if self.rows:
            return read_rows(data, samples)
        if type(data) is IndexDataset:
            return data.micro_batch(task.place.step, samples)
        threads = torch.get_num_threads()
        if threads > 1:
            torch.set_num_threads(1)  # as in a worker: bits depend on it
        try:
            many = hasattr(data, "__getitems__")
            return alignment.align(self.collate(data.__getitems__(samples) if many else [data[i] for i in samples]))
        finally:
            if threads > 1:
                torch.set_num_threads(threads)


class Loader:
    """Yields (place, batch) for every micro-batch that is this process's, in order, from step `first` to `last` - 1.

    keyed  False: a fetch that draws nothing leaves the generators alone, so they are one stream, as in plain torch
    """

    def __init__(
        self,
        data: Any,
        order: BatchOrder,
        schedule: Schedule,
        *,
        seat: Slot,
        first: int,
        last: int,
        device: torch.device,
        collate: Collate | None = None,
        workers: int = 0,
        prefetch: int = 2,
        keyed: bool = True,
    ) -> None:
        self.order, self.schedule, self.seat = order, schedule, seat
        self.steps: Iterable[int] = range(first, last)
        """Those to deal, as they become known; in the process itself they may come one by one."""
        self.device = device
        self._workers = workers
        self.horizon = first
        """No step from this one on has been dealt yet."""
        self._dealt: deque[FetchTask] = deque()
        self._dealing = self.deal()
        self._tasks: Iterator[FetchTask] | None = None  # where nothing is fetched ahead
        self.fetcher = fetcher = MicroBatchDataset(data, collate or default_collate, keyed=keyed)
        self._crew: WorkerIterator[Fetched] | None = None
        if workers == 0 and device.type == "cpu":  # a DataLoader would add nothing but 20 microseconds a batch
            self._tasks = self._dealing
            self._batches: Iterable[Any] = map(fetcher.fetch, self._tasks)
            return

        def begin(arrived: Callable[[int], None]) -> Iterator[Fetched]:
            batches = DataLoader(
                fetcher,
                sampler=_Tasks(self),
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=workers,
                prefetch_factor=prefetch if workers else None,
                pin_memory=device.type != "cpu",
                generator=torch.Generator(),
                worker_init_fn=arrived,
            )
            return iter(batches)

        self._crew = WorkerIterator(begin, workers, self._left)
        self._batches = self._from_workers(self._crew, fetcher.keyed)

    def _left(self) -> bool:
        """Is there a micro-batch that has not been delivered?"""
        return bool(self._dealt) or next(self._dealing, None) is not None

    def _from_workers(self, fetched: Iterator[Fetched], keyed: bool) -> Iterator[Any]:
        """The batches, each with this process's generators where the worker's stopped."""
        for batch, state in fetched:
            if keyed:
                seed_everything(self._dealt[0].key, None if self.device.type == "cpu" else self.device)
            if state is not None:
                set_state(state)
            yield alignment.align(batch if self.device.type == "cpu" else to_device(batch, self.device))

    def close(self) -> None:
        """Let the workers go. Left to the garbage collector, each may take five seconds to see that it may."""
        self._batches = ()
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def __iter__(self) -> Iterator[tuple[MicroBatchId, Any]]:
        batches = iter(self._batches)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                raise self._told(error) from error.__cause__
            yield self._dealt.popleft().place, batch

    def fetch(self, place: MicroBatchId) -> tuple[MicroBatchId, Any]:
        """One micro-batch out of turn: somebody else's, which was to compute it."""
        samples = self.order.micro_batches(place.step, place.virtual_rank)[place.number]
        try:
            batch = self.fetcher.fetch(FetchTask(place, mix(self.order.seed, ROUND), list(samples)))
        except Exception as error:
            error.add_note(_while_fetching(place, samples))
            raise
        return place, batch if self.device.type == "cpu" else to_device(batch, self.device)

    def skip(self, count: int, batches: Iterator[tuple[MicroBatchId, Any]]) -> None:
        """Let go of the next so many micro-batches of ours, which others have computed. What nobody fetches ahead is
        not fetched at all."""
        for _ in range(count):
            if self._tasks is None:
                next(batches)
            else:
                next(self._tasks)
                self._dealt.popleft()

    def deal(self) -> Iterator[FetchTask]:
        """Every task of this process, in order; what is dealt is remembered until it is yielded."""
        run_key = mix(self.order.seed, ROUND)
        for step in self.steps:
            span = self.schedule.at(step)[self.seat.span]
            self.horizon = step + 1
            for place, samples in micro_batches_of(self.order.places(step, span), self.seat):
                task = FetchTask(place, run_key, samples)
                self._dealt.append(task)
                yield task

    def _told(self, error: Exception) -> Exception:
        """The error of a fetch, with the place and the samples it was about."""
        if not self._dealt:
            return error
        (step, virtual_rank, *_), _, samples = self._dealt[0]
        where = f"step {step}, virtual rank {virtual_rank}"
        if self._workers and tells_of_a_death(error):
            return DataError(
                f"A loader worker was asked for micro-batches from {where} on.",
                f"It died without a word, {MOST_RESTARTS + 1} times in a row before one was fetched. "
                f"{(str(error) or type(error).__name__).splitlines()[0]}",
                "if memory ran out, use fewer workers (--set loader.workers=1); to see its error, "
                "fetch in the process itself (--set loader.workers=0).",
            )
        error.add_note(_while_fetching(self._dealt[0].place, samples))
        return error


class _Tasks:
    """The tasks of a loader in the shape that DataLoader takes a sampler: those that were dealt and not delivered, and
    then new ones."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[FetchTask]:
        tasks = chain(list(self._loader._dealt), self._loader._dealing)
        while True:
            with deaths.later():  # an exception within it would end the dealing
                task = next(tasks, None)
            if task is None:
                return
            yield task


def _as_it_is(batch: Any) -> Any:
    return batch


def _while_fetching(place: MicroBatchId, samples: Sequence[int]) -> str:
    return f"while fetching the samples {_some(samples)} of step {place.step}, virtual rank {place.virtual_rank}"


def _some(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (f", ... ({len(samples)} in all)" if len(samples) > 8 else "")


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`: tensors, and lists, tuples and mappings of them, at any depth."""
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
    """Refuse data of another length on another process: everybody deals the same sample numbers."""
    lengths = group.all_gather_object(length)
    if len(set(lengths)) > 1:
        told = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(lengths) if lengths.index(n) == rank)
        raise DataError(
            f"{what} must be the same on every process: each takes its part of it by sample number.",
            f"It has {told} samples.",
            "pass the whole set everywhere (no DistributedSampler, no data[rank::size]).",
        )


def refuse_made_batches(data: Any, what: str) -> None:
    """Refuse a DataLoader, with what to pass instead."""
    if isinstance(data, DataLoader):
        raise DataError(
            f"{what} is a DataLoader.",
            "Its batches are already made, and their shape would decide about bits.",
            "pass what it loads, loader.dataset, and collate_fn=loader.collate_fn; how many samples make a batch is a "
            "setting: --set batch=64.",
        )


def length_of(data: Any, what: str) -> int:
    """The number of samples in a map-style data set; refuses anything else, and an empty one."""
    refuse_made_batches(data, what)
    stream = isinstance(data, IterableDataset)  # Dataset gives it a __getitem__, which only raises
    if stream or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        lack = "It is a stream" if stream else "It lacks __len__ or __getitem__"
        raise DataError(
            f"{what} is of class {type(data).__name__}.",
            f"{lack}, and the order of a run is made of sample numbers.",
            "pass a map-style data set (torch.utils.data.Dataset with __len__ and __getitem__), or a unisono.Stream, "
            "which has shards (docs/guide/streams.md).",
        )
    length = len(data)
    if length == 0:
        raise DataError(
            f"{what} is of class {type(data).__name__}.",
            "It has length 0: there is no sample in it.",
            "check the path or the filter that makes it.",
        )
    return length
