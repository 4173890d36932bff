"""Data without random access: shards, each read from front to back, as one data set that any process can walk.

A sample's address is (shard, offset): which shard, and how many samples lie before it in there. Every process can come
to any address, so nothing of a stream is anybody's own. The shards are counted once, dealt to the processes; from then
on the order of an epoch is a pure function of numbers, as for any other data (plan/window_shuffle.py): the shards
shuffled, then the samples within a window. Resume, placement, workers and tails need nothing here that other data does
not need.

    shards      train-000.tar (812)   train-001.tar (790)   train-002.tar (805)       counted: dealt to the processes
    an epoch    002: 0 1 2 ... 804    000: 0 1 ... 811      001: 0 1 ... 789          keyed: seed and epoch
    a window    each sample moves by fewer than `window` places                       keyed: seed and epoch

A process reads the samples of its own micro-batches. Where a shard can be entered anywhere (a plain tar, plain lines)
it reads nothing else; where it cannot (compressed, a streaming data set) it passes over the others without decoding
them, and keeps the last `window` that it has passed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from unisono.errors import DataError
from unisono.plan.batch_order import cut_batch

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup

_log = logging.getLogger(__name__)

OPEN_SHARDS = 8
"""So many are kept open in each process: a window rarely touches more."""


SHRUNK = "It ends here, though it was longer when it was counted."


class DamagedSample(Exception):
    """A sample that cannot be read, or the rest of a shard from there on.

    offset  samples that lie before the damage
    why     a sentence, with the byte
    """

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(offset, why)
        self.offset, self.why = offset, why


class Shards(Protocol):
    """Where samples lie. A user's own is any object with these three."""

    @property
    def names(self) -> Sequence[str]:
        """What each shard is called; their number and order never change."""

    def open(self, shard: int) -> Any:
        """A sequence of this shard's raw samples (`len` and indexing), or an iterable that begins anew each time.

        A shard that breaks off: the iterable raises Damaged there; the sequence has the samples before it, and a
        `damage`. If it has `close`, that is called when other shards are needed more.
        """

    def decode(self, raw: Any) -> Any:
        """A raw sample as the user gets it. Raises ValueError for one that is damaged."""


