"""The gradient of some parameters, from the first backward of a pass to the update that uses it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING

import torch

from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import to_local
from unisono.errors import LoopError
from unisono.exchange.base import Exchange, Spans, Weights
from unisono.exchange.buckets import finite
from unisono.exchange.choose import build_exchange, choose_exchange, exchange_after_death
from unisono.exchange.wrappers.context_sum import ContextSum
from unisono.exchange.wrappers.custom import CustomExchange
from unisono.exchange.wrappers.per_stage import NoExchange, PerStageExchange
from unisono.train.modules.buffer_sync import versions

if TYPE_CHECKING:
    from unisono.config import Settings
    from unisono.parallel.fsdp.fsdp import ShardedLayer
    from unisono.train.pipelining.pipeline_run import Pipeline
    from unisono.train.step import Step


class GradientPass:
    """Its parameters, and the exchange that makes it whole.

    params  what optimizers hold: all parameters that train; or some, and then these alone (`only`), whatever else the
            loss depends on
    leaves  what backward finds a gradient for: the same, unless they are shards that are gathered for a step
    finite  is what the last pass made of it finite, on every process?
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
        own: CustomExchange | None = None,
    ) -> None:
        self.params, self.names, self.mesh, self.pipeline = params, names, mesh, pipeline
        self.settings, self.stale, self.is_whole = settings, False, False
        ranks, by_layer = settings.virtual_ranks, settings.parallel.reshard == "layer"
        self.gathered = [] if by_layer else list(layers)
        self.leaves = self._gather() if self.gathered else params
        self.notes = layers[0].notes if layers else None
        self.scattered = layers if by_layer else []
        if self.scattered:
            self.exchange = self._scatter()
        elif pipeline is not None:
            stages = pipeline.parts_of(params)
            parts = [choose_exchange(settings, of, mesh.data, mesh.world) if of else NoExchange() for of in stages]
            self.exchange = PerStageExchange(params, parts)
        elif own is not None:
            self.exchange = own(self.leaves, ranks, mesh.data)
        else:
            self.exchange = choose_exchange(settings, self.leaves, mesh.data, mesh.world)
        if mesh.context.size > 1:
            self.exchange = ContextSum(self.exchange, self.leaves, mesh.context, mesh.data.rank)
        self.inputs = list(self.leaves) if only and not self.scattered else None
        self.finite = True
        self.may_skip = False  # was it computed at a scale of fp16's that can be lowered?
        self.seen = False  # has a backward of it been looked at closely?
        self._given: list[torch.Tensor | None] = []  # the gradients, when they were whole
        self._versions: list[int] = []  # how often each had been written to
        self._token = torch.zeros(1, device=mesh.world.device)

    @property
    def key(self) -> str:
        """Whose gradient it is, in few letters: the same in every run of a script."""
        names = "\n".join(self.names.get(id(p), "") for p in self.params)
        return hashlib.sha256(names.encode()).hexdigest()[:16]

    def prepare(self) -> None:
        """Get ready for rounds: with an exchange among the processes of now, and with whole parameters. All processes
        that share a model call it together; twice is as good as once."""
        if self.stale:
            self.restart_exchange().close()
        if self.gathered:
            self._gather()

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self.prepare()
        self.is_whole = False
        self.exchange.begin(spans, pieces, weights)

    def restart_exchange(self) -> Exchange:
        """Other processes make it than before: from here on with an exchange among them. Returns the old one, to close
        when what it holds is not needed any more."""
        old, self.stale = self.exchange, False
        self.exchange = (
            self._scatter()
            if self.scattered
            else exchange_after_death(self.settings, self.leaves, self.mesh.data, self.mesh.world)
        )
        return old

    def _scatter(self) -> Exchange:
        """Of layers that are gathered one by one."""
        ranks, mesh = self.settings.virtual_ranks, self.mesh
        more = {"shard": mesh.shard, "layers": self.scattered}
        return build_exchange(
            "unisono.exchange.tree.reduce_scatter:ReduceScatterTree", self.params, ranks, mesh.replicate, **more
        )

    def _gather(self) -> list[torch.nn.Parameter]:
        """Gather all layers of all models, until `finish`. Returns the whole of every parameter."""
        whole = {id(s): p for layer in self.gathered for s, p in zip(layer.params, layer.gather(), strict=True)}
        return [whole[id(p)] for p in self.params]

    def finish(self, weight: float, *, unused: bool) -> None:
        """p.grad becomes the sum over all processes, divided by `weight`; None, where nobody used the parameter."""
        exchange = self.exchange
        if self.notes is not None:
            self.notes.end()
        whole = exchange.finish(weight)
        if unused and self.leaves:
            used = torch.tensor(exchange.used, dtype=torch.uint8, device=self.mesh.world.device)
            for p, by_anyone in zip(self.leaves, self.mesh.data.max_(used).tolist(), strict=True):
                if not by_anyone:
                    p.grad = None  # as in plain torch
        if self.pipeline is not None:
            whole &= self.pipeline.names.add_ties(self.params)
        self.is_whole = True
        if self.mesh.world.size > 1:  # nobody finishes this unless everybody holds the whole gradient
            self._token.fill_(not whole)
            whole = self.mesh.world.sum_(self._token).item() == 0.0
        self.commit(whole)

    def commit(self, whole: bool | None = None) -> None:
        """Everybody holds the whole gradient. Is it finite? None: nobody has told us, so we look."""
        if whole is None:
            whole = all(finite(to_local(p.grad)) for p in self.leaves if p.grad is not None)
        self.exchange.commit()
        self.finite = whole
        if self.gathered:
            ours = set(map(id, self.params))
            for layer in self.gathered:
                layer.divide(ours)
                layer.rest()
        self._given = [p.grad for p in self.params]
        self._versions = versions(map(to_local, self._given))

    def check_finite(self, step: Step) -> None:
        """Refuse a gradient that is not finite, naming the first parameter that has it."""
        given, self._given = self._given, []
        # the exchange knows what it has made, but not what the loop has put there since
        grads = [p.grad for p in self.params]
        untouched = len(given) == len(grads) and all(map(is_, grads, given))
        untouched = untouched and versions(map(to_local, grads)) == self._versions
        if self.finite and untouched:
            return
        found = next((self._named(p) for p in self.params if p.grad is not None and not finite(to_local(p.grad))), None)
        if not self.finite:  # everybody knows that, but it may lie in another process's part
            found = next((other for other in self.mesh.world.all_gather_object(found) if other), None)
        if found:
            raise LoopError(
                f"Step {step.number} has a gradient that is not finite, with a loss of {step.loss:g}.",
                f"{found} such elements.",
                "look for a division by zero, sqrt or log at 0 behind that parameter, or lower the learning rate; "
                f"to see where it comes from: {step._engine.replay(step.number)}",
            )

    def _named(self, p: torch.nn.Parameter) -> str:
        """A parameter whose gradient is not finite, in words."""
        count = int((~torch.isfinite(to_local(p.grad).to_dense())).sum())
        return f"{self.names.get(id(p), 'A parameter')} of shape {tuple(p.shape)} is the first that has {count}"

    def zero(self) -> None:
        self.exchange.zero()
        for p in self.params if self.gathered else ():
            p.grad = None

    def close(self) -> None:
        self.exchange.close()
