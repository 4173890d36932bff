"""The schedule of a sparsity: cubic, as in Zhu and Gupta 2017 (arXiv 1710.01878).

sparsity    initial                ...    final
               |                            |
updates      begin   + every   + 2 every   end
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import LoopError


@dataclass(frozen=True)
class SparsitySchedule:
    """A sparsity that grows from `initial` to `final`, fast at first and slowly at the end.

    final    the fraction of weights that are zero from `end` on
    begin    the number of updates after which weights are pruned for the first time, at least 1
    end      the number of updates after which they are pruned for the last time
    every    the number of updates between two prunings
    initial  the fraction at `begin`, if that is before `end`
    """

    final: float
    begin: int
    end: int
    every: int = 1
    initial: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.initial <= self.final <= 1.0:
            raise LoopError(
                "Cannot prune a model to this sparsity.",
                f"initial={self.initial:g} and sparsity={self.final:g} are fractions of weights that become zero.",
                "pass 0 <= initial <= sparsity <= 1; sparsity=0.8 keeps a fifth of the weights.",
            )
        if not 1 <= self.begin <= self.end or self.every < 1:
            raise LoopError(
                "The schedule of the pruning is not valid.",
                f"It has begin={self.begin}, end={self.end} and every={self.every}, in updates of the optimizer.",
                "pass 1 <= begin <= end and every >= 1; begin=end prunes once.",
            )

    def at(self, updates: int) -> float | None:
        """Return the sparsity to prune to after this number of updates; None if weights are not pruned now."""
        due = updates == self.end or (updates - self.begin) % self.every == 0
        if not (self.begin <= updates <= self.end and due):
            return None
        if updates == self.end:
            return self.final
        left = (self.end - updates) / (self.end - self.begin)
        return self.final + (self.initial - self.final) * left * left * left
