"""The placements that a plan compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

NOT_PREDICTED = ("tensor", "pipeline", "context")
"""Axes whose cost depends on how the model computes within a layer: `unisono prove` runs them."""


@dataclass(frozen=True)
class Placement:
    """A way to divide a run over processes.

    Attributes:
        replicas: The number of replicas of the model.
        shards: The number of processes that share one.
        by_layer: Whether shards are gathered layer by layer; otherwise once a step.
        recompute: Whether activations are computed again in the backward pass.
        offload: Whether shards are in the memory of the host between uses.
    """

    replicas: int = 1
    shards: int = 1
    by_layer: bool = True
    recompute: bool = False
    offload: bool = False

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.replicas * self.shards

    @property
    def sets(self) -> tuple[str, ...]:
        """The settings, for --set."""
        found = [f"parallel.shard={self.shards}"] if self.shards > 1 else []
        found += ["parallel.reshard=step"] if self.shards > 1 and not self.by_layer else []
        found += ["parallel.offload=true"] if self.offload else []
        return (*found, *(["parallel.activation_checkpoint=full"] if self.recompute else []))

    @property
    def without_recompute(self) -> Placement:
        """The same placement without recomputation."""
        return replace(self, recompute=False)

    @property
    def pair(self) -> Placement:
        """Two replicas or two shards that compute as this placement does. Its recomputation is measured with them."""
        replicas, shards = (2, 1) if self.shards == 1 else (1, 2)
        return replace(self, replicas=replicas, shards=shards, offload=False)

    @property
    def spans(self) -> int:
        """The number of spans that virtual ranks are divided into. Processes that share a span compute it in turn."""
        return self.replicas if self.by_layer else self.processes

    @property
    def layout(self) -> dict[str, str]:
        """The settings of `parallel`, by name, as text."""
        found = {"replicate": str(self.replicas), "shard": str(self.shards)}
        found = {name: size for name, size in found.items() if size != "1"}
        found |= {"reshard": "step"} if self.shards > 1 and not self.by_layer else {}
        return found | ({"offload": "true"} if self.offload else {})

    def __str__(self) -> str:
        words = (
            [f"{self.replicas} replica{'s' * (self.replicas != 1)}"] if self.shards == 1 or self.replicas > 1 else []
        )
        words += [f"{self.shards} shards" + ("" if self.by_layer else " (by step)")] if self.shards > 1 else []
        words += ["offload"] if self.offload else []
        return ", ".join([*words, *(["recompute"] if self.recompute else [])])


ONE_PROCESS = Placement()
"""One process that holds the whole model."""


def counts_up_to(most: int) -> list[int]:
    """Return the numbers of processes to compare: powers of two, and the largest."""
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found if found[-1] == most else [*found, most]


def placements(most: int, *, shards: bool = True, recompute: bool = True, offload: bool = False) -> Iterator[Placement]:
    """Yield the placements on at most so many processes.

    Args:
        most: The largest number of processes.
        shards: Whether the model can be divided in shards.
        recompute: Whether activations can be computed again.
        offload: Whether shards in the memory of the host are placements, too.
    """
    for again in (False, True) if recompute else (False,):
        for size in counts_up_to(most):
            yield Placement(size, recompute=again)
            if size == 1 or not shards:
                continue
            for on_host, by_layer in product((False, True) if offload else (False,), (True, False)):
                yield Placement(1, size, by_layer, again, on_host)
                if size >= 4 and size % 2 == 0:
                    yield Placement(size // 2, 2, by_layer, again, on_host)
