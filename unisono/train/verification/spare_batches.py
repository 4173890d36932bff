"""The batches of spare rounds, fetched in another way than those of the step's own rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import _utils

from unisono.data.computed_batches import IndexDataset
from unisono.data.rng import preserve_rng
from unisono.plan.batch_order import MicroBatchId
from unisono.tensors.digest import content_digest
from unisono.train.batches.batch_source import BatchSource

CPU = torch.device("cpu")


class FetchFailed(Exception):
    """A batch could not be fetched once more."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SpareBatches:
    """Fetch micro-batches of a step once more.

    differs  "worker": the data set returns other samples in a loader worker; "data": each read differs; "": neither
    """

    def __init__(self, source: BatchSource, *, workers: int) -> None:
        """`workers`: number of loader workers, which fetch the step's own batches."""
        self.source, self.workers = source, workers
        self.differs = ""

    def fetch(self, place: MicroBatchId) -> Any:
        """Fetch a batch in this process."""
        return self.source.fetch(place)

    def fetch_moved(self, place: MicroBatchId) -> Any:
        """Fetch a batch in this process, and move it to other addresses: each tensor begins its own memory."""
        return tree_map_only(torch.Tensor, moved, self.fetch(place))

    def fetch_otherwise(self, place: MicroBatchId) -> Any:
        """Fetch a batch in another way than the step's own rounds do.

        If the step's rounds have workers, fetch it without a worker. If not, read the data set as in a worker, and
        place tensors at addresses as a worker does.

        Raises FetchFailed if the data set raises an error.
        """
        try:
            return self._fetch_otherwise(place)
        except Exception as error:
            raise FetchFailed(error) from error

    def _fetch_otherwise(self, place: MicroBatchId) -> Any:
        if self.workers:
            return self.fetch(place)
        fetcher = self.source.loader.fetcher
        if fetcher.rows or isinstance(fetcher.data, IndexDataset):  # no code of the script reads these
            return self.fetch_moved(place)
        with preserve_rng(CPU), as_in_a_worker(fetcher):
            in_worker = content_digest(self.fetch(place))
        batch = self.fetch_moved(place)
        if in_worker != content_digest(batch):
            with preserve_rng(CPU):
                self.differs = "worker" if content_digest(self.fetch(place)) == content_digest(batch) else "data"
        return batch


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor in memory of its own, at the beginning of an allocation."""
    return tensor.clone() if tensor.layout is torch.strided and not tensor.requires_grad else tensor


@contextmanager
def as_in_a_worker(data: Any) -> Iterator[None]:
    """Make torch.utils.data.get_worker_info() report, within this block, that this is the only loader worker."""
    worker = _utils.worker
    info = worker.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=data)
    before, worker._worker_info = worker._worker_info, info
    try:
        yield
    finally:
        worker._worker_info = before