class Stream(Dataset[Any]):
    """A data set of shards. Give it to `run.steps`, `run.evaluate` or `run.predict` like any other.

    shards  see Shards; or one of Stream.tar, Stream.json_lines, Stream.hugging_face
    window  how far samples are shuffled: each moves by fewer places than this, after the shards were
    map     what becomes of each sample, map(sample); it may draw random numbers, which are keyed by micro-batch
    counts  samples in each shard, if you know them: then nothing is counted
    """

    def __init__(
        self,
        shards: Shards,
        *,
        window: int = 1000,
        map: Callable[[Any], Any] | None = None,  # noqa: A002
        counts: Sequence[int] | None = None,
    ) -> None:
        lacks = [name for name in ("names", "open", "decode") if not hasattr(shards, name)]
        if lacks:
            raise DataError(
                f"A stream was to be made of {type(shards).__name__}.",
                f"It lacks {' and '.join(lacks)}: a stream is made of shards, which can each be read anew.",
                "Stream.tar, Stream.json_lines or Stream.hugging_face; or your own class: docs/guide/streams.md.",
            )
        if not shards.names:
            raise DataError("A stream was to be made.", "It has no shards.", "check the path or pattern of its files.")
        if window < 1:
            raise DataError(f"A stream was to have window={window}.", "The least is 1: no shuffling.", "window=1")
        self.shards, self.window, self.map = shards, window, map
        self.counts = tuple(counts) if counts is not None else None
        self._ends = np.cumsum(self.counts) if self.counts is not None else None
        self._skip = False
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._owner = -1  # the process that opened them: a forked worker must not share a file's position

    # -- where to begin

    @classmethod
    def tar(cls, urls: str | Path | Sequence[str | Path], **more: Any) -> Stream:
        """Tar files in WebDataset's layout: members that share a name up to its first dot are one sample.

        urls  paths or URLs that fsspec knows, with {000..099}, {a,b} and * in them; .gz, .bz2 and .xz are unpacked
        more  window, map, counts: see Stream

        A sample is a dict: "__key__", and the content of each member by its extension. `cls` is a number, `txt` a text,
        `json` what it says, `npy` a numpy array; anything else is bytes, for `map`.
        """
        from unisono.data.streaming.tar import TarShards

        return cls(TarShards(urls), **more)

    @classmethod
    def json_lines(cls, urls: str | Path | Sequence[str | Path], **more: Any) -> Stream:
        """Files with a JSON value in each line; empty lines are none. `urls` and `more` as for Stream.tar."""
        from unisono.data.streaming.jsonl import JsonLines

        return cls(JsonLines(urls), **more)

    @classmethod
    def hugging_face(cls, dataset: Any, **more: Any) -> Stream:
        """A data set of Hugging Face `datasets` in streaming mode, an IterableDataset, by its own shards.

        Counting reads every shard once, unless you say `counts`. `more` as for Stream.tar.
        """
        from unisono.data.streaming.huggingface import HuggingFaceShards

        return cls(HuggingFaceShards(dataset), **more)

    # -- as a data set

    def read_lengths(self, group: ProcessGroup, damaged: Literal["stop", "skip"]) -> None:
        """Count the shards, each in one process. Every process calls this; calling it again costs nothing."""
        self._skip = damaged == "skip"
        if self.counts is None:
            total = len(self.shards.names)
            mine = [self._count(shard) for shard in range(*cut_batch(total, group.size, group.rank))]
            self._know([count for part in group.all_gather_object(mine) for count in part])

    @property
    def shape(self) -> str:
        """What the order of its samples depends on, in words."""
        total = len(self)
        digest = hashlib.sha256(repr(self.counts).encode()).hexdigest()[:8]
        return f"{total} samples in {len(self.shards.names)} shards ({digest}), window {self.window}"

    def __len__(self) -> int:
        if self.counts is None:
            self._know([self._count(shard) for shard in range(len(self.shards.names))])
        assert self.counts is not None
        return sum(self.counts)

    def __getitem__(self, number: int) -> Any:
        samples = self.__getitems__([number])
        if not samples:
            raise IndexError(f"sample {number} of the stream is damaged, and skipped")
        return samples[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The samples of these numbers, which run through the shards in order; without those that are skipped."""
        found: dict[int, Any] = {}
        for number in sorted(numbers):  # files are read forwards
            shard, offset = self.address(number)
            try:
                found[number] = self._sample(shard, offset)
            except DamagedSample as damage:
                self._met(shard, damage)
        if not found and numbers:
            shard, offset = self.address(numbers[0])
            raise DataError(
                f"A micro-batch of {len(numbers)} samples was to be made, the first from {self.shards.names[shard]}.",
                "All of them are damaged, and a micro-batch cannot be empty.",
                "look at the file, or leave it out of the stream.",
            )
        return [found[number] for number in numbers if number in found]

    def address(self, number: int) -> tuple[int, int]:
        """(shard, offset) of a sample's number."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of a stream of {len(self)}")
        assert self._ends is not None
        assert self.counts is not None
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - int(self._ends[shard]) + self.counts[shard]

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
            if self._skip:
                raise DamagedSample(offset, f"{type(error).__name__}: {error}") from error
            error.add_note(f"while mapping sample {offset} of {self.shards.names[shard]}")
            raise

    def _reader(self, shard: int) -> Any:
        if self._owner != os.getpid():
            self._opened.clear()
            self._owner = os.getpid()
        if shard in self._opened:
            self._opened.move_to_end(shard)
            return self._opened[shard]
        opened = self.shards.open(shard)
        # torch's IterableDataset has a __getitem__, which only raises
        indexed = hasattr(opened, "__getitem__") and not isinstance(opened, IterableDataset)
        self._opened[shard] = opened if indexed else ForwardReader(opened, self.window)
        if len(self._opened) > OPEN_SHARDS:
            _, old = self._opened.popitem(last=False)
            if hasattr(old, "close"):
                old.close()
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
            self._met(shard, damage)
            return damage.offset

    def _know(self, counts: Sequence[int]) -> None:
        self.counts, self._ends = tuple(counts), np.cumsum(counts)

    def _met(self, shard: int, damage: DamagedSample) -> None:
        """Say it, or raise it."""
        name = self.shards.names[shard]
        if not self._skip:
            raise DataError(
                f"The shard {name} was to be read.",
                f"Sample {damage.offset} of it cannot be: {damage.why}",
                "get it anew, or pass over what is damaged: --set loader.on_error=skip",
            ) from None
        _log.warning("%s: sample %d is skipped. %s", name, damage.offset, damage.why)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict(), "_owner": -1}


def settle_streams(data: Any, group: ProcessGroup, damaged: Literal["stop", "skip"]) -> None:
    """If this is a Stream: let it know its length. Every process calls this."""
    if isinstance(data, Stream):
        data.read_lengths(group, damaged)


def shard_layout(data: Any) -> tuple[tuple[int, ...], int]:
    """The shards of a Stream that is settled, and its window; of other data none."""
    if not isinstance(data, Stream):
        return (), 1
    assert data.counts is not None
    return data.counts, data.window


class ForwardReader:
    """A shard that can only be read from its beginning, by offset. Keeps the last `keep` samples that it has passed."""

    def __init__(self, samples: Iterable[Any], keep: int) -> None:
        self._samples, self._keep = samples, keep
        self._begin()

    def _begin(self) -> None:
        self._walk: Iterator[Any] = iter(self._samples)
        self._next = 0
        self._passed: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, offset: int) -> Any:
        if offset < self._next and offset not in self._passed:
            self._begin()
        while self._next <= offset:
            try:
                self._passed[self._next] = next(self._walk)
            except StopIteration:
                raise DamagedSample(self._next, SHRUNK) from None
            self._next += 1
            if len(self._passed) > self._keep:
                self._passed.popitem(last=False)
        return self._passed[offset]
