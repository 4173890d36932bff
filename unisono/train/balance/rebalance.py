"""Dealing by speed, where the step is: how long this process took, and what all of them make of it.

    process 0   [ v0 v1 v2 v3 v4 v5 ]              the table   (seconds for a virtual rank, first step nobody dealt for)
    process 1   [ v6 v7 ] ........ slow            --------->  of every process: the same numbers, the same decision

What each says rides along with the step's table, so listening costs no message. A new deal holds from the first step
for which no process has fetched anything: what was fetched ahead is computed where it lies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from unisono.distributed.membership.shared_counter import SharedCounter
from unisono.distributed.roles import RoleGroup
from unisono.plan.load_balance import LoadBalancer
from unisono.train.balance.step_timer import StepTimer
from unisono.train.balance.work_stealing import WorkStealing

if TYPE_CHECKING:
    from unisono.config import Settings
    from unisono.data.loader import Schedule
    from unisono.distributed.mesh import Mesh
    from unisono.distributed.process_group import ProcessGroup
    from unisono.plan.assignment import Spans
    from unisono.train.loop import StepLoop

WORDS = 3
"""What each process says of itself: seconds for one virtual rank (0: it computed none), its horizon, seconds since it
said so last."""


class Rebalancer:
    """dealer  deals anew, for a long time; None: nobody does
    claims  deal within a step; None: nobody does
    share   samples of a virtual rank, on average
    pace    of this process
    note    where a line for people goes
    deals   what was decided: (first step, virtual ranks of each process)
    servers  so many processes, the first ones, compute nothing
    """

    def __init__(
        self,
        dealer: LoadBalancer | None,
        claims: WorkStealing | None,
        share: float,
        pace: StepTimer,
        schedule: Schedule,
        note: Callable[[str], None],
        servers: int = 0,
    ) -> None:
        self.dealer, self.claims = dealer, claims
        self.share, self.pace, self.schedule, self.note = share, pace, schedule, note
        self.servers = servers
        self.deals: list[tuple[int, list[int]]] = []
        self._said = 0.0
        self._samples = 0
        self._claimed = False
        self._told: tuple[int, ...] = ()

    def claimed(self, number: int) -> bool:
        """Are the virtual ranks of this step claimed? That is decided before its first pass, and the others follow."""
        if number == 0:
            self._claimed = self.claims is not None and self.claims.on
        return self._claimed

    def begin(self) -> None:
        """A pass begins: the first of its micro-batches is about to be fetched."""
        self._samples = 0
        self.pace.begin()

    def done(self, bounds: tuple[int, int]) -> None:
        """A micro-batch of the pass is computed."""
        self._samples += bounds[1] - bounds[0]
        self.pace.done()
        if self._claimed:
            self.pace.keep_up()

    def say(self, horizon: int) -> tuple[float, float, float]:
        before, self._said = self._said, time.perf_counter()
        took = self.pace.seconds() / self._samples * self.share if self._samples else 0.0
        return took, float(horizon), self._said - before if before else 0.0

    def hear(self, step: int, said: Sequence[Sequence[float]]) -> None:
        """A step is over, and everybody has said how long it took: deal anew, if that pays."""
        seconds = [took for took, _, _ in said]
        if self.claims is not None:
            self.claims.observe(self.schedule.at(step), seconds, said[0][2])
        seconds = seconds[self.servers :]
        spans = self.dealer.hear(seconds) if self.dealer is not None else None
        if spans is None:
            return
        assert self.dealer is not None
        spans = ((0, 0),) * self.servers + spans
        first, counts = int(max(horizon for _, horizon, _ in said)), [hi - lo for lo, hi in spans]
        self.schedule.change(first, spans)
        self.deals.append((first, counts))
        self.note(f"from step {first} on the processes compute {', '.join(map(str, counts))} virtual ranks, by speed")
        slow = self.dealer.slow
        if slow and slow != self._told and not self.servers:
            self.note(self._about(slow, self.dealer.typical))
        self._told = slow

    def _about(self, slow: Sequence[int], seconds: Sequence[float]) -> str:
        took, others = (median(s for r, s in enumerate(seconds) if (r in slow) == of) for of in (True, False))
        return (
            f"{'Rank' if len(slow) == 1 else 'Ranks'} {', '.join(map(str, slow))} would take {1000 * took:.3g} ms for "
            f"a virtual rank, where the others take {1000 * others:.3g}: they are done sooner without help, and "
            f"--ranks {len(seconds) - len(slow)} would be as fast."
        )


def build_dealing(
    settings: Settings, mesh: Mesh, schedule: Schedule, first: int, promise: str, note: Callable[[str], None]
) -> Rebalancer | None:
    """Who deals by speed, from step `first` on; None, where nothing can be dealt: on one process, with one virtual
    rank, where processes wait for each other in the midst of a model, so that none can be told to be slow, and under an
    exchange that is not exact: there it would change the result whether a machine was slow."""
    deal, ranks = settings.balance, settings.virtual_ranks
    if not 1 < mesh.axes.replicate == mesh.world.size or ranks == 1 or not (deal.by_speed or deal.work_stealing):
        return None
    if promise != "exact":
        return None
    servers = mesh.world.servers if isinstance(mesh.world, RoleGroup) else 0
    dealer = LoadBalancer(ranks, schedule.at(first)[servers:]) if deal.by_speed else None
    claims = WorkStealing(mesh.world.rank, SharedCounter(mesh.world)) if deal.work_stealing else None
    return Rebalancer(dealer, claims, settings.batch / ranks, StepTimer(mesh.world.device), schedule, note, servers)


def set_assignment(engine: StepLoop, group: ProcessGroup, spans: Spans) -> int:
    """Everybody deals these spans; returns the first step that nobody has fetched anything for. They stay."""
    first = int(group.max_(torch.tensor([engine.horizon], device=group.device)).item())
    engine.schedule.change(first, spans)
    engine.dealing = None
    return first
