"""The order of samples in batches of similar length, so that little padding is needed.

An epoch is shuffled. Each pool of 50 batches is sorted by length and cut into batches, and the batches of the epoch are
shuffled. The last batch of an epoch, if it is short, is made of what remains. So the members of a batch follow from the
lengths, the seed and the epoch.

    lengths   | 9 2 7 3 8 1 | 4 6 2 9 5 3 | 7            batch 3, two batches a pool
    pools     | 1 2 3 7 8 9 | 2 3 4 5 6 9 | 7
    batches   | 5 6 9 | 1 2 3 | 7 8 9 | 2 3 4 | 7

In torchtext this is the BucketIterator, in Hugging Face's Trainer the option group_by_length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unisono.plan.rng_keys import ORDER, mix, shuffled

POOL = 50
"""Batches that are sorted together. More of them need less padding, and leave less of the shuffle."""
KEPT_EPOCHS = 2
"""Epochs that are cached: the loader may be one ahead."""


class LengthBuckets:
    """The order of every epoch.

    Args:
        lengths: of each sample.
        batch: samples in a full batch.
        seed: of the run.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.batch, self.seed = batch, seed
        self._epochs: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of all samples in an epoch, shape [length]."""
        if epoch not in self._epochs:
            self._epochs[epoch] = self._build(epoch)
            if len(self._epochs) > KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _build(self, epoch: int) -> npt.NDArray[np.int64]:
        key = mix(self.seed, ORDER, epoch)
        order = shuffled(len(self.lengths), key)
        batches = len(order) // self.batch
        full, rest = order[: batches * self.batch], order[batches * self.batch :]
        pool = np.arange(len(full)) // (POOL * self.batch)
        by_length = full[np.lexsort((self.lengths[full], pool))]  # stable: equal lengths stay shuffled
        by_length = by_length.reshape(batches, self.batch)[shuffled(batches, mix(key, batches))].ravel()
        return np.concatenate([by_length, rest[np.argsort(self.lengths[rest], kind="stable")]])
