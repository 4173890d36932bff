"""Complete the gradients of a step: sum the gradients of all processes into `p.grad` on every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from unisono.config import Settings
from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import ProcessGroup, is_dtensor
from unisono.errors import LoopError
from unisono.exchange.bucket_readiness import gradient_modified_error
from unisono.exchange.choose import refuse_dtypes
from unisono.exchange.exchange_state import ExchangeStates
from unisono.exchange.wrappers.custom import CustomExchange
from unisono.parallel.precision import LossScale
from unisono.plan.batch_order import BatchOrder
from unisono.train.batches.batch_source import Assignment
from unisono.train.collective import Collective
from unisono.train.gradient_pass import GradientPass
from unisono.train.guarantees.loop_checks import LoopChecks
from unisono.train.guarantees.user_errors import refuse_hooks
from unisono.train.modules.models import Models
from unisono.train.optimization.grad_norm import clip_, total_norm
from unisono.train.state.run_progress import Progress
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS, StepSync


class Synchronizer(Protocol):
    """Complete the gradient of a pass. `steps_optimizers`: whether optimizers step on this process."""

    steps_optimizers: bool

    @property
    def group(self) -> ProcessGroup: ...

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> GradientPass: ...

    def begin(self, step: StepState, gradient: GradientPass, assignment: Assignment) -> None: ...

    def synchronize(self, step: StepState, gradient: GradientPass) -> None: ...

    def commit(self, step: StepState, gradient: GradientPass) -> None: ...

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float: ...

    def close(self) -> None: ...


class GradientSync:
    """Synchronize the gradients of the processes that run steps together.

    mesh      the mesh of these processes
    block     [lo, hi) of the virtual ranks whose steps they run together
    """

    steps_optimizers = True

    def __init__(
        self,
        settings: Settings,
        mesh: Mesh,
        models: Models,
        step_sync: StepSync,
        scale: LossScale,
        exchange_states: ExchangeStates,
        checks: LoopChecks,
        progress: Progress,
        collective: Collective,
        *,
        seed_update: Callable[[StepState], None],
        custom: CustomExchange | None = None,
    ) -> None:
        self.settings, self.mesh, self.models = settings, mesh, models
        self.step_sync, self.scale = step_sync, scale
        self.block = (0, settings.virtual_ranks)
        self._exchange_states, self._checks, self._progress = exchange_states, checks, progress
        self._collective, self._seed_update, self._custom = collective, seed_update, custom
        self._gradients: dict[tuple[int, ...], GradientPass] = {}
        self._whole: GradientPass | None = None  # the gradient of all parameters

    @property
    def group(self) -> ProcessGroup:
        """The processes that run steps together."""
        return self.mesh.world

    @property
    def order(self) -> BatchOrder:
        """The order of samples."""
        return self._checks.order

    @property
    def gradients(self) -> Sequence[GradientPass]:
        """The gradients of all passes so far."""
        return list(self._gradients.values())

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> GradientPass:
        """Return the gradient of all parameters that are trained now, or only of those of some optimizers.

        Args:
            optimizers: the optimizers; None: all parameters.
            waiting: whether an optimizer has not yet used another gradient of the same step.
        """
        models = self.models
        models.reshard()
        if models.check_growth():  # some parameters were frozen or unfrozen, or are new
            if waiting:
                raise LoopError(
                    "step.over cannot begin another pass of this step.",
                    "Parameters were frozen or unfrozen, or are new, while the gradient of an earlier pass waits.",
                    "update first; a pass needs nothing frozen: only its optimizers' parameters get a gradient.",
                )
            self.forget()
            refuse_hooks(models.trained, models.names, self.settings.virtual_ranks)
        if optimizers is None and self._whole is not None:
            return self._whole
        params = self._params_of(optimizers)
        key = tuple(map(id, params))
        if key not in self._gradients:
            self._gradients[key] = self._build(params, only=optimizers is not None)
        if optimizers is None:
            self._whole = self._gradients[key]
        return self._gradients[key]

    def _params_of(self, optimizers: Sequence[Any] | None) -> list[torch.nn.Parameter]:
        chosen = self.models.params
        if optimizers is not None:
            held = {id(p) for o in optimizers for group in getattr(o, "param_groups", []) for p in group["params"]}
            chosen = [p for p in chosen if id(p) in held]
        refuse_dtypes(chosen, self.settings.compress)
        params = [p for p in chosen if p.requires_grad]
        if optimizers is not None and not params:
            names = " and ".join(type(o).__name__ for o in optimizers) or "nothing"
            raise LoopError(
                f"step.over was given {names}.",
                "It holds no parameter of a placed model that needs a gradient.",
                "pass the optimizers whose parameters this pass is for: step.over(optimizer).",
            )
        return params

    def _build(self, params: Sequence[torch.nn.Parameter], *, only: bool) -> GradientPass:
        models = self.models
        gradient = GradientPass(
            params,
            models.names,
            self.settings,
            self.mesh,
            models.layers,
            models.pipeline,
            only=only,
            custom=self._custom,
        )
        if models.comm_hook is not None:
            gradient.exchange.register_comm_hook(*models.comm_hook)  # type: ignore[attr-defined]
        trained = [models.names.get(id(p), "") for p in models.trained]
        self._exchange_states.register(gradient.key, gradient.exchange, trained)
        return gradient

    # -- a pass

    def begin(self, step: StepState, gradient: GradientPass, assignment: Assignment) -> None:
        """Begin a pass with the virtual ranks of this assignment."""
        self.begin_exchange(gradient, assignment)
        if self.settings.virtual_ranks > 1:
            bounds = self._checks.order.micro_bounds
            self.models.buffers.begin(next(v for v in range(*self.block) if bounds(step.number, v)))
            self._checks.begin(gradient)

    def begin_exchange(self, gradient: GradientPass, assignment: Assignment) -> None:
        """Begin the exchange of a pass, or begin it again after a death."""
        span = assignment.span
        gradient.begin(assignment.spans, assignment.pieces, lambda: self.step_sync.weights(span) * self.scale.value)
        self.models.busy = True

    def synchronize(self, step: StepState, gradient: GradientPass) -> None:
        """Complete the gradient of a pass: afterward p.grad is the mean gradient on every process.

        All collectives in here can be repeated until all processes hold the gradient. `commit` follows.
        """
        several = self.settings.virtual_ranks > 1
        buffers, exchange = self.models.buffers, gradient.exchange
        if several:
            self._checks.check_forward(step)  # before anything is sent: this process reports the error
        exchange.launch()
        self.models.busy = False
        gradient.seen = True
        flags = {
            **self._progress.requests,
            **buffers.flags,
            "unused": not all(exchange.used),
            "touched": exchange.touched,
            "joins": self._has_joiners(),
            "learns": bool(gradient.params),
            "verified": step.is_verified,
        }
        step.totals = totals = self.step_sync.reduce(flags, step.report)
        self._progress.agreed = agreed = totals.flags
        if agreed["touched"]:
            raise gradient_modified_error()
        if not agreed["learns"]:  # in no stage of a pipeline; without a pipeline, an earlier check raises the error
            raise self.models.nothing_trains_error()
        loss, weight = totals.sums.get(LOSS, (0.0, 0.0))
        step.loss_is_finite = self._checks.check_totals(step, loss, weight, totals.losses)
        step.gathered = None
        if several:
            self._checks.check_buffers(step, changed=bool(agreed["norms"] or agreed["buffers"]))
            step.gathered = buffers.gather(agreed)
        gradient.end_gathering()
        is_whole = exchange.finish(weight * self.scale.value)
        gradient.agree(is_whole, unused=bool(agreed["unused"]))

    def _has_joiners(self) -> bool:
        monitor = self.group.monitor
        return monitor is not None and monitor.join_requested

    def commit(self, step: StepState, gradient: GradientPass) -> None:
        """Apply the local effects of a pass, when the gradient is complete on all processes."""
        exchange = gradient.exchange
        self.step_sync.forget()
        self._progress.bytes_sent += exchange.sent
        self._progress.bytes_uncompressed += exchange.plain
        gradient.finite &= step.loss_is_finite
        gradient.may_skip = self.scale.may_skip
        if step.gathered is not None:
            gathered, step.gathered = step.gathered, None
            self.models.settle_growth(gathered)
        self._seed_update(step)
        step.sums = {**step.sums, **step.totals.sums} if step.passes else step.totals.sums

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float:
        """Return the 2-norm of the gradient of these parameters, and clip it to `limit`, if there is one.

        With one virtual rank, both operations are torch's own, to the bit. An exception is a model with sharded
        tensors, because torch does not mix sharded and whole gradients. In all other cases neither depends on the
        placement (grad_norm.py).
        """
        grads = [p.grad for p in params if p.grad is not None]
        if self.settings.virtual_ranks == 1 and not any(map(is_dtensor, grads)):
            norm_of_torch = torch.nn.utils.get_total_norm(grads)
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_(params, limit, norm_of_torch)
            return float(norm_of_torch)
        pipeline = self.models.pipeline
        if pipeline is None:
            norm = total_norm(grads, self.mesh, self._collective.run)
        else:
            norm = pipeline.names.total_norm(params)
        if limit is not None:
            clip_(grads, limit, norm)
        return norm

    # -- changes of processes and parameters

    def restart(self) -> None:
        """Rebuild every exchange when its next pass begins, because the group of processes has changed."""
        for gradient in self._gradients.values():
            gradient.stale = True

    def set_bucket_size(self, megabytes: float) -> None:
        """Send gradients in buckets of another size from the next pass on. All processes call this together."""
        self.settings = replace(self.settings, tree=replace(self.settings.tree, bucket_mb=megabytes))
        for gradient in self._gradients.values():
            gradient.settings, gradient.stale = self.settings, True

    def split(self, mesh: Mesh, block: tuple[int, int]) -> None:
        """Let the processes of `mesh` run steps by themselves over these virtual ranks, from the next step on."""
        self.forget()
        self.mesh, self.block = mesh, block

    def forget(self) -> None:
        """Close all exchanges, because the set of trained parameters has changed."""
        for gradient in self._gradients.values():
            gradient.close()
        self._gradients, self._whole = {}, None
        self._exchange_states.forget()

    def close(self) -> None:
        """Release the parameters. A second call has no effect."""
        self.forget()
