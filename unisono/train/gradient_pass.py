"""The gradient of some parameters, from the first backward of a pass to the update that uses it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from unisono import phases
from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import to_local
from unisono.exchange.base import Exchange, Spans, Weights
from unisono.exchange.buckets import finite
from unisono.exchange.choose import build_exchange, choose_exchange, exchange_after_death
from unisono.exchange.wrappers.context_sum import ContextSum
from unisono.exchange.wrappers.custom import CustomExchange
from unisono.exchange.wrappers.per_stage import NoExchange, PerStageExchange
from unisono.train.guarantees.finite_gradients import FiniteCheck

if TYPE_CHECKING:
    from unisono.config import Settings
    from unisono.parallel.fsdp.fsdp import ShardedLayer
    from unisono.train.pipelining.pipeline_run import Pipeline


class GradientPass:
    """Some parameters, and the exchange that completes their gradient.

    params    the parameters that the optimizers hold: all trained parameters, or only some of them
    leaves    the tensors that backward gives a gradient: the same, unless shards are gathered for a step
    inputs    the tensors for which backward computes gradients; None: all on which the loss depends
    finite    whether the gradient of the last pass is finite on all processes
    is_whole  whether this process holds the whole gradient
    may_skip  whether it was computed with an fp16 scale that can be lowered
    seen      whether a pass is complete: the first pass is checked more closely
    stale     whether the exchange has to be built again before the next pass
    """

    exchange: Exchange

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Mapping[int, str],
        settings: Settings,
        mesh: Mesh,
        layers: Sequence[ShardedLayer],
        pipeline: Pipeline | None = None,
        *,
        only: bool = False,
        custom: CustomExchange | None = None,
    ) -> None:
        self.params, self.names, self.mesh, self.pipeline = params, names, mesh, pipeline
        self.settings, self.stale, self.is_whole = settings, False, False
        ranks, by_layer = settings.virtual_ranks, settings.parallel.reshard == "layer"
        self.gathered = [] if by_layer else list(layers)
        self.leaves = self._gather() if self.gathered else params
        self.gather_order = layers[0].gather_order if layers else None
        self.scattered = layers if by_layer else []
        if self.scattered:
            self.exchange = self._scatter()
        elif pipeline is not None:
            stages = pipeline.parts_of(params)
            parts = [choose_exchange(settings, of, mesh.data, mesh.world) if of else NoExchange() for of in stages]
            self.exchange = PerStageExchange(params, parts)
        elif custom is not None:
            self.exchange = custom(self.leaves, ranks, mesh.data)
        else:
            self.exchange = choose_exchange(settings, self.leaves, mesh.data, mesh.world)
        if mesh.context.size > 1:
            self.exchange = ContextSum(self.exchange, self.leaves, mesh.context, mesh.data.rank)
        self.inputs = list(self.leaves) if only and not self.scattered else None
        self.finite, self.may_skip, self.seen = True, False, False
        self._finite_check = FiniteCheck(params)
        self._token = torch.zeros(1, device=mesh.world.device)

    @property
    def key(self) -> str:
        """A stable key, derived from the names of the parameters."""
        names = "\n".join(self.names.get(id(p), "") for p in self.params)
        return hashlib.sha256(names.encode()).hexdigest()[:16]

    # -- the rounds

    def prepare(self) -> None:
        """Prepare for rounds: build an exchange among the current processes if needed, and gather parameters.

        All processes that share a model call this together. A second call has no effect.
        """
        if self.stale:
            self.restart_exchange().close()
        if self.gathered:
            self._gather()

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        """Begin the exchange of a pass (exchange/base.py)."""
        self.prepare()
        self.is_whole = False
        self.exchange.begin(spans, pieces, weights)

    def restart_exchange(self) -> Exchange:
        """Build an exchange among the current processes. Return the old one, which the caller closes after its use."""
        old, self.stale = self.exchange, False
        self.exchange = (
            self._scatter()
            if self.scattered
            else exchange_after_death(self.settings, self.leaves, self.mesh.data, self.mesh.world)
        )
        return old

    def _scatter(self) -> Exchange:
        """Build the exchange of layers that are gathered one by one."""
        ranks, mesh = self.settings.virtual_ranks, self.mesh
        more = {"shard": mesh.shard, "layers": self.scattered}
        return build_exchange(
            "unisono.exchange.tree.reduce_scatter:ReduceScatterTree", self.params, ranks, mesh.replicate, **more
        )

    def _gather(self) -> list[torch.nn.Parameter]:
        """Gather all layers of all models, until `commit`, and return every parameter as a whole.

        Its time is that of forward passes, in which layers are gathered one by one.
        """
        with phases.phase("forward"):
            whole = {id(s): p for layer in self.gathered for s, p in zip(layer.params, layer.unshard(), strict=True)}
        return [whole[id(p)] for p in self.params]

    # -- completing the gradient

    def end_gathering(self) -> None:
        """Check the order in which layers were gathered. The rounds of the pass are finished."""
        if self.gather_order is not None:
            self.gather_order.end_step()

    def agree(self, is_finite: bool, *, unused: bool) -> None:
        """Agree with all processes that each of them holds the whole gradient, after the exchange.

        Args:
            is_finite: whether this process's part of the gradient is finite.
            unused: whether a process did not use some parameter. The gradient of a parameter that none used is None.
        """
        if unused and self.leaves:
            used = torch.tensor(self.exchange.used, dtype=torch.uint8, device=self.mesh.world.device)
            for p, by_any in zip(self.leaves, self.mesh.data.max_(used).tolist(), strict=True):
                if not by_any:
                    p.grad = None  # as in plain torch
        if self.pipeline is not None:
            is_finite &= self.pipeline.names.add_ties(self.params)
        self.is_whole = True
        if self.mesh.world.size > 1:  # no process finishes this before all processes hold the whole gradient
            self._token.fill_(not is_finite)
            is_finite = self.mesh.world.sum_(self._token).item() == 0.0
        self.commit(is_finite)

    def commit(self, is_finite: bool | None = None) -> None:
        """Commit the gradient, which all processes hold. `is_finite`: None if no process has checked it."""
        if is_finite is None:
            is_finite = all(finite(to_local(p.grad)) for p in self.leaves if p.grad is not None)
        self.exchange.commit()
        self.finite = is_finite
        if self.gathered:
            ours = set(map(id, self.params))
            for layer in self.gathered:
                layer.assign_gradients(ours)
                layer.reshard()
        self._finite_check.note()

    # -- the update

    def find_not_finite(self) -> str:
        """Describe the first parameter whose gradient is not finite, the same on all processes; "" if there is none."""
        return self._finite_check.find(self.names, self.mesh.world, was_finite=self.finite)

    def zero(self) -> None:
        """Release the gradient, after the optimizers have stepped."""
        self.exchange.zero()
        for p in self.params if self.gathered else ():
            p.grad = None

    def close(self) -> None:
        """Close the exchange."""
        self.exchange.close()
