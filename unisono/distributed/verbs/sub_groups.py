"""A sub-group: some processes of the run, with a group of torch's. It ends when a process of the run dies or joins."""

from __future__ import annotations

from unisono.distributed.init import new_line_group
from unisono.distributed.membership.membership import membership_of
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import LoopError


class SubGroup:
    """The processes `ranks` of a group, which has all processes of the run. Collective.

    Attributes:
        group: the sub-group; None on a process that is not a member.
    """

    def __init__(self, whole: ProcessGroup, ranks: tuple[int, ...]) -> None:
        self._ranks, self._membership = ranks, membership_of(whole)
        self._generation = self._current
        self.group: ProcessGroup | None = None
        handle = None
        if len(ranks) > 1:
            handle = new_line_group([ranks], whole.rank, whole.size, elastic=whole.monitor is not None)
        if self._membership is not None:
            self._membership.claim_sockets()
        if whole.rank in ranks:
            rank, size = ranks.index(whole.rank), len(ranks)
            self.group = ProcessGroup(rank, size, whole.device, whole.mixed, whole.staged, {}, (), ranks, handle)
            self.group.monitor, self.group.backend = whole.monitor, whole.backend

    @property
    def _current(self) -> int:
        return 0 if self._membership is None else self._membership.generation

    def require_members(self) -> None:
        """Raise LoopError if the processes of the run have changed since the sub-group was made."""
        if self._current != self._generation:
            raise LoopError(
                "A sub-group was used after the processes of the run had changed.",
                f"It was made of the ranks {list(self._ranks)}; since then a process has died or joined.",
                "make a new one: run.collectives.sub_group(ranks), on every process.",
            )
