"""Data sets that all processes prepare together before the run knows their length: streams, packed data, mixtures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch.utils.data import Dataset

from unisono.distributed.process_group import ProcessGroup
from unisono.errors import DataError
from unisono.plan.mixing.mixture_order import Mixing, SourceLayout

OnError = Literal["stop", "skip"]


class PreparedDataset(Dataset[Any], ABC):
    """A map-style data set that is prepared by all processes of a run, and whose order may depend on how it is stored.

    A damaged sample may be left out of what `read` returns.
    """

    @abstractmethod
    def prepare(self, group: ProcessGroup, on_error: OnError, note: Callable[[str], None]) -> None:
        """Find out how many samples there are. Collective; a second call costs nothing.

        Args:
            group: all processes of the run.
            on_error: whether damaged samples raise DataError or are skipped, here and when samples are read.
            note: prints a line on the main process, before something that takes a while.
        """

    @property
    @abstractmethod
    def shape(self) -> str:
        """Describe everything that the order of the samples depends on."""

    @abstractmethod
    def layout(self) -> SourceLayout:
        """Return how the samples are stored."""

    def mixing(self) -> Mixing | None:
        """Return the sources and weights of a mixture; None for other data."""
        return None

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> Mapping[int, Any]:
        """Return the samples of these numbers, without those that are damaged and skipped."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """Return where a sample is stored, for messages."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any:
        if number not in (found := self.read([number])):
            raise IndexError(f"sample {number} is damaged and skipped")
        return found[number]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return the samples of these numbers, without those that are damaged and skipped."""
        found = self.read(numbers)
        if not found and numbers:
            raise DataError(
                f"All {len(numbers)} samples of a micro-batch are damaged.",
                f"The first is in {self.name_of(numbers[0])}. A micro-batch cannot be empty.",
                "repair the file, or leave it out of the data.",
            )
        return [found[number] for number in numbers if number in found]


def prepare(data: Any, group: ProcessGroup, on_error: OnError, note: Callable[[str], None]) -> None:
    """Prepare the data if it has to be. Collective.

    Raises:
        DataError: the processes were given different data.
    """
    if not isinstance(data, PreparedDataset):
        return
    data.prepare(group, on_error, note)
    shapes = group.all_gather_object(data.shape)
    if len(set(shapes)) > 1:
        rank = next(rank for rank, shape in enumerate(shapes) if shape != shapes[0])
        raise DataError(
            "The data must be the same on every process: each takes its part of it by sample number.",
            f"It is {shapes[0]} on rank 0, and {shapes[rank]} on rank {rank}.",
            "pass the same files, weights and windows on every process.",
        )


def shape_of(data: Any, length: int | str) -> int | str:
    """Return what the order of the samples depends on: a description, or `length` for other data."""
    return data.shape if isinstance(data, PreparedDataset) else length


def layout_of(data: Any) -> SourceLayout:
    """Return how the samples of any map-style data are stored."""
    return data.layout() if isinstance(data, PreparedDataset) else SourceLayout(len(data))


def mixing_of(data: Any) -> Mixing | None:
    """Return the sources and weights of a mixture; None for other data."""
    return data.mixing() if isinstance(data, PreparedDataset) else None


def read_samples(data: Any, numbers: Sequence[int]) -> Mapping[int, Any]:
    """Return the samples of these numbers of any map-style data, without those that are damaged and skipped."""
    if isinstance(data, PreparedDataset):
        return data.read(numbers)
    read = data.__getitems__(list(numbers)) if hasattr(data, "__getitems__") else [data[i] for i in numbers]
    return dict(zip(numbers, read, strict=True))


def not_counting(text: str) -> None:
    """Print nothing."""
