"""The engine behind `run.steps`: fetches, seeds, exchanges, and tells what does not fit. One for each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.config.validate_sizes import number_of_sites
from unisono.data.loader import Loader, Schedule
from unisono.data.rng import RngStates, seed_everything
from unisono.distributed.process_group import is_dtensor, to_local
from unisono.errors import DataError, LoopError
from unisono.exchange.buckets import gradient_modified_error
from unisono.exchange.choose import refuse_numbers
from unisono.exchange.exchange_state import ExchangeStates
from unisono.exchange.wrappers.custom import CustomExchange
from unisono.parallel.precision import LossScale
from unisono.plan.assignment import Slot, Spans, assign_evenly
from unisono.plan.batch_order import BatchOrder, MicroBatchId
from unisono.plan.rng_keys import ROUND, STEP, UPDATE, micro_batch_key, mix
from unisono.tensors.digest import tensor_hashes
from unisono.train.balance.rebalance import Rebalancer
from unisono.train.gradient_pass import GradientPass
from unisono.train.guarantees.user_errors import (
    check_optimizer,
    check_schedule,
    refuse_changing_buffers,
    refuse_hooks,
    single_sample_error,
)
from unisono.train.modules.buffer_sync import NOTHING, Gathered, versions, watch_samples
from unisono.train.modules.models import Models
from unisono.train.optimization.grad_norm import clip_, total_norm
from unisono.train.optimization.sharded_step import prepare
from unisono.train.step import Step
from unisono.train.step_sync import LOSS, StepSync
from unisono.train.verification.no_verification import NOT_VERIFIED, NoVerification

if TYPE_CHECKING:
    from unisono.config import Settings
    from unisono.distributed.mesh import Mesh
    from unisono.train.diagnostics.divergence import DivergenceCheck
    from unisono.train.diagnostics.redundant_compute import RedundantCompute
    from unisono.train.recovery.shard_replica import ShardReplica
    from unisono.train.recovery.step_recovery import StepRecovery
    from unisono.train.verification.verification import Verification


class StepLoop:
    """What a step needs from the run, in one place. `buddy`: who copies shards, if that is asked for."""

    buddy: ShardReplica | None = None

    own: CustomExchange | None = None  # the script's own exchange
    audit: RedundantCompute | None = None
    divergence: DivergenceCheck | None = None
    verification: Verification | NoVerification = NOT_VERIFIED
    survivors: StepRecovery | None = None  # who goes on when a process dies; None: nobody can
    run_dir = "RUN"
    """As one types it, in a line that a message proposes."""

    open_loader: Callable[[Schedule, Slot, int], Loader]  # from a step on

    def __init__(
        self,
        settings: Settings,
        mesh: Mesh,
        seat: Slot,
        order: BatchOrder,
        loader: Loader,
        schedule: Schedule,
        models: Models,
        last: int,
        table: StepSync,
        generators: RngStates,
        scale: LossScale,
        carried: ExchangeStates,
    ) -> None:
        self.settings, self.mesh, self.seat, self.order = settings, mesh, seat, order
        self.group = mesh.world
        self.block = (0, order.virtual_ranks)  # those whose steps are made together
        self.schedule, self.models, self.last = schedule, models, last
        self.table, self.generators, self.scale, self.carried = table, generators, scale, carried
        self.asked = {"stop": False, "leave": False}
        self.agreed: Mapping[str, int] = self.asked
        self.steppers: list[Any] = []
        self.sent = self.plain = 0.0  # bytes of gradients, since the run began here; without compressing
        self._held: dict[int, int] = {}  # how many parameters each optimizer had when we looked
        self._versions: list[int] = []  # of the parameters, when the pass began
        self._held_bits: list[int] = []  # what was in them, at a first pass
        self._begun = False
        self._known_pieces: dict[tuple[int, tuple[int, int]], dict[int, int]] = {}
        self._gradients: dict[tuple[int, ...], GradientPass] = {}
        self._whole: GradientPass | None = None  # the one of all parameters
        self._loader, self._batches = loader, iter(loader)
        self._step_key, self._round_key, self._update_key = (mix(order.seed, key) for key in (STEP, ROUND, UPDATE))
        self._accelerator = self.group.device if self.group.device.type != "cpu" else None
        self._met: tuple[dict[str, tuple[float, float]], bool, Gathered] | None = None  # what a pass has come to
        self.dealing: Rebalancer | None = None
        """Who watches how long the processes take, and deals anew, if somebody does."""

    @staticmethod
    def spans(settings: Settings, mesh: Mesh, size: int) -> Spans:
        """What each of `size` processes computes of every batch, unless somebody deals anew."""
        return assign_evenly(settings.virtual_ranks, size, number_of_sites(settings))

    @classmethod
    def seated(cls, settings: Settings, mesh: Mesh) -> tuple[Slot, Schedule]:
        """Where this process sits, and what each computes. Those who share layers compute one span in turn."""
        seat, line = Slot(mesh.data.rank), mesh.data
        if mesh.shard.size > 1 and settings.parallel.reshard == "layer":
            seat, line = Slot(mesh.replicate.rank, mesh.shard.rank, mesh.shard.size), mesh.replicate
        return seat, Schedule(cls.spans(settings, mesh, line.size))

    # -- a step

    def new_step(self, number: int) -> Step:
        return Step(self, number)

    def before_step(self, step: int) -> None:
        """Seed for what the loop does before its rounds: the same on every process, and after a resume.

        With one virtual rank there is one stream of random numbers, as in plain torch, and the checkpoint keeps it.
        """
        if self.order.virtual_ranks == 1:
            began, self._begun = self._begun, True
            if began or self.generators.give():
                return
        seed_everything(mix(self._step_key, step), self._accelerator)

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> GradientPass:
        """The gradient of all parameters that train now, or of these optimizers' alone. `waiting`: is another, of the
        same step, not used yet?"""
        self.models.reshard()
        if self.models.check_growth():  # some were frozen or unfrozen, or are new
            if waiting:
                raise LoopError(
                    "step.over was asked for another pass of a step.",
                    "Parameters were frozen or unfrozen, or are new, while the gradient of an earlier pass waits.",
                    "update first; a pass needs nothing frozen: only its optimizers' parameters get a gradient.",
                )
            self._forget()
            refuse_hooks(self.models.trained, self.models.names, self.order.virtual_ranks)
        if optimizers is None and self._whole is not None:
            return self._whole
        asked = self.models.params
        if optimizers is not None:
            held = {id(p) for o in optimizers for group in getattr(o, "param_groups", []) for p in group["params"]}
            asked = [p for p in asked if id(p) in held]
        refuse_numbers(asked, self.settings.compress)
        params = [p for p in asked if p.requires_grad]
        if optimizers is not None and not params:
            names = " and ".join(type(o).__name__ for o in optimizers) or "nothing"
            raise LoopError(
                f"step.over was given {names}.",
                "It holds no parameter of a placed model that needs a gradient.",
                "pass the optimizers whose parameters this pass is for: step.over(optimizer).",
            )
        key = tuple(map(id, params))
        if key not in self._gradients:
            only, models = optimizers is not None, self.models
            self._gradients[key] = GradientPass(
                params, models.names, self.settings, self.mesh, models.layers, models.pipeline, only=only, own=self.own
            )
            if models.comm_hook is not None:
                self._gradients[key].exchange.register_comm_hook(*models.comm_hook)  # type: ignore[attr-defined]
            trained = [models.names.get(id(p), "") for p in models.trained]
            self.carried.register(self._gradients[key].key, self._gradients[key].exchange, trained)
        if optimizers is None:
            self._whole = self._gradients[key]
        return self._gradients[key]

    def micro_batches(
        self, step: int, number: int, gradient: GradientPass, kept: list[tuple[MicroBatchId, Any]] | None
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        """(place, batch, is it this process's last) for every micro-batch of this process in pass `number` of `step`.

        The first pass fetches them, and leaves them in `kept` if there is such a list; the others find them there.
        """
        spans = self.schedule.at(step)
        span, dealing = spans[self.seat.span], self.dealing
        claimed = dealing is not None and dealing.claimed(number)
        if claimed:  # whoever is free computes whatever is left
            spans, span = (), (0, self.order.virtual_ranks)
        pieces = self._pieces(step, span)
        gradient.begin(spans, pieces, lambda: self.table.weights(span) * self.scale.value)
        self.models.busy = True
        if self.order.virtual_ranks > 1:
            self.models.buffers.begin(next(v for v in range(*self.block) if self.order.micro_bounds(step, v)))
            self._versions = versions(self.models.params)
            if not gradient.seen:
                self._held_bits = self._param_hashes()
        if dealing is not None and number == 0:
            dealing.begin()
        rounds = self._claimed(step, kept) if claimed else self._dealt(step, kept, sum(pieces.values()))
        if number and kept is not None and self.survivors is not None:
            self.survivors.refetch(kept, step, pieces)
        rounds = rounds if number == 0 else self._again(number, kept or [], overlap=not claimed)
        yield from self._walk(rounds, number, gradient)

    def _walk(
        self, rounds: Iterator[tuple[MicroBatchId, Any, bool]], number: int, gradient: GradientPass
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        """These rounds, each with the buffers and generators that it begins with."""
        buffers, dealing = self.models.buffers, self.dealing
        for place, batch, last in rounds:
            buffers.enter(place.virtual_rank, spare=place.spare)
            if gradient.seen and not self.models.divided_loss:
                yield place, batch, last
            else:
                with self.round_context(place, gradient):
                    yield place, batch, last
            if dealing is not None and number == 0:
                dealing.done(self.order.micro_bounds(place.step, place.virtual_rank)[place.number])
        buffers.leave()

    def _dealt(
        self, step: int, kept: list[tuple[MicroBatchId, Any]] | None, pieces: int
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        """The micro-batches of our span, each with whether it is the last; those that fetch in turn take their part."""
        for left in reversed(range(-(-pieces // self.seat.turns))):
            yield *self._fetch(step, kept), left == 0

    def _claimed(
        self, step: int, kept: list[tuple[MicroBatchId, Any]] | None
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        """Those of the virtual ranks that are ours because we were free. Nobody knows which is the last one."""
        assert self.dealing is not None
        assert self.dealing.claims is not None
        spans = self.schedule.at(step)
        pieces = self._pieces(step, (0, self.order.virtual_ranks))
        ahead = sum(pieces[v] for v in range(*spans[self.seat.span]))  # fetched ahead, or about to be
        for virtual_rank, at_home in self.dealing.claims.virtual_ranks_of(
            step, spans, [v for v in pieces if pieces[v]]
        ):
            for number in range(pieces[virtual_rank]):
                if at_home:
                    ahead -= 1
                    yield *self._fetch(step, kept), False
                    continue
                fetched = self._loader.fetch(MicroBatchId(step, virtual_rank, number))
                if kept is not None:
                    kept.append(fetched)
                yield *fetched, False
        self._loader.skip(ahead, self._batches)

    def _fetch(self, step: int, kept: list[tuple[MicroBatchId, Any]] | None) -> tuple[MicroBatchId, Any]:
        try:
            fetched = next(self._batches)
        except StopIteration:
            raise DataError(
                f"Step {step} was asked for its micro-batches.", "The data set ended early.", "check its __len__."
            ) from None
        assert fetched[0].step == step
        if kept is not None:
            kept.append(fetched)
        return fetched

    def _again(
        self, number: int, kept: list[tuple[MicroBatchId, Any]], *, overlap: bool
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        """What the first pass has fetched, under this pass's own key."""
        for i, (place, batch) in enumerate(kept):
            if self.order.virtual_ranks > 1:  # otherwise there is one stream, as in plain torch
                seed_everything(mix(micro_batch_key(self._round_key, *place[:3]), number), self._accelerator)
            yield place, batch, overlap and i + 1 == len(kept)

    def _pieces(self, step: int, span: tuple[int, int]) -> dict[int, int]:
        """How many micro-batches each virtual rank of the span has in `step`: only the size of the batch decides."""
        known = self._known_pieces.get((size := self.order.batch_size(step), span))
        if known is None:
            known = {v: len(self.order.micro_bounds(step, v)) for v in range(*span)}
            self._known_pieces[size, span] = known
        return known

    def synchronize(self, step: Step, number: int, gradient: GradientPass) -> dict[str, tuple[float, float]]:
        """The sums of the step's pass over all processes; afterwards p.grad is the mean gradient everywhere."""
        self._synchronize(step, number, gradient)
        return self.commit(step, number, gradient)

    def _synchronize(self, step: Step, number: int, gradient: GradientPass) -> None:
        """Everything that processes do together: it can be made again, until the gradient is known to be whole."""
        if self.order.virtual_ranks > 1:  # before anything leaves, so that whoever has it says so, and not who waits
            self._check_forward(step)
        gradient.exchange.launch()
        self.models.busy = False
        gradient.seen = True
        buffers = self.models.buffers
        exchange = gradient.exchange
        joins = self.group.company is not None and self.group.company.knocks
        said = {**self.asked, "unused": not all(exchange.used), "touched": exchange.touched, **buffers.flags}
        said |= {"joins": joins, "learns": bool(gradient.params)}
        said["verified"] = self.verification.active
        if self.buddy is not None:
            self.buddy.settle()
        totals = self.table.reduce(said, () if self.dealing is None else self.dealing.say(self.horizon))
        if self.dealing is not None and number == 0:
            self.dealing.hear(step.number, totals.said)
        self.agreed = agreed = totals.flags
        self.verification.agree(int(agreed["verified"]), self.group.size)
        if agreed["touched"]:
            raise gradient_modified_error()
        if not agreed["learns"]:  # in no stage of a pipeline; otherwise `look` has said so before the step
            raise self.models.nothing_trains_error()
        loss, weight = totals.sums.get(LOSS, (0.0, 0.0))
        finite = self._check_totals(step, loss, weight, totals.losses)
        gathered = NOTHING
        if self.order.virtual_ranks > 1:
            self._refuse_changing(step, bool(agreed["norms"] or agreed["buffers"]))
            gathered = buffers.gather(agreed)
        self._met = totals.sums, finite, gathered
        gradient.finish(weight * self.scale.value, unused=bool(agreed["unused"]))

    def commit(self, step: Step, number: int, gradient: GradientPass) -> dict[str, tuple[float, float]]:
        """The gradient is whole everywhere: what this process makes of it by itself."""
        assert self._met is not None
        (sums, finite, gathered), self._met = self._met, None
        exchange = gradient.exchange
        self.table.forget()
        self.sent, self.plain = self.sent + exchange.sent, self.plain + exchange.plain
        gradient.finite &= finite
        gradient.may_skip = self.scale.may_skip
        if self.order.virtual_ranks > 1:
            self.models.settle_growth(gathered)
            # what comes now (noise on p.grad, say) must not depend on who computed what
            key = mix(self._update_key, step.number, *([number] if number else []))
            seed_everything(key, self._accelerator)
        if self.survivors is not None:
            self.survivors.report_survived()
        return sums

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float:
        """The 2-norm of the gradient of these parameters, before it is clipped to `limit`, if there is one. With one
        virtual rank both are torch's own, to the bit, unless matrices are cut: torch takes no cut gradients beside
        whole ones. Otherwise they do not depend on the placement (grad_norm.py)."""
        grads = [p.grad for p in params if p.grad is not None]
        if self.order.virtual_ranks == 1 and not any(map(is_dtensor, grads)):
            torchs = torch.nn.utils.get_total_norm(grads)
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_(params, limit, torchs)
            return float(torchs)
        pipe = self.models.pipeline
        norm = total_norm(grads, self.mesh, self.survivors) if pipe is None else pipe.names.total_norm(params)
        if limit is not None:
            clip_(grads, limit, norm)
        return norm

    @property
    def horizon(self) -> int:
        """No step from this one on has been dealt here."""
        return self._loader.horizon

    def end(self) -> None:
        """The last step is done: loader workers may go."""
        self._loader.close()
        self._batches = iter(())

    def close(self) -> None:
        """Let go of the data and of the parameters; closing twice changes nothing."""
        self.end()
        self._forget()

    def part(self, mesh: Mesh, block: tuple[int, int]) -> None:
        """From the next step on, the processes of `mesh` make their steps by themselves, over these virtual ranks."""
        self._forget()
        self.mesh, self.group, self.block = mesh, mesh.world, block

    def _forget(self) -> None:
        for gradient in self._gradients.values():
            gradient.close()
        self._gradients, self._whole = {}, None
        self.carried.forget()

    # -- what does not fit

    def _refuse_changing(self, step: Step, changing: bool) -> None:
        """A virtual rank's micro-batches may be computed by several processes, and then none knows its buffers."""
        if changing and self.models.pipeline is not None:
            raise self.models.pipeline.changing(step.number)
        if changing and self.seat.turns > 1:
            following = range(step.number, min(step.number + 2, self.last))  # an epoch's last batch may be a short one
            refuse_changing_buffers(step.number, max(map(self.order.batch_size, following)), self.settings)

    def _check_totals(self, step: Step, loss: float, weight: float, losses: list[float]) -> bool:
        """Is the loss finite? Refuse what cannot be divided, and a loss that no smaller scale would mend."""
        if not weight > 0:
            raise LoopError(
                f"Step {step.number} was to be divided by its total weight.",
                f"The total weight of its {step.samples} samples over all processes is {weight:g}"
                + (", since no round called step.backward with more." if weight == 0 else "."),
                "call step.backward(loss, weight) in `for batch in step:` with a weight above 0 in some round.",
            )
        if not math.isfinite(loss) and not self.scale.may_skip:
            bad = [v for v, row in enumerate(losses) if not math.isfinite(row)]
            raise LoopError(
                f"Step {step.number} has a loss of {loss}.",
                f"It comes from virtual rank {bad[0]} of {self.order.virtual_ranks}"
                f" (samples {self._samples(step.number, bad[0])}).",
                f"look at them: {self.replay(step.number)} --virtual-rank {bad[0]}; lower the learning rate, or clip "
                "the gradient (--set clip=1.0).",
            )
        return math.isfinite(loss)

    def replay(self, step: int) -> str:
        """What to type to see a step again."""
        return f"unisono replay {self.run_dir} --step {step}"

    def _samples(self, step: int, virtual_rank: int) -> str:
        samples = [i for micro_batch in self.order.micro_batches(step, virtual_rank) for i in micro_batch]
        return ", ".join(map(str, samples[:8])) + (f", ... {len(samples)} in all" if len(samples) > 8 else "")

    def register_optimizer(self, optimizer: Any) -> None:
        """Look at an optimizer when it is first stepped: can it step here, and does it hold parameters of the run?"""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if self._held.get(id(optimizer)) == count:
            return
        check_optimizer(optimizer, self.models.trained, self.order.virtual_ranks)
        prepare(optimizer)
        if id(optimizer) not in self._held:
            self.steppers.append(optimizer)
        self._held[id(optimizer)] = count

    def register_schedule(self, schedule: Any) -> None:
        """Look at a schedule when it is first stepped."""
        if not any(known is schedule for known in self.steppers):
            check_schedule(schedule)
            self.steppers.append(schedule)

    def _check_forward(self, step: Step) -> None:
        """A parameter that forward changes is state outside the tree. (With one virtual rank it may.)"""
        params = self.models.params
        hashes, self._held_bits = self._held_bits, []
        secretly = [now != was for now, was in zip(self._param_hashes() if hashes else [], hashes, strict=False)]
        secretly = secretly or [False] * len(params)
        for p, before, now, changed in zip(params, self._versions, versions(params), secretly, strict=True):
            if before != now or changed:
                raise LoopError(
                    f"The forward pass of step {step.number} changed the parameter {self.models.names.get(id(p), '')} "
                    f"of shape {tuple(p.shape)}.",
                    f"With {self.order.virtual_ranks} virtual ranks its value would depend on which process did what; "
                    "parameters may change between two steps only.",
                    "do it after step.update (Embedding without max_norm, and a line that renorms), or "
                    "--set virtual_ranks=1.",
                )

    def _param_hashes(self) -> list[int]:
        return tensor_hashes([to_local(p.detach()) for p in self.models.params], ordered=True)

    @contextmanager
    def round_context(self, place: MicroBatchId, gradient: GradientPass) -> Iterator[None]:
        """What the loop's body runs in. In the first step it is seen whether a batch norm normalises over samples, and
        whether it always can."""
        hooks = []
        if not gradient.seen and self.order.virtual_ranks > 1 and self.order.smallest(self.last) == 1:
            bounds = self.order.micro_bounds(place.step, place.virtual_rank)[place.number]
            hooks = watch_samples(
                self.models.batch_norms(), bounds[1] - bounds[0], partial(single_sample_error, self.order, self.last)
            )
        try:
            with self.models.around_loss():
                yield
        finally:
            for hook in hooks:
                hook.remove()
