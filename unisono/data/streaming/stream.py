"""Data without random access: shards, each read from front to back, as one data set that any process can read.

The address of a sample is (shard, offset): its shard, and the number of samples before it in there. Every process can
read any address, so no state of a stream belongs to a process. The shards are counted once, and the counting is divided
among the processes. From then on the order of an epoch is a pure function of numbers, as for any other data
(plan/ordering/window_shuffle.py): the shards are shuffled, then the samples within a window. Resume, placement, workers
and the last batch need nothing that other data does not need.

    shards      train-000.tar (812)   train-001.tar (790)   train-002.tar (805)       counted once
    an epoch    002: 0 1 2 ... 804    000: 0 1 ... 811      001: 0 1 ... 789          keyed: seed and epoch
    a window    each sample moves by fewer than `window` places                       keyed: seed and epoch

A process reads the samples of its own micro-batches. From a shard with random access (an uncompressed tar, plain lines)
it reads nothing else. In one without (a compressed file, a streaming data set) it skips the other samples without
decoding them, and keeps the last `window` samples that it has read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import IterableDataset

from unisono.config.wording import plural
from unisono.data.prepared import OnError, PreparedDataset, not_counting
from unisono.data.streaming.files import DamagedSample, ShardFile, Urls, check_all, expand
from unisono.data.streaming.shard_cache import ShardCache
from unisono.data.streaming.shard_index import read_index
from unisono.errors import DataError
from unisono.plan.batch_order import cut_batch
from unisono.plan.mixing.mixture_order import SourceLayout

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup

_log = logging.getLogger(__name__)

OPEN_SHARDS = 8
"""Shards that a process keeps open; a window rarely spans more."""

SHRUNK = "The shard ends here, but was longer when it was counted."


class Shards(Protocol):
    """Where samples are stored. Any object with these three members will do."""

    @property
    def names(self) -> Sequence[str]:
        """The name of each shard. Their number and order never change."""

    def open(self, shard: int) -> Any:
        """Return the raw samples of this shard: a sequence (`len` and indexing), or an iterable that can be restarted.

        Where a shard breaks off, the iterable raises DamagedSample; a sequence has the samples before it, and the
        exception as its attribute `damage`. If the result has `close`, that is called when the shard is not needed.
        """

    def decode(self, raw: Any) -> Any:
        """Return a raw sample as the user gets it. Raises ValueError for a damaged one."""


class Stream(PreparedDataset):
    """A data set of shards. Pass it to `run.steps`, `run.evaluate` or `run.predict` like any other.

    Args:
        shards: see Shards; or use Stream.tar, Stream.json_lines or Stream.hugging_face.
        window: how far samples are shuffled: each moves by fewer places than this, after the shards are shuffled.
        map: a function of each sample. It may draw random numbers, which are keyed by micro-batch.
        counts: the number of samples in each shard, if it is known; then no shard is counted.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        window: int = 1000,
        map: Callable[[Any], Any] | None = None,  # noqa: A002
        counts: Sequence[int] | None = None,
    ) -> None:
        missing = [name for name in ("names", "open", "decode") if not hasattr(shards, name)]
        if missing:
            raise DataError(
                f"Cannot make a stream of {type(shards).__name__}.",
                f"It lacks {' and '.join(missing)}: a stream needs shards that can each be read again.",
                "use Stream.tar, Stream.json_lines or Stream.hugging_face; or your own class: docs/guide/streams.md.",
            )
        if not shards.names:
            raise DataError("A stream needs at least one shard.", "It got none.", "check the pattern of its files.")
        if window < 1:
            raise DataError(f"The window of a stream cannot be {window}.", "1 means no shuffling.", "window=1")
        self.shards, self.window, self.map = shards, window, map
        self.classes: Sequence[str] = ()
        """The names of the classes, for shards that were written from a folder for each class."""
        self.counts = tuple(counts) if counts is not None else None
        self._ends = list(accumulate(self.counts)) if self.counts is not None else []
        self._skip_damaged = False
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._owner = -1  # process id for which they are open: a forked worker must not share a file's position

    # -- constructors

    @classmethod
    def tar(cls, urls: Urls, *, cache: ShardCache | None = None, **more: Any) -> Stream:
        """Read tar files in WebDataset's layout: members that share a name up to its first dot are one sample.

        A sample is a dict: "__key__", and the content of each member by its extension. `cls` becomes a number, `txt` a
        text, `json` its value, `npy` a numpy array; any other member stays bytes, for `map`.

        Args:
            urls: paths, or URLs (s3, gs, hf, https, ...), with {000..099}, {a,b} and *; .gz, .bz2 and .xz are
                decompressed.
            cache: keeps shards at URLs on a local disk.
            more: window, map and counts: see Stream.
        """
        from unisono.data.streaming.tar import TarShards

        return cls(TarShards([ShardFile(url, cache) for url in expand(urls)]), **more)

    @classmethod
    def json_lines(cls, urls: Urls, *, cache: ShardCache | None = None, **more: Any) -> Stream:
        """Read files with a JSON value in each line; empty lines are skipped.

        Args:
            urls: as for Stream.tar.
            cache: as for Stream.tar.
            more: window, map and counts: see Stream.
        """
        from unisono.data.streaming.jsonl import JsonLines

        return cls(JsonLines([ShardFile(url, cache) for url in expand(urls)]), **more)

    @classmethod
    def indexed(cls, url: str | Path, *, cache: ShardCache | None = None, **more: Any) -> Stream:
        """Read the shards that `unisono shards` has written. Its index says what they are, so none is counted.

        Args:
            url: the folder of the shards and their index, or its URL.
            cache: as for Stream.tar.
            more: window and map: see Stream.

        Raises:
            DataError: there is no index, it is broken, or a local shard is missing or has another size.
        """
        from unisono.data.streaming.jsonl import JsonLines
        from unisono.data.streaming.tar import TarShards

        index = read_index(url)
        files = index.files(cache)
        check_all(files)
        shards: Shards = TarShards(files) if index.kind == "tar" else JsonLines(files)
        stream = cls(shards, counts=[entry.samples for entry in index.shards], **more)
        stream.classes = index.classes
        return stream

    @classmethod
    def hugging_face(cls, dataset: Any, **more: Any) -> Stream:
        """Read a Hugging Face `datasets` data set in streaming mode (an IterableDataset) by its own shards.

        Counting reads every shard once; pass `counts` to avoid that.

        Args:
            dataset: the IterableDataset.
            more: window, map and counts: see Stream.
        """
        from unisono.data.streaming.huggingface import HuggingFaceShards

        return cls(HuggingFaceShards(dataset), **more)

    # -- the data set

    def prepare(self, group: ProcessGroup, on_error: OnError, note: Callable[[str], None] = not_counting) -> None:
        """Count the samples of every shard, each shard in one process. Collective; a second call costs nothing."""
        self._skip_damaged = on_error == "skip"
        if self.counts is None:
            note(f"counting the samples of {plural(len(self.shards.names), 'shard')}")
            part = cut_batch(len(self.shards.names), group.size, group.rank)
            mine = [self._count(shard) for shard in range(*part)]
            self._set_counts([count for counts in group.all_gather_object(mine) for count in counts])

    @property
    def shape(self) -> str:
        """Describe what the order of the samples depends on."""
        total = len(self)
        digest = hashlib.sha256(repr(self.counts).encode()).hexdigest()[:8]
        return f"{total} samples in {len(self.shards.names)} shards ({digest}), window {self.window}"

    def __len__(self) -> int:
        if self.counts is None:
            self._set_counts([self._count(shard) for shard in range(len(self.shards.names))])
        return self._ends[-1] if self._ends else 0

    def read(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Return the samples of these numbers, without skipped ones. Numbers run through the shards in order."""
        found: dict[int, Any] = {}
        for number in sorted(numbers):  # files are read forward
            shard, offset = self.address(number)
            try:
                found[number] = self._sample(shard, offset)
            except DamagedSample as damage:
                self._skip_or_raise(shard, damage)
        return found

    def name_of(self, number: int) -> str:
        """Return where a sample is stored, for messages."""
        shard, offset = self.address(number)
        return f"{self.shards.names[shard]}[{offset}]"

    def layout(self) -> SourceLayout:
        """Return how the samples are stored."""
        return SourceLayout(len(self), self.counts or (), self.window)

    def address(self, number: int) -> tuple[int, int]:
        """Return (shard, offset) of a sample number."""
        if not 0 <= number < (self._ends[-1] if self._ends else len(self)):
            raise IndexError(f"sample {number} of a stream of {len(self)} samples")
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)

    def _sample(self, shard: int, offset: int) -> Any:
        reader = self._reader(shard)
        if hasattr(reader, "__len__") and offset >= len(reader):
            raise getattr(reader, "damage", None) or DamagedSample(len(reader), SHRUNK)
        raw = reader[offset]
        try:
            sample = self.shards.decode(raw)
        except ValueError as error:
            raise DamagedSample(offset, f"{type(error).__name__}: {error}") from error
        try:
            return sample if self.map is None else self.map(sample)
        except Exception as error:
            if self._skip_damaged:
                raise DamagedSample(offset, f"{type(error).__name__}: {error}") from error
            key = f" ({sample['__key__']})" if isinstance(sample, dict) and "__key__" in sample else ""
            error.add_note(f"while mapping sample {offset}{key} of {self.shards.names[shard]}")
            raise

    def _reader(self, shard: int) -> Any:
        if self._owner != os.getpid():
            self._opened.clear()
            self._owner = os.getpid()
        if shard in self._opened:
            self._opened.move_to_end(shard)
            return self._opened[shard]
        opened = self.shards.open(shard)
        # torch's IterableDataset has a __getitem__ that only raises
        indexed = hasattr(opened, "__getitem__") and not isinstance(opened, IterableDataset)
        self._opened[shard] = opened if indexed else ForwardReader(opened, self.window)
        if len(self._opened) > OPEN_SHARDS:
            _, oldest = self._opened.popitem(last=False)
            if hasattr(oldest, "close"):
                oldest.close()
        return self._opened[shard]

    def _count(self, shard: int) -> int:
        try:
            opened = self.shards.open(shard)
            if not hasattr(opened, "__len__"):
                return sum(1 for _ in opened)
            if (damage := getattr(opened, "damage", None)) is not None:
                raise damage
            return len(opened)
        except DamagedSample as damage:
            self._skip_or_raise(shard, damage)
            return damage.offset

    def _set_counts(self, counts: Sequence[int]) -> None:
        self.counts, self._ends = tuple(counts), list(accumulate(counts))

    def _skip_or_raise(self, shard: int, damage: DamagedSample) -> None:
        """Warn about a damaged sample, or raise DataError."""
        name = self.shards.names[shard]
        if not self._skip_damaged:
            raise DataError(
                f"Sample {damage.offset} of the shard {name} is damaged.",
                damage.why,
                "replace the file, or skip damaged samples: --set loader.on_error=skip",
            ) from None
        _log.warning("Skipped sample %d of %s: %s", damage.offset, name, damage.why)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict(), "_owner": -1}


class ForwardReader:
    """Index a shard that can only be read from its beginning. Keeps the last `keep` samples that were read."""

    def __init__(self, samples: Iterable[Any], keep: int) -> None:
        self._samples, self._keep = samples, keep
        self._restart()

    def _restart(self) -> None:
        self._iterator: Iterator[Any] = iter(self._samples)
        self._next = 0  # offset of the sample that the iterator yields next
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, offset: int) -> Any:
        if offset < self._next and offset not in self._kept:
            self._restart()
        while self._next <= offset:
            try:
                self._kept[self._next] = next(self._iterator)
            except StopIteration:
                raise DamagedSample(self._next, SHRUNK) from None
            self._next += 1
            if len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        return self._kept[offset]
