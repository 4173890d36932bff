"""Data for `run.steps` that is no data set: the numbers of samples, or a function that makes micro-batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from unisono import phases
from unisono.config import Settings
from unisono.data import alignment
from unisono.errors import SettingsError


class IndexDataset(Dataset[int]):
    """No data: the samples of a step are the next `batch` integers. Fetching a micro-batch returns a range."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return self.batch

    def __getitem__(self, sample: int) -> int:
        return sample

    def numbers(self, step: int, samples: Sequence[int]) -> range:
        """Return the numbers of these samples of a step, which continue from step to step."""
        first = step * self.batch + samples[0]
        return range(first, first + len(samples))

    def micro_batch(self, step: int, samples: Sequence[int]) -> Any:
        """Return the micro-batch of these samples of a step."""
        return self.numbers(step, samples)


class ComputedBatches(IndexDataset):
    """A function of the script makes each micro-batch from its sample numbers, in the process that trains."""

    def __init__(self, batch: int, compute: Callable[[range], Any]) -> None:
        super().__init__(batch)
        self._compute = compute

    def micro_batch(self, step: int, samples: Sequence[int]) -> Any:
        """Call the function. Its time is no wait for data: loader workers would not shorten it."""
        with phases.phase("forward"):
            return alignment.align(self._compute(self.numbers(step, samples)))


def as_data_set(data: Any, settings: Settings) -> Any:
    """Return the data set of `run.steps(data)`: for None and for functions an IndexDataset, otherwise the data itself.

    Raises:
        SettingsError: There is no data set, and the settings do not say how many steps the run has.
    """
    if data is not None and not (callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")):
        return data
    if settings.steps is None:
        raise SettingsError(
            "run.steps was called without data." if data is None else "run.steps was called with a function.",
            f"The settings say epochs={settings.epochs}, and an epoch is a pass over data.",
            "--set steps=100 --set epochs=none",
        )
    return IndexDataset(settings.batch) if data is None else ComputedBatches(settings.batch, data)
