"""Verify the update of a step in which processes hold rows of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from unisono.data.rng import preserve_rng
from unisono.train.guarantees.user_errors import is_elementwise
from unisono.train.optimization.sharded_step import differs_in_shards
from unisono.train.verification import causes
from unisono.train.verification.causes import Cause
from unisono.train.verification.partial_reductions import PartialReductionMode
from unisono.train.verification.whole_update import WholeUpdate, differing_by_rows

if TYPE_CHECKING:
    from unisono.distributed.process_group import ProcessGroup
    from unisono.train.modules.models import Models


class ShardedUpdate:
    """The update of one verified step, on this process.

    random  whether random parameters are updated as well, which takes longer
    found   (difference, cause): processes find different ones, so they compare them later
    """

    def __init__(self, models: Models, group: ProcessGroup, turn: int, *, random: bool) -> None:
        self.models, self.group, self.turn, self.random = models, group, turn, random
        self.found: list[tuple[str, Cause]] = []
        self._parts = PartialReductionMode(models)

    def begin(self) -> None:
        """Observe the script's operators, from the time when the gradient is complete."""
        self._parts.begin()

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Return a block that also steps whole parameters, in addition to rows, if the optimizer is one of torch's.

        An optimizer of the script may keep state elsewhere, so it is not stepped twice: its `by_element` is trusted.
        """
        known = isinstance(optimizer, torch.optim.Optimizer) and is_elementwise(optimizer)
        known &= not hasattr(optimizer, "by_element")
        if not known or differs_in_shards(optimizer, self.models.layers):  # the promise covers this case already
            yield
            return
        with self._unseen():
            whole = WholeUpdate(optimizer, self.group, self.turn)
        yield
        with self._unseen():
            differing = whole.differing()
            if not differing and self.random:
                differing = differing_by_rows(optimizer, self.group, self.turn)
        names = [self.models.names.get(id(p), "a parameter") for p in differing]
        if names:
            what = f"The update of {names[0]} by rows differs from the update of the whole parameter"
            self.found.append((what, causes.optimizer(optimizer)))

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Return a block that changes no generator, and whose operators are not observed."""
        with preserve_rng(self.group.device), _disable_current_modes():
            yield

    def end(self) -> None:
        """End the observation, before the next step or at the end of the run."""
        self._parts.end()
        if self._parts.found:
            self.found.insert(0, ("The script reduced rows of a parameter", causes.part(self._parts.found)))
