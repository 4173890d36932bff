"""The engine behind `run.steps`: fetches, seeds, exchanges, and tells what does not fit. One for each run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from unisono.data.loader import Collate, Loader, Schedule
from unisono.data.seeding import Generators, seed_everything
from unisono.data.streams import lies_in
from unisono.errors import DataError, LoopError
from unisono.parallel.precision import LossScale
from unisono.score.keys import ROUND, STEP, UPDATE, mix, place_key
from unisono.score.order import Order, Place
from unisono.score.placement import place_evenly
from unisono.train.buffers import versions, watch_samples
from unisono.train.gradient import Gradient
from unisono.train.models import Models
from unisono.train.step import Step
from unisono.train.table import LOSS, Table

if TYPE_CHECKING:
    from unisono.settings import Settings
    from unisono.world.collectives import Group


BLOCK = 1 << 16
"""Elements of a parameter that are looked at together: eight bytes each are needed beside it."""


class Engine:
    """What a step needs from the run, in one place."""

    def __init__(
        self,
        settings: Settings,
        group: Group,
        order: Order,
        loader: Loader,
        schedule: Schedule,
        models: Models,
        last: int,
        table: Table,
        generators: Generators,
        scale: LossScale,
    ) -> None:
        self.settings, self.group, self.order = settings, group, order
        self.schedule, self.models, self.last = schedule, models, last
        self.table, self.generators, self.scale = table, generators, scale
        self.asked = {"stop": False, "leave": False}
        self.agreed: Mapping[str, int] = self.asked
        self.steppers: list[Any] = []
        self._held: dict[int, int] = {}  # how many parameters each optimizer had when we looked
        self._versions: list[int] = []  # of the parameters, when the pass began
        self._held_bits: list[int] = []  # what was in them, at a first pass
        self._begun = False
        self._known_pieces: dict[tuple[int, tuple[int, int]], dict[int, int]] = {}
        self._gradients: dict[tuple[int, ...], Gradient] = {}
        self._whole: Gradient | None = None  # the one of all parameters
        self._loader, self._batches = loader, iter(loader)
        self._step_key, self._round_key, self._update_key = (mix(order.seed, key) for key in (STEP, ROUND, UPDATE))
        self._accelerator = group.device if group.device.type != "cpu" else None

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

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> Gradient:
        """The gradient of all parameters that train now, or of these optimizers' alone. `waiting`: is another, of the
        same step, not used yet?"""
        if self.models.look():  # some were frozen or unfrozen, or are new
            if waiting:
                raise LoopError(
                    "step.over was asked for another pass of a step.",
                    "Parameters were frozen or unfrozen, or are new, while the gradient of an earlier pass waits.",
                    "update first; a pass needs nothing frozen: only its optimizers' parameters get a gradient.",
                )
            self._forget()
            self._refuse_hooks()
        if optimizers is None and self._whole is not None:
            return self._whole
        params = self.models.trained
        if optimizers is not None:
            asked = {id(p) for o in optimizers for group in getattr(o, "param_groups", []) for p in group["params"]}
            params = [p for p in params if id(p) in asked]
            if not params:
                names = " and ".join(type(o).__name__ for o in optimizers) or "nothing"
                raise LoopError(
                    f"step.over was given {names}.",
                    "It holds no parameter of a placed model that needs a gradient.",
                    "pass the optimizers whose parameters this pass is for: step.over(optimizer).",
                )
        key = tuple(map(id, params))
        if key not in self._gradients:
            only = optimizers is not None
            self._gradients[key] = Gradient(params, self.models.names, self.settings, self.group, only=only)
        if optimizers is None:
            self._whole = self._gradients[key]
        return self._gradients[key]

    def micro_batches(
        self, step: int, number: int, gradient: Gradient, kept: list[tuple[Place, Any]] | None
    ) -> Iterator[tuple[Place, Any, bool]]:
        """(place, batch, is it this process's last) for every micro-batch of this process in pass `number` of `step`.

        The first pass fetches them, and leaves them in `kept` if there is such a list; the others find them there.
        """
        spans = self.schedule.at(step)
        span = spans[self.group.rank]
        pieces = self._pieces(step, span)
        gradient.begin(spans, pieces, lambda: self.table.weights(span) * self.scale.value)
        buffers = self.models.buffers
        if self.order.virtual_ranks > 1:
            buffers.begin(next(v for v in range(self.order.virtual_ranks) if self.order.micro_bounds(step, v)))
            self._versions = versions(self.models.params)
            if not gradient.seen:
                self._held_bits = [bits_of(p) for p in self.models.params]
        for i in range(count := sum(pieces.values())):
            place, batch = self._fetch(step, kept) if number == 0 else self._again(number, kept, i)
            left = count - 1 - i
            buffers.enter(place.virtual_rank)
            if gradient.seen:
                yield place, batch, left == 0
            else:
                with self._watched(place):
                    yield place, batch, left == 0
        buffers.leave()

    def _fetch(self, step: int, kept: list[tuple[Place, Any]] | None) -> tuple[Place, Any]:
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

    def _again(self, number: int, kept: list[tuple[Place, Any]] | None, i: int) -> tuple[Place, Any]:
        """What the first pass has fetched, under this pass's own key."""
        assert kept is not None
        place, batch = kept[i]
        if self.order.virtual_ranks > 1:  # otherwise there is one stream, as in plain torch
            seed_everything(mix(place_key(self._round_key, *place), number), self._accelerator)
        return place, batch

    def _pieces(self, step: int, span: tuple[int, int]) -> dict[int, int]:
        """How many micro-batches each virtual rank of the span has in `step`: only the size of the batch decides."""
        known = self._known_pieces.get((size := self.order.batch_size(step), span))
        if known is None:
            known = {v: len(self.order.micro_bounds(step, v)) for v in range(*span)}
            self._known_pieces[size, span] = known
        return known

    def meet(self, step: Step, number: int, gradient: Gradient) -> dict[str, tuple[float, float]]:
        """The sums of the step's pass over all processes; afterwards p.grad is the mean gradient everywhere."""
        gradient.exchange.launch()
        if self.order.virtual_ranks > 1:
            self._check_forward(step)
        gradient.seen = True
        buffers = self.models.buffers
        totals = self.table.meet({**self.asked, "unused": not all(gradient.exchange.used), **buffers.flags})
        self.agreed = agreed = totals.flags
        loss, weight = totals.sums.get(LOSS, (0.0, 0.0))
        finite = self._check_totals(step, loss, weight, totals.losses)
        gradient.finish(weight * self.scale.value, unused=bool(agreed["unused"]))
        gradient.finite &= finite
        gradient.may_skip = self.scale.may_skip
        if self.order.virtual_ranks > 1:
            buffers.meet(norms=agreed["norms"] > 0, buffers=agreed["buffers"] > 0, spans=self.schedule.at(step.number))
            # what comes now (noise on p.grad, say) must not depend on who computed what
            key = mix(self._update_key, step.number, *([number] if number else []))
            seed_everything(key, self._accelerator)
        return totals.sums

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

    def _forget(self) -> None:
        for gradient in self._gradients.values():
            gradient.close()
        self._gradients, self._whole = {}, None

    # -- what does not fit

    def _refuse_hooks(self) -> None:
        """A hook that runs after accumulation sees whatever this process has added up so far."""
        if self.order.virtual_ranks == 1:
            return
        for p in self.models.trained:
            if p._post_accumulate_grad_hooks:
                name = self.models.names.get(id(p), "A parameter")
                raise LoopError(
                    "run.steps was asked for a step.",
                    f"{name} of shape {tuple(p.shape)} has a hook of its own that runs after its gradient is "
                    "accumulated, and what has been accumulated then depends on the placement.",
                    "use p.register_hook (it sees one micro-batch's gradient), or change p.grad after the rounds.",
                )

    def check_first_loss(self, loss: Any, mean: bool) -> None:
        """The first step's losses are looked at closely: the mistakes that are made are made in every step."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise LoopError(
                "step.backward was given a loss that is not one number.",
                f"It is {shape}.",
                'sum it: loss.sum(), or reduction="sum".',
            )
        if not loss.requires_grad:
            raise LoopError(
                "step.backward was given a loss without a graph.",
                "It does not depend on any parameter that needs a gradient.",
                "look for torch.no_grad, .detach(), .item() or frozen parameters between the model and the loss.",
            )
        found = None if mean else _visible_mean(loss.grad_fn)
        if found:
            raise LoopError(
                "step.backward was given a loss that is a mean.",
                f"It was made by {found}; the step needs a sum, to divide by the total weight itself.",
                'use reduction="sum" and weight=<how many it sums>, or say step.backward(loss, weight, mean=True).',
            )

    def _check_totals(self, step: Step, loss: float, weight: float, losses: list[float]) -> bool:
        """Is the loss finite? Refuse what cannot be divided, and a loss that no smaller scale would mend."""
        if not weight > 0:
            raise LoopError(
                f"Step {step.number} was to be divided by its total weight.",
                f"The total weight of its {step.samples} samples over all processes is {weight:g}"
                + (", since no round called step.backward." if weight == 0 else "."),
                "call step.backward(loss, weight) in `for batch in step:` with a weight above 0 in some round.",
            )
        if not math.isfinite(loss) and not self.scale.may_skip:
            bad = [v for v, row in enumerate(losses) if not math.isfinite(row)]
            raise LoopError(
                f"Step {step.number} has a loss of {loss}.",
                f"It comes from virtual rank {bad[0]} of {self.order.virtual_ranks}"
                f" (samples {self._samples(step.number, bad[0])}).",
                "look at these samples, lower the learning rate, or clip the gradient (--set clip=1.0).",
            )
        return math.isfinite(loss)

    def _samples(self, step: int, virtual_rank: int) -> str:
        samples = [i for micro_batch in self.order.micro_batches(step, virtual_rank) for i in micro_batch]
        return ", ".join(map(str, samples[:8])) + (f", ... {len(samples)} in all" if len(samples) > 8 else "")

    def know(self, optimizer: Any) -> None:
        """Look at an optimizer when it is first stepped: can it step here, and does it hold parameters of the run?"""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if self._held.get(id(optimizer)) == count:
            return
        if isinstance(optimizer, torch.optim.SparseAdam) and self.order.virtual_ranks > 1:
            raise LoopError(
                "step.update was given SparseAdam.",
                f"It takes sparse gradients only, and those of {self.order.virtual_ranks} virtual ranks are added up "
                "as dense ones.",
                "use AdamW, or --set virtual_ranks=1.",
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise LoopError(
                "step.update was given LBFGS.",
                "It calls a closure several times a step, and a step here is one gradient.",
                "use an optimizer that takes no closure.",
            )
        ours = {id(p) for p in self.models.trained}
        strange = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and id(p) not in ours]
        if strange:
            raise LoopError(
                f"step.update was given {type(optimizer).__name__}.",
                f"{len(strange)} of its parameters belong to no placed model, so their gradients would not be "
                f"exchanged; the first has shape {tuple(strange[0].shape)}.",
                "make every model that trains with run.place, and the optimizer from the model it returns; let a model "
                "grow between two steps.",
            )
        if id(optimizer) not in self._held:
            self.steppers.append(optimizer)
        self._held[id(optimizer)] = count

    def know_schedule(self, schedule: Any) -> None:
        """Look at a schedule when it is first stepped."""
        if any(known is schedule for known in self.steppers):
            return
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise LoopError(
                "step.update was given ReduceLROnPlateau.",
                "It needs a metric, which step.update does not have.",
                "call schedule.step(metric) yourself, with a value that is equal everywhere (run.evaluate's is).",
            )
        self.steppers.append(schedule)

    def _check_forward(self, step: Step) -> None:
        """A parameter that forward changes is state outside the tree. (With one virtual rank it may.)"""
        params = self.models.params
        bits, self._held_bits = self._held_bits, []
        secretly = [bits_of(p) != was for p, was in zip(params, bits, strict=False)] or [False] * len(params)
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

    @contextmanager
    def _watched(self, place: Place) -> Iterator[None]:
        """In the first step it is seen whether a batch norm normalises over samples, and whether it always can."""
        bounds = self.order.micro_bounds(place.step, place.virtual_rank)[place.number]
        hooks = []
        if self.order.virtual_ranks > 1 and self.order.smallest(self.last) == 1:
            hooks = watch_samples(self.models.batch_norms(), bounds[1] - bounds[0], self._alone)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _alone(self, name: str) -> LoopError:
        order = self.order
        where = "every step" if min(order.sizes(0)) == 1 else f"the last step of every epoch of {order.length} samples"
        return LoopError(
            f"The batch norm {name} was to normalise micro-batches of a batch of {order.batch}.",
            f"In {where} some of the {order.virtual_ranks} virtual ranks have a micro-batch of one sample, whose "
            "variance says nothing.",
            self._better_batch(),
        )

    def _better_batch(self) -> str:
        """The nearest batch without a micro-batch of one sample, as a line to type."""
        order = self.order
        known = range(2, 2 * (order.batch + order.virtual_ranks) + 1)
        for batch in sorted(known, key=lambda b: abs(b - order.batch)):
            if replace(order, batch=batch).smallest(self.last) > 1:
                return f"--set batch={batch}, or fewer --set virtual_ranks, or GroupNorm."
        for fewer in range(order.virtual_ranks - 1, 0, -1):
            if replace(order, virtual_ranks=fewer).smallest(self.last) > 1:
                return f"--set virtual_ranks={fewer}, or GroupNorm."
        return "use GroupNorm, or more data."


def bits_of(tensor: torch.Tensor) -> int:
    """A number that stands for what is in a tensor, made without a copy of it: every element's bits, by its place."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    places = torch.arange(min(BLOCK, len(words)), device=flat.device)
    odd = 2 * (places * places) + 1  # so that no change of a bit is lost
    found = 0
    for i, block in enumerate(words.split(BLOCK)):
        found = mix(found, i, int((block * odd[: len(block)]).sum()))
    return found


def build_engine(
    kind: type[Engine],
    data: Any,
    *,
    settings: Settings,
    group: Group,
    models: Models,
    table: Table,
    generators: Generators,
    scale: LossScale,
    shuffle: bool,
    collate: Collate | None,
    first: int,
    last: int,
) -> Engine:
    """The engine for steps `first` to `last` - 1 over this data, with its order, its placement and its loader."""
    shards, window = lies_in(data)
    order = Order(
        length=len(data),
        batch=settings.batch,
        virtual_ranks=settings.virtual_ranks,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
        shuffle=shuffle,
        shards=shards,
        window=window,
    )
    schedule = Schedule(place_evenly(settings.virtual_ranks, group.size))
    loader = Loader(
        data,
        order,
        schedule,
        rank=group.rank,
        first=first,
        last=last,
        device=group.device,
        collate=collate,
        workers=settings.loader.workers,
        prefetch=settings.loader.prefetch,
        keyed=settings.virtual_ranks > 1,
    )
    return kind(settings, group, order, loader, schedule, models, last, table, generators, scale)


def _visible_mean(node: Any, depth: int = 8) -> str | None:
    """The name of the operator that made a loss a mean, where it shows: at its end, or in a term of a sum."""
    if node is None or depth == 0:
        return None
    name = node.name().removesuffix("0").removesuffix("Backward")
    if name.startswith("Mean") or getattr(node, "_saved_reduction", None) == 1:
        return f"{name}, whose reduction is 'mean'"
    if name.startswith(("Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Reshape")):
        return next((f for n, _ in node.next_functions if (f := _visible_mean(n, depth - 1))), None)
    return None
